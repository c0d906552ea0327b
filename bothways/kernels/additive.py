"""Additive attention, a query a row: softmax_n(vᵀ tanh(q + k_n) + bias_n) over values. Nothing [Q, N, E] is written.

A row reads the side `(row // group) ^ flip`: with `group` rows to a source, that of its source; with `flip`, its
partner's, rows of l2r and r2l taking turns. Keys and values lie as [n, side] or [side, n], as their `Place` says.

Gradients of keys and values are a pass of their own (`gathered`): every key sums over all queries that have read it,
once, where adding up what each position says would read and write them all at every position. All sums are float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bothways.kernels.pointwise import tanh

AT_ONCE = 8  # keys that a query reads at once; of four times as many, its registers do not hold the gradients
COLUMNS = 256  # of the width that a warp has: then a sum over keys is each thread's own
KEYS = 8  # that a program of `gathered` sums; or as many of their readers at once, where there is one key


@dataclass(frozen=True)
class Place:
    """Where vectors of E numbers lie: how many E from one row, and from one step, to the next."""

    data: Tensor
    row: int
    step: int


@triton.jit(do_not_specialize=["query_row", "key_row", "key_step", "value_row", "value_step", "bias_row", "length"])
def _read(
    query, query_row, keys, key_row, key_step, values, value_row, value_step, bias, bias_row, v, kept, scale,
    scores, score_row, totals, out, out_row, length,
    GROUP, FLIP: tl.constexpr, E: tl.constexpr, FAST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    side = (row // GROUP) ^ FLIP
    at = tl.arange(0, BLOCK)
    inside = at < E
    q = tl.load(query + row * query_row * E + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
    best, total = tl.full([], -float("inf"), tl.float32), tl.full([], 0.0, tl.float32)
    found = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, length, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        there = n < length
        tile = there[:, None] & inside[None, :]
        key = tl.load(keys + ((side * key_row + n * key_step) * E)[:, None] + at[None, :], mask=tile, other=0.0)
        value = tl.load(values + ((side * value_row + n * value_step) * E)[:, None] + at[None, :], mask=tile, other=0.0)
        score = tl.sum(weight[None, :] * tanh(q[None, :] + key.to(tl.float32), FAST), axis=1)
        score += tl.load(bias + side * bias_row + n, mask=there, other=0.0).to(tl.float32)
        score = tl.where(there, score, -float("inf"))
        tl.store(scores + row * score_row + n, score, mask=there)
        top = tl.maximum(best, tl.max(score, axis=0))
        share, fade = tl.exp(score - top), tl.exp(best - top)
        total = total * fade + tl.sum(share, axis=0)
        found = found * fade + tl.sum(share[:, None] * value.to(tl.float32), axis=0)
        best = top
    # Not their logarithm, of which nothing is left beside the bias of a row that may read nothing.
    tl.store(totals + 2 * row, best)
    tl.store(totals + 2 * row + 1, total)
    found = found / tl.where(total > 0, total, 1.0)
    if kept is not None:
        found = found * scale * tl.load(kept + row * E + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * out_row * E + at, found.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["query_row", "key_row", "key_step", "value_row", "value_step", "length"])
def _read_backward(
    query, query_row, keys, key_row, key_step, values, value_row, value_step, v, kept, scale,
    scores, score_row, totals, out, grad, out_row, shares, slopes, grad_query, grad_v, length,
    GROUP, FLIP: tl.constexpr, E: tl.constexpr, FAST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    side = (row // GROUP) ^ FLIP
    at = tl.arange(0, BLOCK)
    inside = at < E
    q = tl.load(query + row * query_row * E + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
    asked = tl.load(grad + row * out_row * E + at, mask=inside, other=0.0).to(tl.float32)
    # Σ_n of a share times its gradient is the product of what was found and its gradient, dropout and all.
    mean = tl.sum(asked * tl.load(out + row * out_row * E + at, mask=inside, other=0.0).to(tl.float32), axis=0)
    if kept is not None:
        asked = asked * scale * tl.load(kept + row * E + at, mask=inside, other=0).to(tl.float32)
        tl.store(grad + row * out_row * E + at, asked.to(grad.dtype.element_ty), mask=inside)
    best, total = tl.load(totals + 2 * row), tl.load(totals + 2 * row + 1)
    sum_query, sum_v = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, length, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        there = n < length
        tile = there[:, None] & inside[None, :]
        key = tl.load(keys + ((side * key_row + n * key_step) * E)[:, None] + at[None, :], mask=tile, other=0.0)
        value = tl.load(values + ((side * value_row + n * value_step) * E)[:, None] + at[None, :], mask=tile, other=0.0)
        score = tl.load(scores + row * score_row + n, mask=there, other=-float("inf"))
        share = tl.exp(score - best) / total
        slope = share * (tl.sum(asked[None, :] * value.to(tl.float32), axis=1) - mean)
        tl.store(shares + row * score_row + n, share, mask=there)
        tl.store(slopes + row * score_row + n, slope, mask=there)
        bent = tanh(q[None, :] + key.to(tl.float32), FAST)
        sum_query += tl.sum(slope[:, None] * (1 - bent * bent), axis=0)
        sum_v += tl.sum(slope[:, None] * bent, axis=0)
    tl.store(grad_query + row * query_row * E + at, (sum_query * weight).to(grad_query.dtype.element_ty), mask=inside)
    before = tl.load(grad_v + row * E + at, mask=inside, other=0.0)
    tl.store(grad_v + row * E + at, before + sum_v, mask=inside)


@triton.jit(do_not_specialize=["query_row", "query_step", "out_row", "out_step", "score_step", "key", "first", "last"])
def _gather(
    query, query_row, query_step, keys, key_row, key_step, v, grad, out_row, out_step,
    shares, slopes, score_row, score_step, grad_keys, grad_key_row, grad_key_step, grad_values, key, count, first, last,
    GROUP, FLIP: tl.constexpr, E: tl.constexpr, FAST: tl.constexpr,
    KEYS: tl.constexpr, READERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    side = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    wanted, inside = n < count, at < E
    tile = wanted[:, None] & inside[None, :]
    k = tl.load(keys + ((side * key_row + (n + key) * key_step) * E)[:, None] + at[None, :], mask=tile, other=0.0)
    k = k.to(tl.float32)
    sum_key, sum_value = tl.zeros([KEYS, BLOCK], dtype=tl.float32), tl.zeros([KEYS, BLOCK], dtype=tl.float32)
    for begin in range(first * GROUP, last * GROUP, READERS):
        for i in tl.static_range(READERS):  # unrolled, so that all of them are loaded at once
            reader = begin + i + tl.zeros([1], dtype=tl.int32)
            there = reader < last * GROUP
            step, row = (reader // GROUP).to(tl.int64), (side * GROUP + reader % GROUP) ^ FLIP
            place = row * score_row + step * score_step + key + n
            share = tl.load(shares + place, mask=wanted & there, other=0.0)
            slope = tl.load(slopes + place, mask=wanted & there, other=0.0)
            q = tl.load(query + (row * query_row + step * query_step) * E + at, mask=inside & there, other=0.0)
            asked = tl.load(grad + (row * out_row + step * out_step) * E + at, mask=inside & there, other=0.0)
            bent = tanh(q.to(tl.float32)[None, :] + k, FAST)
            sum_key += slope[:, None] * (1 - bent * bent)
            sum_value += share[:, None] * asked.to(tl.float32)[None, :]
    sum_key *= tl.load(v + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    out = ((side * grad_key_row + n * grad_key_step) * E)[:, None] + at[None, :]
    tl.store(grad_keys + out, sum_key.to(grad_keys.dtype.element_ty), mask=tile)
    out = ((side * count + n) * E)[:, None] + at[None, :]
    tl.store(grad_values + out, sum_value.to(grad_values.dtype.element_ty), mask=tile)


def _warps(v: Tensor) -> int:
    return max(1, triton.next_power_of_2(v.numel()) // COLUMNS)


@dataclass(frozen=True)
class Gradients:
    """Of an attention's queries, where they lie, and v; and for `gathered`, each share and its score's gradient."""

    query: Tensor
    v: Tensor  # [rows, E]: each row's, of all positions so far
    shares: Tensor  # [T, rows, N]
    slopes: Tensor  # [T, rows, N]


@dataclass(frozen=True)
class Attention:
    """One attention at all positions of a decoder: what it reads, what it writes, and what it must know again later.

    `rows` rows ask at each of T positions; the data of `query` and `out` begins with the axis of positions.
    """

    query: Place
    keys: Place
    values: Place
    bias: Tensor  # [sides, N] added to scores
    v: Tensor  # [E]
    out: Place
    scores: Tensor  # [T, rows, N]
    totals: Tensor  # [T, rows, 2] the largest score, and the sum of e to the power of all scores less it
    group: int
    flip: int  # 0 or 1
    kept: Tensor | None = None  # [T, rows, E] of what is found, what dropout leaves
    scale: float = 1.0  # and what that is multiplied by

    def forward(self, t: int, length: int) -> None:
        """Let all rows of position t read the first `length` keys; zeros where there is none."""
        query, keys, values, out = self.query, self.keys, self.values, self.out
        kept, settings = self._settings(t)
        _read[(self.scores.size(1),)](
            query.data[t], query.row, keys.data, keys.row, keys.step, values.data, values.row, values.step,
            self.bias, self.bias.stride(0), self.v, kept, self.scale,
            self.scores[t], self.scores.size(2), self.totals[t], out.data[t], out.row, length,
            *settings, num_warps=_warps(self.v),
        )  # fmt: skip

    def backward(self, t: int, length: int, grad: Tensor, grads: Gradients) -> None:
        """Gradients of position t's queries and v. From `grad`, which lies as `out` does, dropout takes its share."""
        query, keys, values, out = self.query, self.keys, self.values, self.out
        kept, settings = self._settings(t)
        _read_backward[(self.scores.size(1),)](
            query.data[t], query.row, keys.data, keys.row, keys.step, values.data, values.row, values.step,
            self.v, kept, self.scale, self.scores[t], self.scores.size(2), self.totals[t],
            out.data[t], grad[t], out.row, grads.shares[t], grads.slopes[t], grads.query[t], grads.v, length,
            *settings, num_warps=_warps(self.v),
        )  # fmt: skip

    def gathered(
        self, grad: Tensor, grads: Gradients, keys: range, readers: range, grad_keys: Place, grad_values: Tensor
    ) -> None:
        """Gradients of these keys and of their values [sides, keys, E], from what these positions have read."""
        query, out, E = self.query, self.out, self.v.numel()
        block, at_once = min(COLUMNS, triton.next_power_of_2(E)), 1 if len(keys) == 1 else KEYS
        _gather[(self.scores.size(1) // self.group, triton.cdiv(len(keys), at_once), triton.cdiv(E, block))](
            query.data, query.row, query.step, self.keys.data, self.keys.row, self.keys.step, self.v,
            grad, out.row, out.step, grads.shares, grads.slopes, self.scores.size(2), self.scores[0].numel(),
            grad_keys.data, grad_keys.row, grad_keys.step, grad_values, keys.start, len(keys),
            readers.start, readers.stop,
            self.group, self.flip, E, query.data.dtype != torch.float32,
            at_once, KEYS // at_once, block, num_warps=1,
        )  # fmt: skip

    def _settings(self, t: int) -> tuple[Tensor | None, tuple[int | bool, ...]]:
        """Position t's dropout, and a kernel's last arguments."""
        E, kept = self.v.numel(), None if self.kept is None else self.kept[t]
        block, fast = triton.next_power_of_2(E), self.query.data.dtype != torch.float32
        return kept, (self.group, self.flip, E, fast, AT_ONCE, block)
