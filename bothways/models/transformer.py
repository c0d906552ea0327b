"""The Transformer of Vaswani et al., and BIFT: the same decoder run in both directions at once.

Directions are rows of a batch, not copies of a model: the number of streams and their tags decide. With two streams
and `interaction`, each layer's self-attention reads the partner too (nn/attention.py); nothing else differs.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bothways.config import ModelConfig
from bothways.models.interface import Lattice, Memory, Seq2Seq, State
from bothways.nn.attention import History, SelfAttention, SourceAttention, SynchronousAttention, View, partner
from bothways.nn.fusion import fusion_of
from bothways.nn.layers import Embedding, FeedForward, SubLayer, embeddings_of, initialize, sinusoids
from bothways.tokens import PAD

FIRST_CAPACITY = 16  # steps that a history has room for at first; it doubles when full


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
    ancestors: Tensor  # [B, D, K, t]

    def select(self, origins: Tensor) -> "TransformerState":
        """See State."""
        index = origins[..., None].expand(-1, -1, -1, self.ancestors.size(-1))
        return replace(self, ancestors=self.ancestors.gather(2, index))

    def keep(self, sentences: Tensor) -> "TransformerState":
        """See State."""
        histories = tuple(history.keep(sentences) for history in self.histories)
        return TransformerState(self.memory.keep(sentences), histories, self.ancestors[sentences])


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

    def forward(self, x: Tensor, view: View, memory: tuple[Tensor, ...], history: History | None, step: int) -> Tensor:
        x = self.sub_layers[0](x, lambda y: self.attention(y, view, history, step))
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
        return self._decode(inputs, positions, view, self.read_of(memory))

    def start(self, memory: Memory, directions: int, hypotheses: int) -> TransformerState:
        """See Seq2Seq."""
        memory = self.read_of(memory)
        keys = memory.keys_values[0][0]
        B, H, _, d = keys.shape
        shape = (B, directions, H, FIRST_CAPACITY, hypotheses, d)
        histories = tuple(History.empty(shape, keys) for _ in self.decoder)
        ancestors = torch.zeros(B, directions, hypotheses, 0, dtype=torch.long, device=keys.device)
        return TransformerState(memory, histories, ancestors)

    def step(
        self, tokens: Tensor, state: State, partners: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, TransformerState]:
        """See Seq2Seq."""
        assert isinstance(state, TransformerState)
        step, K = state.ancestors.size(-1), tokens.size(-1)
        slots = torch.arange(K, device=tokens.device)
        newest = torch.where(tokens == PAD, -1, slots)
        state = replace(state, ancestors=torch.cat([state.ancestors, newest[..., None]], dim=-1))
        view = self._view_of_hypotheses(state.ancestors, slots, partners, weights)
        position = torch.tensor(step, device=tokens.device)
        x = self._decode(tokens, position, view, state.memory, state.histories, step)
        return self.log_probs(x), state

    def replay(self, memory: Memory, lattice: Lattice) -> Tensor:
        """See Seq2Seq: the nodes are one long stream per direction, and the lattice says who reads whom."""
        own, has_future, weights, future = lattice.own[None], None, None, None
        if self.interaction and lattice.tokens.size(0) == 2:
            has_future, weights = (lattice.weights.sum(-1) > 0)[None], lattice.weights[None]
            future = partner(lattice.seen[None].flatten(2, 3))  # rows of a direction's mask: its partner's queries
        view = View(_with_future(own, future), weights, has_future)
        x = self._decode(lattice.tokens[None], lattice.positions[None], view, self.read_of(memory))
        return self.log_probs(x)[0]

    def _decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        view: View,
        memory: TransformerMemory,
        histories: tuple[History, ...] | None = None,
        step: int = 0,
    ) -> Tensor:
        x = self._embed(self.embedded, tokens, positions)
        for i, layer in enumerate(self.decoder):
            x = layer(x, view, memory.of_layer(i), histories[i] if histories else None, step)
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
        self, ancestors: Tensor, slots: Tensor, partners: Tensor | None, weights: Tensor | None
    ) -> View:
        """Stepwise: a hypothesis reads the slots it descends from, and those its partners descend from."""
        own = (ancestors[..., None] == slots).flatten(3)  # [B, D, K, N = t * K]
        if not self.interaction or partners is None:
            return View(_with_future(own, None))
        assert weights is not None
        read = partner(partners).flatten(2)  # [B, D, K * P] slots of a direction that its partner's hypotheses read
        future = own.gather(2, read[..., None].expand(-1, -1, -1, own.size(-1)))
        has_future = weights.sum(-1) > 0
        return View(_with_future(own, future), weights if weights.size(-1) > 1 else None, has_future)


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
