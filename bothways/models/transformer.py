"""The Transformer of Vaswani et al., and BIFT: the same decoder run in both directions at once.

Directions are rows of a batch, not copies of a model: the number of streams and their tags decide. With two streams
and `interaction`, each layer's self-attention reads the partner too (nn/attention.py); nothing else differs.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bothways import kernels
from bothways.config import ModelConfig
from bothways.models.interface import Lattice, Memory, Seq2Seq
from bothways.nn.attention import Chains, History, SelfAttention, SourceAttention, SynchronousAttention, View, partner
from bothways.nn.fusion import fusion_of
from bothways.nn.layers import Embedding, FeedForward, SubLayer, embeddings_of, initialize, sinusoids
from bothways.stepwise import Clock, Distribution, State, roomier
from bothways.tokens import PAD

FEW_ROWS = 64  # hypotheses of a sentence that a kernel takes


@dataclass(frozen=True)
class TransformerMemory:
    """Encoded sources, ready for every decoder layer."""

    keys_values: tuple[tuple[Tensor, Tensor], ...]  # per layer, [B, H, S, d] twice
    mask: Tensor  # [B, 1, 1, S]

    def of_layer(self, i: int) -> tuple[Tensor, ...]:
        """What decoder layer i reads: keys, values and mask."""
        return (*self.keys_values[i], self.mask)

    def keep(self, sentences: Tensor) -> "TransformerMemory":
        """Only these sentences."""
        return TransformerMemory(tuple((k[sentences], v[sentences]) for k, v in self.keys_values), self.mask[sentences])


@dataclass(frozen=True)
class TransformerState:
    """Memory and histories. A select moves only the table of ancestors.

    Its entry [b, d, k, t] is the slot that hypothesis k descends from at step t, or -1 where it consumed nothing.
    """

    memory: TransformerMemory
    histories: tuple[History, ...]  # per layer
    ancestors: Tensor  # [B, D, K, room] in int16, being read for every key
    clock: Clock

    def select(self, origins: Tensor) -> "TransformerState":
        """See State."""
        if kernels.usable(self.ancestors):
            from bothways.kernels.chains import descend

            descend(self.ancestors, origins, self.clock.step)
            return self
        index = origins[..., None].expand(-1, -1, -1, self.ancestors.size(-1))
        return replace(self, ancestors=self.ancestors.gather(2, index))

    def keep(self, sentences: Tensor) -> "TransformerState":
        """See State."""
        histories = tuple(history.keep(sentences) for history in self.histories)
        return TransformerState(self.memory.keep(sentences), histories, self.ancestors[sentences], self.clock)

    def fixed(self, room: int) -> "TransformerState":
        """See State."""
        return replace(self.roomier(room), clock=self.clock.on_device_only())

    def roomier(self, room: int | None = None) -> "TransformerState":
        """With room for so many steps, or for twice as many."""
        histories = tuple(history.roomier(room) for history in self.histories)
        return replace(self, histories=histories, ancestors=roomier(self.ancestors, 3, room))


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config.width, config.heads)
        self.feed_forward = FeedForward(config.width, config.feed_forward, config.dropout)
        self.sub_layers = nn.ModuleList(SubLayer(config.width, config.dropout, config.norm) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.sub_layers[0](x, lambda y: self.attention(y, mask))
        return self.sub_layers[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Self-attention over past and future, attention over the source, then feed-forward."""

    def __init__(self, config: ModelConfig, interaction: bool) -> None:
        super().__init__()
        self.attention = SynchronousAttention(config.width, config.heads, fusion_of(config) if interaction else None)
        self.source_attention = SourceAttention(config.width, config.heads)
        self.feed_forward = FeedForward(config.width, config.feed_forward, config.dropout)
        self.sub_layers = nn.ModuleList(SubLayer(config.width, config.dropout, config.norm) for _ in range(3))

    def forward(
        self, x: Tensor, view: View, memory: tuple[Tensor, ...], history: History | None, clock: Clock | None
    ) -> Tensor:
        x = self.sub_layers[0](x, lambda y: self.attention(y, view, history, clock))
        x = self.read(x, memory)
        return self.sub_layers[2](x, self.feed_forward)

    def read(self, x: Tensor, memory: tuple[Tensor, ...]) -> Tensor:
        """What a layer reads besides its own streams: keys, values and mask of the source."""
        return self.sub_layers[1](x, lambda y: self.source_attention(y, *memory))


class Decoding(Seq2Seq):
    """A stack of decoder layers over encoded sources: one stack, three views."""

    config: ModelConfig
    interaction: bool  # whether the two streams of a row read each other
    decoder: nn.ModuleList
    decoder_norm: nn.Module

    @property
    @abstractmethod
    def embedded(self) -> Embedding:
        """The embedding of target tokens."""

    @abstractmethod
    def read_of(self, memory: Memory) -> TransformerMemory:
        """What this stack reads of a memory."""

    def remember(self, encoded: Tensor, mask: Tensor) -> TransformerMemory:
        """Encoded sources [B, S, E] with their mask -> keys and values for every layer."""
        return TransformerMemory(tuple(layer.source_attention.remember(encoded) for layer in self.decoder), mask)  # type: ignore[operator, union-attr]

    def hidden(self, memory: Memory, inputs: Tensor) -> Tensor:
        """See Seq2Seq: position i sees inputs 0..i of its own stream and, with interaction, of its partner's."""
        view = self._view_of_streams(inputs)
        positions = torch.arange(inputs.size(-1), device=inputs.device)
        return self._decode(self._embed(self.embedded, inputs, positions), view, self.read_of(memory))

    def start(self, memory: Memory, directions: int, hypotheses: int) -> TransformerState:
        """See Seq2Seq."""
        memory = self.read_of(memory)
        keys = memory.keys_values[0][0]
        B, H, _, d = keys.shape
        histories = tuple(History.empty((B, directions, H, 0, hypotheses, d), keys) for _ in self.decoder)
        ancestors = torch.zeros(B, directions, hypotheses, 0, dtype=torch.int16, device=keys.device)
        return TransformerState(memory, histories, ancestors, Clock.start(keys.device))

    def step(
        self, tokens: Tensor, state: State, partners: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Distribution, TransformerState]:
        """See Seq2Seq."""
        assert isinstance(state, TransformerState)
        if state.clock.is_full(state.ancestors.size(-1)):
            state = state.roomier()
        x = self._begin(tokens, state)
        view = self._view_of_hypotheses(state.ancestors, state.clock, partners, weights)
        x = self._decode(x, view, state.memory, state.histories, state.clock)
        return self.following(x), replace(state, clock=state.clock.ticked())

    def _begin(self, tokens: Tensor, state: TransformerState) -> Tensor:
        """Note which slots consume something at this step; returns what they do, embedded."""
        weight = self.embedded.weight
        if kernels.usable(weight) and weight.dtype != torch.float64:
            from bothways.kernels.embedding import embed_step

            return embed_step(tokens, weight, state.clock.step, state.ancestors, PAD)
        slots = torch.arange(tokens.size(-1), dtype=torch.int16, device=tokens.device)
        state.clock.put(state.ancestors, 3, torch.where(tokens == PAD, -1, slots))
        return self._embed(self.embedded, tokens, state.clock.step)

    def replay(self, memory: Memory, lattice: Lattice) -> Tensor:
        """See Seq2Seq: the nodes are one long stream per direction, and the lattice says who reads whom."""
        own, has_future, weights, future = lattice.own[None], None, None, None
        if self.interaction and lattice.tokens.size(0) == 2:
            has_future, weights = (lattice.weights.sum(-1) > 0)[None], lattice.weights[None]
            future = partner(lattice.seen[None].flatten(2, 3))  # rows of a direction's mask: its partner's queries
        view = View(_with_future(own, future), weights, has_future)
        x = self._embed(self.embedded, lattice.tokens[None], lattice.positions[None])
        return self.log_probs(self._decode(x, view, self.read_of(memory)))[0]

    def _decode(
        self,
        x: Tensor,
        view: View,
        memory: TransformerMemory,
        histories: tuple[History, ...] | None = None,
        clock: Clock | None = None,
    ) -> Tensor:
        for i, layer in enumerate(self.decoder):
            x = layer(x, view, memory.of_layer(i), histories[i] if histories else None, clock)
        return self.decoder_norm(x)

    def _embed(self, embedding: Embedding, tokens: Tensor, positions: Tensor) -> Tensor:
        x = embedding(tokens)
        return F.dropout(x + sinusoids(positions, x.size(-1), x.dtype), self.config.dropout, self.training)

    def _view_of_streams(self, inputs: Tensor) -> View:
        """Teacher forcing: causal, and of a partner that has ended only its tag and tokens (they come first)."""
        if not (self.interaction and inputs.size(1) == 2):
            return View(None)
        T = inputs.size(-1)
        causal = torch.ones(T, T, dtype=torch.bool, device=inputs.device).tril()
        readable = causal & (inputs != PAD)[:, :, None, :]  # [R, D, T, T], the same for owner and partner
        return View(_with_future(readable, readable), words=inputs != PAD)

    def _view_of_hypotheses(
        self, ancestors: Tensor, clock: Clock, partners: Tensor | None, weights: Tensor | None
    ) -> View:
        """Stepwise: a hypothesis reads the slots it descends from, and those its partners descend from."""
        if not self.interaction:
            partners = weights = None
        one_each = partners is None or partners.size(-1) == 1
        few = ancestors.size(1) * ancestors.size(2) <= FEW_ROWS
        if one_each and few and kernels.usable(ancestors) and self.embedded.weight.dtype != torch.float64:
            both = (None, None) if partners is None or weights is None else (partners[..., 0], weights[..., 0])
            return View(None, chains=Chains(ancestors, clock, *both))
        slots, window = torch.arange(ancestors.size(2), device=ancestors.device), clock.window(ancestors.size(-1))
        seen = ancestors[..., :window, None] == slots  # [B, D, K, window, K]
        if clock.taken is None:
            seen = seen & clock.written(window)[:, None]
        own = seen.flatten(3)  # [B, D, K, N = window * K]
        if partners is None or weights is None:
            return View(_with_future(own, None))
        read = partner(partners).flatten(2)  # [B, D, K * P] slots of a direction that its partner's hypotheses read
        future = own.gather(2, read[..., None].expand(-1, -1, -1, own.size(-1)))
        return View(_with_future(own, future), None if one_each else weights, weights.sum(-1) > 0)


class Transformer(Decoding):
    """Encoder and decoder; one direction or both, with or without interaction."""

    def __init__(self, config: ModelConfig, source_size: int, target_size: int) -> None:
        super().__init__()
        self.config = config
        self.interaction = bool(config.interaction) and config.direction == "both"
        self.target_embedding, self.source_embedding, self.output = embeddings_of(config, source_size, target_size)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config, self.interaction) for _ in range(config.decoder_layers))
        last = config.norm == "pre"  # pre-norm leaves the last sum unnormalized
        self.encoder_norm = nn.LayerNorm(config.width) if last else nn.Identity()
        self.decoder_norm = nn.LayerNorm(config.width) if last else nn.Identity()
        self.apply(initialize)

    @property
    def embedded(self) -> Embedding:
        """See Decoding."""
        return self.target_embedding

    @property
    def output_weight(self) -> Tensor:
        """See Seq2Seq."""
        return self.output.weight

    def layers(self) -> list[nn.Module]:
        """See Seq2Seq."""
        return [*self.encoder, *self.decoder]

    def interaction_parameters(self) -> set[str]:
        """See Seq2Seq: what the fusions learn."""
        return {name for name, _ in self.named_parameters() if ".fusion." in name}

    def encode(self, source: Tensor) -> TransformerMemory:
        """See Seq2Seq: keys and values for every decoder layer."""
        return self.remember(*self.encoded(source))

    def read_of(self, memory: Memory) -> TransformerMemory:
        """See Decoding: all of it."""
        assert isinstance(memory, TransformerMemory)
        return memory

    def encoded(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Sources [B, S] -> their encodings [B, S, E] and mask [B, 1, 1, S]."""
        mask = (source != PAD)[:, None, None, :]
        x = self._embed(self.source_embedding, source, torch.arange(source.size(1), device=source.device))
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x), mask


def _with_future(own: Tensor, future: Tensor | None) -> Tensor:
    """Masks [B, D, Q, N] and [B, D, Q * P, N] -> [B * D, 1, rows, N]."""
    rows = own if future is None else torch.cat([own, future], dim=2)
    return rows.flatten(0, 1)[:, None]
