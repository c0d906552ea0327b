"""A stack of LSTM cells with attention and input feeding, over all positions of a text: what models/rnn.py defines.

Forward, a position is one product and one kernel for each layer, one product that asks (the queries of both attentions
and the key that the partner will read, side by side), a kernel for each attention, a product and a kernel for the
output. Backward it is as many, and one more for what a partner's queries say of its key. What every position would add
to the gradients of weights, and of keys that were there before, is summed once, when all positions are done.

B sources   N rows, the streams of a source one after the other   T positions   S words of a source   L layers
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bothways.kernels import cell
from bothways.kernels.additive import Attention, Gradients, Place
from bothways.kernels.linear import product
from bothways.kernels.pointwise import sum_of_rows


@dataclass(frozen=True)
class Dropout:
    """What it leaves, drawn for all positions at once."""

    kept: Tensor  # 1 where a number is left, else 0
    scale: float

    @classmethod
    def drawn(cls, share: float, *shape: int, device: torch.device) -> "Dropout | None":
        """That of this share of all numbers; None where it would leave them all."""
        kept = torch.empty(shape, dtype=torch.uint8, device=device)
        return cls(kept.bernoulli_(1 - share), 1 / (1 - share)) if share else None


@dataclass(frozen=True)
class Future:
    """What is read besides the source: the states of the other stream of a row, or of another pass."""

    bias: Tensor  # [rows, n] added to the scores of a stream's, or a pass', positions, whoever reads them
    dropout: Dropout | None  # [T, N, E] on what is read
    lag: int | None  # how many of the other stream's newest positions are not read; None: they are another pass'


@dataclass(frozen=True)
class Setting:
    """What has no gradient."""

    bias: Tensor  # [B, S] added to the scores of a source's words
    dropout: Dropout | None  # [L + 1, T, N, E], the output's last
    future: Future | None

    @property
    def lag(self) -> int | None:
        """The other stream's, if it is read."""
        return None if self.future is None else self.future.lag

    def of_layer(self, layer: int, t: int) -> tuple[Tensor | None, float]:
        """A layer's dropout at a position; -1 is the output's."""
        return (None, 1.0) if self.dropout is None else (self.dropout.kept[layer, t], self.dropout.scale)


@dataclass(frozen=True)
class Inputs:
    """What has a gradient."""

    given: Tensor  # [T, N, 4E] what words give to the first layer's gates, bias and all
    begin: Tensor  # [L, N, E] the h that layers begin with
    keys: Tensor  # [B, S, E]
    values: Tensor  # [B, S, E]
    v: Tensor  # [1 or 2, E] the source's attention's; the future's
    ask: Tensor  # [E to 3E, E] top state -> query; the future's query; the key that the other stream reads
    combine: Tensor  # [E, 2E or 3E] top state, context, what was read of the future -> output
    cells: list[Tensor]  # L of [4E, 2E]: first z or what comes from the layer below, then h
    biases: list[Tensor]  # L - 1 of [4E], of all layers but the first
    gains: list[Tensor]  # L of [E]
    shifts: list[Tensor]  # L of [E]
    states: list[Tensor]  # [rows, n, E] keys and values of another pass, or none

    def flat(self) -> list[Tensor]:
        """One after the other."""
        lists = [*self.cells, *self.biases, *self.gains, *self.shifts, *self.states]
        return [self.given, self.begin, self.keys, self.values, self.v, self.ask, self.combine, *lists]

    @classmethod
    def of(cls, flat: tuple[Tensor, ...]) -> "Inputs":
        """The inverse of `flat`."""
        L, rest = len(flat[1]), list(flat[7:])
        given, first, keys, values, v, ask, combine = flat[:7]
        ends = 0, L, 2 * L - 1, 3 * L - 1, 4 * L - 1, len(rest)
        lists = (rest[begin:end] for begin, end in pairwise(ends))
        return cls(given, first, keys, values, v, ask, combine, *lists)

    def cast(self) -> "Inputs":
        """With all that products read in the type of what words give."""
        dtype = self.given.dtype
        cells, states = [y.to(dtype) for y in self.cells], [y.to(dtype) for y in self.states]
        return replace(
            self,
            begin=self.begin.to(dtype),
            keys=self.keys.to(dtype),
            values=self.values.to(dtype),
            ask=self.ask.to(dtype),
            combine=self.combine.to(dtype),
            cells=cells,
            states=states,
        )

    def gates(self, layer: int, t: int) -> tuple[Tensor, int]:
        """What is added to the product of a layer's gates, and how many E its rows are apart."""
        return (self.biases[layer - 1], 0) if layer else (self.given[t], 4)


@dataclass(frozen=True)
class Kept:
    """What the positions have left."""

    inputs: list[Tensor]  # L of [T + 1, N, 2E] what the cells' products read; of upper layers' last, only h counts
    gates: list[Tensor]  # L of [T, N, 4E] those products
    cells: list[Tensor]  # L of [T + 1, N, E] float32
    asked: Tensor  # [T, N, E to 3E]
    combined: Tensor  # [T, N, 2E or 3E]
    attentions: list[Attention]  # the source's; the future's

    @classmethod
    def empty(cls, x: Inputs, setting: Setting) -> "Kept":
        """Room for them, with what the first position reads."""
        (L, N, E), T = x.begin.shape, len(x.given)
        inputs = [x.given.new_empty(T + 1, N, 2 * E) for _ in range(L)]
        gates = [x.given.new_empty(T, N, 4 * E) for _ in range(L)]
        cells = [x.given.new_empty(T + 1, N, E, dtype=torch.float32) for _ in range(L)]
        inputs[0][0, :, :E] = 0
        for before, c, h in zip(inputs, cells, x.begin, strict=True):
            before[0, :, E:], c[0] = h, 0
        asked, combined = x.given.new_empty(T, N, len(x.ask)), x.given.new_empty(T, N, x.combine.size(1))
        return cls(inputs, gates, cells, asked, combined, list(_attentions(x, setting, asked, combined)))


def _attentions(x: Inputs, setting: Setting, asked: Tensor, combined: Tensor) -> Iterator[Attention]:
    T, N, E, S = len(asked), asked.size(1), x.begin.size(2), x.keys.size(1)

    def place(data: Tensor, part: int) -> Place:
        """One of the vectors that lie side by side."""
        parts = data.size(2) // E
        return Place(data[..., part * E :], parts, N * parts)

    def room(keys: int) -> tuple[Tensor, Tensor]:
        """For scores and totals."""
        return x.v.new_empty(T, N, keys, dtype=torch.float32), x.v.new_empty(T, N, 2, dtype=torch.float32)

    def there(keys: Tensor, values: Tensor) -> tuple[Place, Place]:
        """Those that do not come from the positions themselves."""
        return Place(keys, keys.size(1), 1), Place(values, keys.size(1), 1)

    words = there(x.keys, x.values)
    yield Attention(place(asked, 0), *words, setting.bias, x.v[0], place(combined, 1), *room(S), N // len(x.keys), 0)
    if setting.future is not None:
        bias, dropout = setting.future.bias, setting.future.dropout
        kept, scale = (None, 1.0) if dropout is None else (dropout.kept, dropout.scale)
        if setting.lag is None:
            states, who = there(*x.states), (N // len(bias), 0)
        else:
            states, who = (place(asked, 2), place(combined, 0)), (1, 1)
        scores = room(bias.size(1))
        yield Attention(place(asked, 1), *states, bias, x.v[1], place(combined, 2), *scores, *who, kept, scale)


def _lengths(setting: Setting, t: int) -> list[int]:
    """How many keys position t reads of the source, and of the future."""
    lengths = [setting.bias.size(1)]
    if setting.future is not None:
        lengths.append(setting.future.bias.size(1) if setting.lag is None else t + 1 - setting.lag)
    return lengths


def _forward(x: Inputs, setting: Setting, kept: Kept) -> Tensor:
    L, N, E = x.begin.shape
    out = x.given.new_empty(N, len(x.given), E)
    sums = x.given.new_empty(N, E)
    for t in range(len(x.given)):
        for i in range(L):
            torch.mm(kept.inputs[i][t], x.cells[i].T, out=kept.gates[i][t])
            above = kept.combined[t] if i == L - 1 else kept.inputs[i + 1][t]
            cell.forward(
                kept.gates[i][t], *x.gates(i, t), kept.cells[i][t], kept.cells[i][t + 1], *setting.of_layer(i, t),
                kept.inputs[i][t] if i else None, x.gains[i], x.shifts[i],
                kept.inputs[i][t + 1, :, E:], above, above.size(1) // E,
            )  # fmt: skip
        torch.mm(kept.combined[t, :, :E], x.ask.T, out=kept.asked[t])
        for attention, length in zip(kept.attentions, _lengths(setting, t), strict=True):
            attention.forward(t, length)
        torch.mm(kept.combined[t], x.combine.T, out=sums)
        cell.output(sums, *setting.of_layer(-1, t), out[:, t], kept.inputs[0][t + 1])
    return out


@dataclass(frozen=True)
class Slopes:
    """The gradients of what positions have left."""

    inputs: list[Tensor]  # L of [N, 2E], those of one position
    gates: list[Tensor]  # L of [T, N, 4E]
    asked: Tensor  # as in Kept
    combined: Tensor
    sums: Tensor  # [T, N, E] what the output's dropout and tanh are taken of
    norms: list[Tensor]  # L of [N, 2, E] gains and shifts
    attentions: list[Gradients]

    @classmethod
    def empty(cls, kept: Kept) -> "Slopes":
        """Room for them; zero where they are added up, and where nothing comes after the last position."""
        (T, N, _), E = kept.asked.shape, kept.cells[0].size(2)
        asked, exact = torch.empty_like(kept.asked), kept.cells[0]
        attentions = [
            Gradients(
                asked[..., i * E :], exact.new_zeros(N, E), torch.empty_like(y.scores), torch.empty_like(y.scores)
            )
            for i, y in enumerate(kept.attentions)
        ]
        return cls(
            inputs=[y.new_zeros(N, 2 * E) for y in kept.gates],
            gates=[torch.empty_like(y) for y in kept.gates],
            asked=asked,
            combined=torch.empty_like(kept.combined),
            sums=kept.asked.new_empty(T, N, E),
            norms=[y.new_zeros(N, 2, E) for y in kept.cells],
            attentions=attentions,
        )


def _backward(
    x: Inputs, setting: Setting, kept: Kept, out: Tensor, grad_out: Tensor, grad_tops: Tensor | None
) -> Inputs:
    """Gradients, where the inputs stand; grad_tops, of the top states, [T, N, E], where no stream reads another's."""
    (L, N, E), T, found = x.begin.shape, len(x.given), Slopes.empty(kept)
    cells = [y.new_zeros(N, E) for y in kept.cells]
    of_query, below, read = x.begin.new_empty(N, E), cells[0].new_empty(N, E), cells[0].new_empty(N, 1, E)
    for t in reversed(range(T)):
        cell.output_backward(out[:, t], *setting.of_layer(-1, t), grad_out[:, t], found.inputs[0], found.sums[t])
        torch.mm(found.sums[t], x.combine, out=found.combined[t])
        for i, length in enumerate(_lengths(setting, t)):
            kept.attentions[i].backward(t, length, found.combined[..., (i + 1) * E :], found.attentions[i])
        more = None if grad_tops is None else grad_tops[t]
        if setting.lag is not None:
            readers, key = range(t + setting.lag, T), Place(found.asked[t, :, 2 * E :], 3, 0)
            which = found.combined[..., 2 * E :], found.attentions[1], range(t, t + 1), readers
            kept.attentions[1].gathered(*which, key, read)
            more = read
        torch.mm(found.asked[t], x.ask, out=of_query)
        above = found.combined[t], found.combined.size(2) // E, of_query, more
        for i in reversed(range(L)):
            cell.backward(
                kept.gates[i][t], *x.gates(i, t), kept.cells[i][t], *setting.of_layer(i, t),
                kept.inputs[i][t] if i else None, x.gains[i], above, found.inputs[i][:, E:],
                cells[i], found.gates[i][t], below, found.norms[i],
            )  # fmt: skip
            torch.mm(found.gates[i][t], x.cells[i], out=found.inputs[i])
            above = found.inputs[i], 2, below, None
    return _summed(x, kept, found)


def _summed(x: Inputs, kept: Kept, found: Slopes) -> Inputs:
    """Over all positions, the gradients that each of them has a share in."""
    T, E = len(x.given), x.begin.size(2)
    there = [torch.empty_like(y) for y in (x.keys, x.values, *x.states)]
    for i, (keys, values) in enumerate(zip(there[0::2], there[1::2], strict=True)):
        which = found.combined[..., (i + 1) * E :], found.attentions[i], range(keys.size(1)), range(T)
        kept.attentions[i].gathered(*which, Place(keys, keys.size(1), 1), values)
    norms = [sum_of_rows(y.flatten(1)) for y in found.norms]

    def weight(slopes: Tensor, y: Tensor) -> Tensor:
        return product(slopes.flatten(0, 1).T, y.flatten(0, 1), x.v.dtype)

    return Inputs(
        given=found.gates[0],
        begin=torch.stack([y[:, E:] for y in found.inputs]),
        keys=there[0],
        values=there[1],
        v=torch.stack([sum_of_rows(y.v) for y in found.attentions]),
        ask=weight(found.asked, kept.combined[..., :E]),
        combine=weight(found.sums, kept.combined),
        cells=[weight(y, z[:T]) for y, z in zip(found.gates, kept.inputs, strict=True)],
        biases=[sum_of_rows(y.flatten(0, 1)) for y in found.gates[1:]],
        gains=[y[:E] for y in norms],
        shifts=[y[E:] for y in norms],
        states=there[2:],
    )


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, setting: Setting, *flat: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(flat[0].device.type, enabled=False):
            inputs = Inputs.of(flat).cast()
            kept = Kept.empty(inputs, setting)
            out = _forward(inputs, setting, kept)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(out, *inputs.flat())
            ctx.setting, ctx.kept = setting, kept
            ctx.set_materialize_grads(False)
        return out, kept.combined[..., : out.size(-1)].transpose(0, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        out, *flat = ctx.saved_tensors
        of_out = torch.zeros_like(out) if grads[0] is None else grads[0].to(out.dtype).contiguous()
        of_tops = None if grads[1] is None else grads[1].transpose(0, 1).contiguous()
        assert of_tops is None or ctx.setting.lag is None, (
            "no pass whose streams read each other is asked for its states"
        )
        with torch.autocast(out.device.type, enabled=False):
            found = _backward(Inputs.of(tuple(flat)), ctx.setting, ctx.kept, out, of_out, of_tops)
        return (None, *found.flat())


def through(inputs: Inputs, setting: Setting) -> tuple[Tensor, Tensor]:
    """Outputs z and top states of all positions, [N, T, E] each."""
    apply: Any = _Through.apply
    return apply(setting, *(x.contiguous() for x in inputs.flat()))
