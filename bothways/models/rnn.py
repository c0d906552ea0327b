"""RNMT, an LSTM encoder-decoder with additive attention and input feeding; and BI-RNMT, the same in both directions.

Encoder, with layer normalization and dropout where they stand:

    h¹ = norm(drop(tanh(W_l h→ + W_r h← + b)))          h→ and h← are LSTMs over the words from either end
    hˡ = norm(hˡ⁻¹ + drop(LSTM(hˡ⁻¹)))                  l > 1, from left to right, with a residual connection

Decoder, at position i:

    zˡ₋₁ = tanh(W₀ [the last states of all of the encoder's LSTMs] + b₀); cells and z₋₁ are zero
    z¹_i = norm(drop(LSTM(y_{i-1}, z_{i-1})))           input feeding: z_{i-1} is what the output layer read before
    zˡ_i = norm(zˡ⁻¹_i + drop(LSTM(zˡ⁻¹_i)))            l > 1
    c_i  = Σ_j softmax_j(vᵀ tanh(W zᴸ_i + U h_j)) h_j   the source
    cz_i = Σ_k softmax_k(vᵀ tanh(W zᴸ_i + U zᴸ_k)) zᴸ_k the partner, k = 0 .. i-1 (`printed`) or i (`current`)
    z_i  = drop(tanh(W_c [zᴸ_i ; c_i] + W_f cz_i))      W_f is W_c's third block; without interaction there is none

An LSTM recalls its own output as it was before normalization and dropout, so that cuDNN can run the encoder's.
Padding stands behind a sentence's words in every pass, the reversed one too (a row is reversed by its own length), and
nothing that comes after the words is read: no state that counts has ever consumed padding.

What does not wait for z_{i-1} is computed for all positions at once: the encoder (by cuDNN on a GPU), the keys U h_j,
the share of y in the first layer's gates, and the output layer. What remains for each position, on a GPU:

- Where texts are passed through as a whole, as in training, kernels/stack.py: a product and a kernel for each layer
  (gates, cell, dropout, residual sum and normalization in one), one product for what both attentions are asked, one
  kernel for each attention, and a product and a kernel for z. Weights' gradients are summed over all positions at once.
- Where a position is a step of a search: the gates of a cell and all that follows from them are one kernel, PyTorch's
  own, each attention is one (kernels/recall.py), which finds a partner's states along its chain of ancestors where they
  were written; every other operation of the formulas above is a kernel of its own.

Where it is recorded (train/recording.py, search/recorded.py), all kernels of an update or of a step are one launch.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bothways import kernels
from bothways.config import ModelConfig
from bothways.models.interface import Lattice, Memory, Seq2Seq
from bothways.nn.attention import partner
from bothways.nn.layers import LSTM, AdditiveAttention, Cell, Embedding, Linear, bias_of, embeddings_of, initialize
from bothways.stepwise import Clock, Distribution, State, roomier
from bothways.tokens import PAD

Future = Callable[[Tensor], Tensor | None]  # top states zᴸ_i -> contexts cz_i of the same shape; None: all are zero


@dataclass(frozen=True)
class RNNMemory:
    """Encoded sources, their keys, and the states that decoders begin with."""

    encoded: Tensor  # [B, S, E]
    keys: Tensor  # [B, S, E]
    bias: Tensor  # [B, 1, S]
    begin: Tensor  # [B, layers, E]

    def keep(self, sentences: Tensor) -> "RNNMemory":
        """Only these sentences."""
        return RNNMemory(self.encoded[sentences], self.keys[sentences], self.bias[sentences], self.begin[sentences])


@dataclass(frozen=True)
class Carried:
    """What goes from one position to the next; `stacked` it is easily handed on to other hypotheses."""

    h: tuple[Tensor, ...]  # per layer, [..., E]
    c: tuple[Tensor, ...]
    z: Tensor  # [..., E] the attentional output

    def stacked(self) -> Tensor:
        """[..., 2 * layers + 1, E]"""
        return torch.stack([*self.h, *self.c, self.z], dim=-2)

    @classmethod
    def of(cls, stacked: Tensor) -> "Carried":
        """The inverse of `stacked`."""
        *cells, z = stacked.unbind(-2)
        return cls(tuple(cells[: len(cells) // 2]), tuple(cells[len(cells) // 2 :]), z)


@dataclass(frozen=True)
class RNNState:
    """Memory, cells and histories. A select moves the cells; of the histories, only the table of ancestors.

    Slots of both directions are numbered through, so that reading a partner is an index like any other. An ancestor
    [b, k, t] is the place in the history of what hypothesis k consumed at step t, or -1 where that was nothing.
    """

    memory: RNNMemory
    carried: Tensor  # [B, D * K, 2 * layers + 1, E]
    history: Tensor | None  # [B, room, D * K, 2E] key and top state of every token consumed; None: nobody reads it
    ancestors: Tensor  # [B, D * K, room]
    slots: Tensor  # [D, K] their numbers
    opposite: Tensor  # [D, 1, 1] the number of the other direction's first slot
    clock: Clock

    def select(self, origins: Tensor) -> "RNNState":
        """See State."""
        B, N = self.carried.shape[:2]
        first = torch.arange(0, B * N, N, device=origins.device)[:, None]
        rows = ((origins + self.slots[:, :1]).flatten(1) + first).flatten()
        carried, ancestors = (x.flatten(0, 1)[rows].view(x.shape) for x in (self.carried, self.ancestors))
        return replace(self, carried=carried, ancestors=ancestors)

    def keep(self, sentences: Tensor) -> "RNNState":
        """See State."""
        history = None if self.history is None else self.history[sentences]
        rows = self.carried[sentences], history, self.ancestors[sentences]
        return RNNState(self.memory.keep(sentences), *rows, self.slots, self.opposite, self.clock)

    def fixed(self, room: int) -> "RNNState":
        """See State."""
        return replace(self.roomier(room), clock=self.clock.on_device_only())

    def roomier(self, room: int | None = None) -> "RNNState":
        """With room for so many steps, or for twice as many."""
        history = None if self.history is None else roomier(self.history, 1, room)
        return replace(self, history=history, ancestors=roomier(self.ancestors, 2, room))


class RNNDecoding(Seq2Seq):
    """A stack of LSTM cells over encoded sources: one position, and three ways through a text."""

    config: ModelConfig
    interaction: bool  # whether the two streams of a row read each other

    def add_decoder(self, config: ModelConfig, has_future: bool) -> None:
        """Make the stack's parts; the future is the partner, or what else `read_besides` says."""
        E = config.width
        self.begin = Linear((config.encoder_layers + 1) * E, config.decoder_layers * E)
        self.cells = nn.ModuleList(Cell(E, 2 * E if i == 0 else E) for i in range(config.decoder_layers))
        self.decoder_norms = nn.ModuleList(nn.LayerNorm(E) for _ in self.cells)
        self.source_attention = AdditiveAttention(E)
        self.combine = Linear(2 * E, E, bias=False)
        if has_future:
            self.future_attention = AdditiveAttention(E)
            self.future_combine = Linear(E, E, bias=False)

    @property
    @abstractmethod
    def embedded(self) -> Embedding:
        """The embedding of target tokens."""

    @abstractmethod
    def read_of(self, memory: Memory) -> RNNMemory:
        """What this stack reads of a memory."""

    def read_besides(self, memory: RNNMemory) -> "FutureOfStates | None":
        """The future where it is not a partner: what a memory holds besides the source, if it does."""
        return None

    def remember(self, encoded: Tensor, bias: Tensor, last: Tensor) -> RNNMemory:
        """What the encoder says -> what this stack reads of it."""
        begin = torch.tanh(self.begin(last)).view(len(encoded), -1, encoded.size(-1))
        keys = self.source_attention.prepare(encoded)
        # Under autocast keys are bfloat16: so are then the values, which every position would turn into it otherwise.
        return RNNMemory(encoded.to(keys.dtype), keys, bias, begin)

    def interaction_parameters(self) -> set[str]:
        """See Seq2Seq: the attention over the future, and W_c's third block."""
        return {name for name, _ in self.named_parameters() if name.startswith("future_")}

    def begin_interaction(self) -> None:
        """See Seq2Seq: W_c's third block is zero."""
        if self.interaction_parameters():
            nn.init.zeros_(self.future_combine.weight)

    def hidden(self, memory: Memory, inputs: Tensor) -> Tensor:
        """See Seq2Seq: position i sees inputs 0..i of its own stream and, with interaction, states of its partner's."""
        read = self.read_of(memory)
        together = self.interaction and inputs.size(1) == 2
        return self._through(inputs, read, _FutureOfStreams(self, inputs) if together else self.read_besides(read))[0]

    def spoken(self, memory: Memory, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """`hidden` of streams that read nothing but the source, and their top states, both [R, D, T, E]."""
        return self._through(inputs, self.read_of(memory), None)

    def _through(
        self, inputs: Tensor, memory: RNNMemory, future: "_FutureOfStreams | FutureOfStates | None"
    ) -> tuple[Tensor, Tensor]:
        """Position after position of all streams: [R, D, T] -> outputs z and top states, [R, D, T, E] each."""
        (R, D, T), B = inputs.shape, len(memory.encoded)
        words = self._embed(self.embedded, inputs).permute(2, 0, 1, 3)
        given = self._given(words.reshape(T, B, -1, words.size(-1)))  # [T, B, streams of a source, 4E]
        if kernels.usable(given):
            found = self._at_once(given, memory, future)
            return found[0].view(R, D, T, -1), found[1].unflatten(0, (R, D))
        carried = self._begin(memory, given.size(2))
        outputs: list[Tensor] = []
        tops: list[Tensor] = []

        def read(top: Tensor) -> Tensor | None:
            tops.append(top)
            return None if future is None else future(top)

        for step in given:
            carried = self._advance(step, carried, memory, read)
            outputs.append(carried.z)
        return torch.stack(outputs, dim=2).view(R, D, T, -1), torch.stack(tops, dim=2).view(R, D, T, -1)

    def _at_once(
        self, given: Tensor, memory: RNNMemory, future: "_FutureOfStreams | FutureOfStates | None"
    ) -> tuple[Tensor, Tensor]:
        """`_advance` for all positions, by kernels: [T, B, Q, 4E] -> outputs z and top states, [B * Q, T, E] each."""
        from bothways.kernels import stack

        (T, B, Q, _), E = given.shape, self.config.width
        rows, share = (T, B * Q, E), self.config.dropout if self.training else 0.0
        ask, combine = [self.source_attention.query], [self.combine]
        v: list[Tensor] = [self.source_attention.v]
        read, states = None, []
        if future is not None:
            others = future if isinstance(future, FutureOfStates) else None
            ask += [self.future_attention.query, *([] if others else [self.future_attention.key])]
            combine, v = [*combine, self.future_combine], [*v, self.future_attention.v]
            states = list(others.keyed.chunk(2, dim=-1)) if others else []
            drop = stack.Dropout.drawn(self.config.future_dropout if self.training else 0.0, *rows, device=given.device)
            read = stack.Future(future.bias.flatten(0, -2), drop, None if others else self.lag)
        cells = [cell for cell in self.cells if isinstance(cell, Cell)]
        later = [[cell.inputs.weight, cell.recurrent.weight] for cell in cells[1:]]
        norms = [norm for norm in self.decoder_norms if isinstance(norm, nn.LayerNorm)]
        inputs = stack.Inputs(
            given=given.flatten(1, 2),
            begin=memory.begin.transpose(0, 1)[:, :, None].expand(-1, -1, Q, -1).flatten(1, 2),
            keys=memory.keys,
            values=memory.encoded,
            v=torch.stack(v),
            ask=torch.cat([part.weight for part in ask]),
            combine=torch.cat([part.weight for part in combine], dim=1),
            cells=[cells[0].recurrent.weight, *(torch.cat(parts, dim=1) for parts in later)],
            biases=[cell.inputs.bias for cell in cells[1:]],
            gains=[norm.weight for norm in norms],
            shifts=[norm.bias for norm in norms],
            states=states,
        )
        dropout = stack.Dropout.drawn(share, len(cells) + 1, *rows, device=given.device)
        return stack.through(inputs, stack.Setting(memory.bias[:, 0], dropout, read))

    def start(self, memory: Memory, directions: int, hypotheses: int) -> RNNState:
        """See Seq2Seq."""
        memory = self.read_of(memory)
        B, _, E = memory.encoded.shape
        slots = torch.arange(directions * hypotheses, device=memory.encoded.device).view(directions, hypotheses)
        carried = self._begin(memory, slots.numel()).stacked()
        reads = self.interaction and directions == 2
        history = carried.new_zeros(B, 0, slots.numel(), 2 * E) if reads else None
        ancestors, clock = slots.new_zeros(B, slots.numel(), 0), Clock.start(slots.device)
        return RNNState(memory, carried, history, ancestors, slots, partner(slots[:, :1, None], 0), clock)

    def step(
        self, tokens: Tensor, state: State, partners: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Distribution, RNNState]:
        """See Seq2Seq."""
        assert isinstance(state, RNNState)
        if state.clock.is_full(state.ancestors.size(-1)):
            state = state.roomier()
        idle, slots = (tokens == PAD).flatten(1), state.slots.flatten()  # [B, D * K]
        newest = torch.where(idle, -1, slots + state.clock.step * slots.numel())
        state.clock.put(state.ancestors, 2, newest)
        own = None if state.history is None else _FutureOfHypotheses(self, state, partners, weights)
        future = self.read_besides(state.memory) if own is None else own
        given = self._given(self._embed(self.embedded, tokens.flatten(1)))
        carried = self._advance(given, Carried.of(state.carried), state.memory, future)
        kept = torch.where(idle[..., None, None], state.carried, carried.stacked())
        following = self.following(carried.z.view(*tokens.shape, -1))
        return following, replace(state, carried=kept, clock=state.clock.ticked())

    def replay(self, memory: Memory, lattice: Lattice) -> Tensor:
        """See Seq2Seq: node after node by their positions, each from the state of the node before it in its chain."""
        memory = self.read_of(memory)
        D, N = lattice.tokens.shape
        tokens, positions = lattice.tokens.flatten(), lattice.positions.flatten()
        own = torch.block_diag(*lattice.own).bool()  # [D * N, D * N]
        before = own & (positions[None, :] < positions[:, None])
        parents = torch.where(before.any(1), torch.where(before, positions, -1).argmax(1), D * N)  # D * N: none
        states = self._begin(memory, 1).stacked()[0].repeat(D * N + 1, 1, 1)
        tops, out = torch.zeros_like(states[:, 0]), torch.zeros_like(states[:, 0])
        given = self._given(self._embed(self.embedded, tokens))
        besides = self.read_besides(memory)
        for position in positions.unique():
            (rows,) = (positions == position).nonzero(as_tuple=True)
            future = _FutureOfNodes(self, lattice, rows, tops) if self.interaction and D == 2 else besides
            inherited = states[parents[rows]]
            carried = self._advance(given[None, rows], Carried.of(inherited[None]), memory, future)
            states[rows] = torch.where((tokens[rows] == PAD)[:, None, None], inherited, carried.stacked()[0])
            out[rows] = carried.z[0]
        return self.log_probs(out[:-1]).view(D, N, -1)

    def _advance(self, given: Tensor, before: Carried, memory: RNNMemory, future: Future | None) -> Carried:
        """One position of Q streams of every source: what the words give, [B, Q, 4E] -> what is carried on."""
        h, c = self.cells[0](given, torch.cat([before.z, before.h[0]], dim=-1), before.c[0])
        hs, cs, x = [h], [c], self.decoder_norms[0](self._drop(h))
        for i, (cell, norm) in enumerate(zip(self.cells[1:], self.decoder_norms[1:], strict=True), 1):
            h, c = cell(cell.inputs(x), before.h[i], before.c[i])  # type: ignore[operator]
            hs, cs, x = [*hs, h], [*cs, c], norm(x + self._drop(h))
        context = self.source_attention(x, memory.keys, memory.encoded, memory.bias)
        z = self.combine(torch.cat([x, context], dim=-1))
        read = None if future is None else future(x)
        if read is not None:
            z = z + self.future_combine(F.dropout(read, self.config.future_dropout, self.training))
        z = self._drop(torch.tanh(z)).to(before.z.dtype)
        return Carried(tuple(hs), tuple(cs), z)

    def _given(self, words: Tensor) -> Tensor:
        """What the first layer's gates take from the words themselves: [..., E] -> [..., 4E]."""
        first = self.cells[0]
        assert isinstance(first, Cell)
        return first.inputs(words)

    def _begin(self, memory: RNNMemory, streams: int) -> Carried:
        """What streams of every source begin with, [B, streams, E] each."""
        begin = memory.begin.to(self.output_weight.dtype)[:, :, None].expand(-1, -1, streams, -1)
        zero = torch.zeros_like(begin[:, 0])
        return Carried(begin.unbind(1), (zero,) * begin.size(1), zero)

    def _embed(self, embedding: Embedding, tokens: Tensor) -> Tensor:
        return self._drop(embedding(tokens))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training)

    def keyed(self, top: Tensor) -> Tensor:
        """Top states beside their keys for the partner's attention: [..., E] -> [..., 2E]."""
        key = self.future_attention.prepare(top)
        return torch.cat([key, top.to(key.dtype)], dim=-1)

    def read(self, top: Tensor, keyed: Tensor, bias: Tensor) -> Tensor:
        """cz: queries [..., Q, E] over [..., N, 2E], `bias_of` a mask [..., Q, N]."""
        keys, values = keyed.chunk(2, dim=-1)
        return self.future_attention(top, keys, values, bias)

    @property
    def lag(self) -> int:
        """How many of the newest states of its partner a position does not read."""
        return 1 if self.config.future_span == "printed" else 0


class RNN(RNNDecoding):
    """Encoder and decoder; one direction or both, with or without interaction."""

    def __init__(self, config: ModelConfig, source_size: int, target_size: int) -> None:
        super().__init__()
        torch.backends.cudnn.allow_tf32 = False  # on by default for LSTMs, whose results would depend on the batch
        E, self.config = config.width, config
        self.interaction = bool(config.interaction) and config.direction == "both"
        self.target_embedding, self.source_embedding, self.output = embeddings_of(config, source_size, target_size)
        self.encoder_l2r, self.encoder_r2l = (LSTM(E, E, batch_first=True) for _ in range(2))
        self.join = Linear(2 * E, E)
        self.encoder = nn.ModuleList(LSTM(E, E, batch_first=True) for _ in range(config.encoder_layers - 1))
        self.encoder_norms = nn.ModuleList(nn.LayerNorm(E) for _ in range(config.encoder_layers))
        self.add_decoder(config, self.interaction)
        self.apply(initialize)

    @property
    def embedded(self) -> Embedding:
        """See RNNDecoding."""
        return self.target_embedding

    @property
    def output_weight(self) -> Tensor:
        """See Seq2Seq."""
        return self.output.weight

    def layers(self) -> list[nn.Module]:
        """See Seq2Seq: the attention over the source, whose shape is the same at every position."""
        return [self.source_attention]

    def encode(self, source: Tensor) -> RNNMemory:
        """See Seq2Seq."""
        return self.remember(*self.encoded(source))

    def read_of(self, memory: Memory) -> RNNMemory:
        """See RNNDecoding: all of it."""
        assert isinstance(memory, RNNMemory)
        return memory

    def encoded(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sources [B, S] -> encodings [B, S, E], `bias_of` their mask, and the LSTMs' last states side by side."""
        lengths = (source != PAD).sum(1)
        places = torch.arange(source.size(1), device=source.device).expand_as(source)
        turned = torch.where(places < lengths[:, None], lengths[:, None] - 1 - places, places)  # its own inverse
        x = self._embed(self.source_embedding, source)
        l2r, r2l = self.encoder_l2r(x)[0], _ordered(self.encoder_r2l(_ordered(x, turned))[0], turned)
        last = [_ordered(l2r, lengths[:, None] - 1), r2l[:, :1]]
        x = self.encoder_norms[0](self._drop(torch.tanh(self.join(torch.cat([l2r, r2l], dim=-1)))))
        for lstm, norm in zip(self.encoder, self.encoder_norms[1:], strict=True):
            out = lstm(x)[0]
            last.append(_ordered(out, lengths[:, None] - 1))
            x = norm(x + self._drop(out))
        return x, bias_of((source != PAD)[:, None], x.dtype), torch.cat(last, dim=-1)


# -- whose states are the future: of streams, of hypotheses, of nodes -------------------------------------------------


class FutureOfStates:
    """What was there before: the states of another pass, all of them."""

    def __init__(self, model: RNNDecoding, keyed: Tensor, bias: Tensor) -> None:
        self.model, self.keyed, self.bias = model, keyed, bias  # [R, n, 2E] and [R, 1, n]

    def __call__(self, top: Tensor) -> Tensor:
        rows = top.reshape(len(self.keyed), -1, top.size(-1))
        return self.model.read(rows, self.keyed, self.bias).view(top.shape)


class _FutureOfStreams:
    """Teacher forcing: the partner's states so far; of one that has ended, only those of its tag and tokens."""

    def __init__(self, model: RNNDecoding, inputs: Tensor) -> None:
        self.model, self.bias = model, bias_of((inputs != PAD)[:, :, None], model.output_weight.dtype)  # [R, D, 1, T]
        self.history: Tensor | None = None  # [R, D, i, 2E]

    def __call__(self, top: Tensor) -> Tensor | None:
        before, x = self.history, top.view(*self.bias.shape[:2], 1, -1)  # [R, D, 1, E]
        newest = self.model.keyed(x)
        # Grown by one and not gathered anew from a list: each step's gradient then is one sum, not one per state.
        self.history = newest if before is None else torch.cat([before, newest], dim=2)
        seen = before if self.model.lag else self.history
        if seen is None:
            return None
        found = self.model.read(partner(x), seen, self.bias[..., : seen.size(2)])  # [R, D, 1, E], the partner's
        return partner(found).view(top.shape)


class _FutureOfHypotheses:
    """Stepwise: the states along the partners' chains of ancestors, mixed by weight."""

    def __init__(self, model: RNNDecoding, state: RNNState, partners: Tensor | None, weights: Tensor | None) -> None:
        assert state.history is not None
        self.model, self.state, self.history = model, state, state.history
        self.clock, self.weights = state.clock, weights
        self.read = None if partners is None else (partners + state.opposite).flatten(1)  # [B, D * K * P] slots
        self.window = self.clock.window(state.ancestors.size(-1))
        self.seen = self.window - model.lag

    def __call__(self, top: Tensor) -> Tensor | None:
        slots = top.size(1)  # D * K
        one_each = self.read is not None and self.weights is not None and self.weights.size(-1) == 1
        if one_each and kernels.usable(top) and top.dtype != torch.float64:
            return self._by_kernel(top)
        self.clock.put(self.history, 1, self.model.keyed(top))
        if self.read is None or self.weights is None or not self.seen:
            return None
        P = self.weights.size(-1)
        ancestors = self.state.ancestors[..., : self.seen]
        if self.clock.taken is None:
            ancestors = torch.where(self.clock.written(self.window)[self.model.lag :], ancestors, -1)
        chains = ancestors.gather(1, self.read[..., None].expand(-1, -1, self.seen))  # [B, D * K * P, seen]
        places = chains.clamp(min=0).flatten(1)[..., None].expand(-1, -1, self.history.size(-1))
        along = self.history.flatten(1, 2).gather(1, places).unflatten(1, (-1, self.seen))  # [B, D * K * P, seen, 2E]
        readers = top if P == 1 else top.repeat_interleave(P, dim=1)
        found = self.model.read(readers[:, :, None], along, bias_of(chains >= 0, top.dtype)[:, :, None]).squeeze(2)
        shares = self.weights if self.clock.taken is not None else self.weights * (self.clock.step >= self.model.lag)
        shares = shares.to(found.dtype).reshape(-1, slots * P, 1)
        return found * shares if P == 1 else (found * shares).unflatten(1, (-1, P)).sum(2)

    def _by_kernel(self, top: Tensor) -> Tensor:
        from bothways.kernels.recall import attend_along

        assert self.read is not None and self.weights is not None
        attention = self.model.future_attention
        tables = self.history, self.state.ancestors, self.read, self.weights.flatten(1), self.clock.step
        new = attention.prepare(top), top
        return attend_along(attention.query(top), new, *tables, self.model.lag, attention.v)


class _FutureOfNodes:
    """Replay: the states of the nodes that the lattice names, mixed by weight."""

    def __init__(self, model: RNNDecoding, lattice: Lattice, rows: Tensor, tops: Tensor) -> None:
        self.model, self.tops, self.rows = model, tops, rows
        N = lattice.tokens.size(1)
        self.side, node = rows // N, rows % N
        reached = lattice.positions[1 - self.side] <= lattice.positions[self.side, node][:, None] - model.lag
        self.mask = lattice.seen[self.side, node] & reached[:, None]  # [rows, P, N]
        self.weights = (lattice.weights[self.side, node] * self.mask.any(-1))[..., None]  # [rows, P, 1]

    def __call__(self, top: Tensor) -> Tensor:
        self.tops[self.rows] = top[0]
        sides = self.tops[:-1].unflatten(0, (2, -1))[1 - self.side]  # [rows, N, E]
        readers = top[0][:, None].expand(-1, self.mask.size(1), -1)  # [rows, P, E]
        found = self.model.read(readers, self.model.keyed(sides), bias_of(self.mask, top.dtype))
        return (found * self.weights.to(found.dtype)).sum(1)[None]


def _ordered(x: Tensor, places: Tensor) -> Tensor:
    """[B, S, E] by places [B, n] -> [B, n, E]."""
    return x.gather(1, places[..., None].expand(-1, -1, x.size(-1)))
