"""Additive attention of a search step: over the source, and along the chain of states that a partner descends from.

The formula is `AdditiveAttention` in nn/layers.py. Nothing of the shape [queries, keys, E] is written, and no state is
moved to where a query would find its chain in one piece.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bothways.kernels.pointwise import tanh

AT_ONCE = 4  # keys of a source
ALONG = 16  # of a chain
WARPS = 8  # of a program, where states are wide
UNREADABLE = -1e30  # a bias below this one says that a key is not read


@triton.jit
def _weigh(best, total, found, q, weight, keys, values, places, reads, inside, at):
    """Some keys more: the highest score so far, the sum of shares, and the shares of the values."""
    tile = reads[:, None] & inside[None, :]
    key = tl.load(keys + places[:, None] + at[None, :], mask=tile, other=0.0).to(tl.float32)
    value = tl.load(values + places[:, None] + at[None, :], mask=tile, other=0.0).to(tl.float32)
    scores = tl.where(reads, tl.sum(weight[None, :] * tanh(q[None, :] + key, False), 1), float("-inf"))
    top = tl.maximum(best, tl.max(scores, 0))
    base = tl.where(top == float("-inf"), 0.0, top)  # nothing to read so far
    fade, shares = tl.exp(best - base), tl.exp(scores - base)
    return top, total * fade + tl.sum(shares, 0), found * fade + tl.sum(shares[:, None] * value, 0)


@triton.jit
def _attend_to_source(
    query, keys, values, bias, v, out, queries, length, stride,
    E: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, UNREADABLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // queries
    at = tl.arange(0, BLOCK)
    inside = at < E
    q = tl.load(query + row * E + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
    best, total, found = float("-inf"), 0.0, tl.zeros([BLOCK], tl.float32)
    for begin in range(0, length, AT_ONCE):
        n = begin + tl.arange(0, AT_ONCE)
        reads = tl.load(bias + b * length + n, mask=n < length, other=float("-inf")).to(tl.float32) > UNREADABLE
        places = (b * length + n) * stride
        best, total, found = _weigh(best, total, found, q, weight, keys, values, places, reads, inside, at)
    tl.store(out + row * E + at, found / tl.where(total > 0, total, 1.0), mask=inside)


@triton.jit
def _attend_along(
    query, new_keys, states, history, ancestors, read, shares, clock, v, out, room, known, SLOTS: tl.constexpr,
    LAG: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // SLOTS
    at = tl.arange(0, BLOCK)
    inside = at < E
    q = tl.load(query + row * E + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
    slot = b * SLOTS + tl.load(read + row)
    chain = ancestors + slot * known
    step = tl.load(clock).to(tl.int32)
    past = history + b * room * SLOTS * 2 * E
    best, total, found = float("-inf"), 0.0, tl.zeros([BLOCK], tl.float32)
    for begin in range(0, step, AT_ONCE):
        n = begin + tl.arange(0, AT_ONCE)
        place = tl.load(chain + n, mask=n < step, other=-1)
        places = place * 2 * E
        best, total, found = _weigh(best, total, found, q, weight, past, past + E, places, place >= 0, inside, at)
    if LAG == 0:  # the newest, which another program is writing
        n = tl.arange(0, AT_ONCE)
        newest = (n == 0) & (tl.load(chain + step + 0 * n) >= 0)
        places = slot * E + 0 * n
        best, total, found = _weigh(best, total, found, q, weight, new_keys, states, places, newest, inside, at)
    share = tl.load(shares + row).to(tl.float32)
    tl.store(out + row * E + at, share * found / tl.where(total > 0, total, 1.0), mask=inside)
    written = past + (step * SLOTS + row % SLOTS) * 2 * E + at
    tl.store(written, tl.load(new_keys + row * E + at, mask=inside, other=0.0), mask=inside)
    tl.store(written + E, tl.load(states + row * E + at, mask=inside, other=0.0), mask=inside)


def attend_to_source(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, v: Tensor) -> Tensor:
    """Queries W q [B, Q, E] over keys U h and values [B, S, E], `bias_of` their mask [B, 1, S] -> [B, Q, E]."""
    (B, Q, E), out = query.shape, torch.empty_like(query, memory_format=torch.contiguous_format)
    block, stride, length = triton.next_power_of_2(E), keys.stride(1), keys.size(1)
    assert keys.stride() == values.stride() == (length * stride, stride, 1)
    _attend_to_source[(B * Q,)](
        query.contiguous(), keys, values, bias.contiguous(), v, out, Q, length, stride,
        E=E, BLOCK=block, AT_ONCE=AT_ONCE, UNREADABLE=UNREADABLE, num_warps=WARPS if block > 512 else 4,
    )  # fmt: skip
    return out


def attend_along(
    query: Tensor,
    new: tuple[Tensor, Tensor],
    history: Tensor,
    ancestors: Tensor,
    read: Tensor,
    shares: Tensor,
    step: Tensor,
    lag: int,
    v: Tensor,
) -> Tensor:
    """Queries W q [B, N, E] of all N slots along the chains of the slots that they `read` [B, N], times their shares.

    history [B, room, N, 2E] holds keys beside states, and gets the `new` ones, [B, N, E] each; ancestors [B, N, room]
    hold places in it, -1 for none. With a lag of 1 the new ones are not read yet.
    """
    (B, N, E), out = query.shape, torch.empty_like(query)
    block = triton.next_power_of_2(E)
    _attend_along[(B * N,)](
        query, *(x.contiguous() for x in new), history, ancestors, read, shares, step, v, out,
        history.size(1), ancestors.size(-1), SLOTS=N, LAG=lag,
        E=E, BLOCK=block, AT_ONCE=ALONG, num_warps=WARPS if block > 512 else 4,
    )  # fmt: skip
    return out
