"""A search step's self-attention: every hypothesis along its own chain of ancestors, and along its partner's.

The formula is in nn/attention.py. Here, too, keys of all slots are multiplied with the queries of all hypotheses, once
for past and future, but which query reads which is seen from the table of ancestors, so there is no mask. The step's
own keys and values are taken as they come, and written to the history for the steps after it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bothways.kernels.pointwise import tanh

MOST = 64  # hypotheses of a sentence
BLOCK = 32  # keys that are read at once
WARPS = 2  # of a program
STEPS = 32  # of the table of ancestors that are moved at once


@triton.jit
def _weigh(highest, total, found, q, k, v, reads, scale):
    """Some keys more: the highest score so far, the sum of shares, and the shares of the values."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(reads, scores, float("-inf"))
    top = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(top == float("-inf"), 0.0, top)  # nothing to read so far
    fade, shares = tl.exp(highest - base), tl.exp(scores - base[:, None])
    found = found * fade[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
    return top, total * fade + tl.sum(shares, 1), found


@triton.jit
def _read_side(
    q, new, keys, values, chains, reads, step, scale,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    NEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What all queries find in one direction's history and among its newest keys, which are added to it."""
    e, j = tl.arange(0, D), tl.arange(0, NEW)
    wanted = (j < SLOTS)[:, None] & (e < HEAD)[None, :]
    places = j[:, None] * 3 * WIDTH + e[None, :]
    new_k = tl.load(new + WIDTH + places, mask=wanted, other=0.0)
    new_v = tl.load(new + 2 * WIDTH + places, mask=wanted, other=0.0)
    written = (step * SLOTS + j)[:, None] * HEAD + e[None, :]
    tl.store(keys + written, new_k, mask=wanted)
    tl.store(values + written, new_v, mask=wanted)
    slot = tl.load(chains + step, mask=reads, other=-1).to(tl.int32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, D], tl.float32)
    highest, total, found = _weigh(highest, total, found, q, new_k, new_v, slot[:, None] == j[None, :], scale)
    for begin in range(0, step * SLOTS, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        there = n < step * SLOTS
        known = there[:, None] & (e < HEAD)[None, :]
        k = tl.load(keys + n[:, None] * HEAD + e[None, :], mask=known, other=0.0)
        v = tl.load(values + n[:, None] * HEAD + e[None, :], mask=known, other=0.0)
        slots = tl.load(chains[:, None] + (n // SLOTS)[None, :], mask=reads[:, None] & there[None, :], other=-1)
        readable = slots.to(tl.int32) == (n % SLOTS)[None, :]
        highest, total, found = _weigh(highest, total, found, q, k, v, readable, scale)
    return found / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _attend_along(
    qkv, keys, values, ancestors, clock, partners, shares, out, futures, scale, weight, learned, room, known,
    DIRECTIONS: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr,
    FUSION: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, NEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one head of all hypotheses of a sentence."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, e = tl.arange(0, ROWS), tl.arange(0, D)
    all_rows: tl.constexpr = DIRECTIONS * SLOTS
    WIDTH: tl.constexpr = HEADS * HEAD
    step = tl.load(clock).to(tl.int32)
    side, real = row // SLOTS, row < all_rows
    wanted = real[:, None] & (e < HEAD)[None, :]
    mine = qkv + b * all_rows * 3 * WIDTH + h * HEAD
    q = tl.load(mine + row[:, None] * 3 * WIDTH + e[None, :], mask=wanted, other=0.0)
    table, size = ancestors + b * all_rows * known, room * SLOTS * HEAD
    place = (b * DIRECTIONS * HEADS + h) * size
    partner, has_future = row, real & False
    if FUSION != "none":
        partner = (1 - side) * SLOTS + tl.load(partners + b * all_rows + row, mask=real, other=0).to(tl.int32)
        has_future = tl.load(shares + b * all_rows + row, mask=real, other=0.0) > 0
    past = _read_side(
        q, mine, keys + place, values + place, table + tl.where(side == 0, row, partner) * known,
        real & ((side == 0) | has_future), step, scale, SLOTS, WIDTH, HEAD, ROWS, D, NEW, BLOCK,
    )  # fmt: skip
    if DIRECTIONS == 2:
        place += HEADS * size
        found = _read_side(
            q, mine + SLOTS * 3 * WIDTH, keys + place, values + place,
            table + tl.where(side == 1, row, partner) * known,
            real & ((side == 1) | has_future), step, scale, SLOTS, WIDTH, HEAD, ROWS, D, NEW, BLOCK,
        )  # fmt: skip
        future = tl.where((side == 0)[:, None], found, past)
        past = tl.where((side == 0)[:, None], past, found)
    written = (b * all_rows + row)[:, None] * WIDTH + h * HEAD + e[None, :]
    if FUSION == "apart":
        tl.store(futures + written, future, mask=wanted)
    elif FUSION != "none":
        if learned is not None:
            weight = tl.load(learned).to(tl.float32)
        if FUSION == "tanh":
            future = tanh(future, False)
        past += tl.where(has_future[:, None], weight * future, 0.0)
    tl.store(out + written, past, mask=wanted)


def attend_along(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    ancestors: Tensor,
    step: Tensor,
    partners: Tensor | None = None,
    shares: Tensor | None = None,
    fusion: str = "none",
    weight: float | Tensor = 0.0,
) -> tuple[Tensor, Tensor]:
    """Queries, keys and values of one token per hypothesis, [B, D, K, 3E] -> past and future, [B, D, K, E] each.

    The histories [B, D, H, room, K, d] are written at `step`. ancestors [B, D, K, room] hold this step already;
    partners [B, D, K] are slots of the other direction, of which nothing is read where the share is zero. The fusion
    `tanh` or `linear` gives past + weight · f(future) instead of the past; the future stands `apart`, or means nothing.
    """
    B, D, H, room, K, d = keys.shape
    assert D * K <= MOST and (partners is not None or fusion == "none")
    qkv, past = qkv.contiguous(), qkv.new_empty(B, D, K, H * d)
    future = torch.empty_like(past) if fusion == "apart" else past
    is_learned = isinstance(weight, Tensor)
    _attend_along[(B, H)](
        qkv, keys, values, ancestors, step, partners, shares, past, future, d**-0.5,
        0.0 if is_learned else weight, weight if is_learned else None, room, ancestors.size(-1),
        DIRECTIONS=D, SLOTS=K, HEADS=H, HEAD=d, FUSION=fusion, ROWS=max(16, triton.next_power_of_2(D * K)),
        D=max(16, triton.next_power_of_2(d)), NEW=max(16, triton.next_power_of_2(K)), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return past, future


@triton.jit
def _descend(ancestors, origins, clock, room, SLOTS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr):
    """One program: one direction of a sentence."""
    first = tl.program_id(0).to(tl.int64) * SLOTS
    row = tl.arange(0, ROWS)
    real = row < SLOTS
    origin = tl.load(origins + first + row, mask=real, other=0)
    steps = tl.load(clock).to(tl.int32)
    for begin in range(0, steps, STEPS):
        t = begin + tl.arange(0, STEPS)
        wanted = real[:, None] & (t < steps)[None, :]
        slots = tl.load(ancestors + (first + origin)[:, None] * room + t[None, :], mask=wanted, other=0)
        tl.debug_barrier()  # all is read before anything is written
        tl.store(ancestors + (first + row)[:, None] * room + t[None, :], slots, mask=wanted)


def descend(ancestors: Tensor, origins: Tensor, step: Tensor) -> None:
    """Give slots [B, D, K] the ancestors [B, D, K, room] of their origins, in place, for the steps before `step`."""
    B, D, K, room = ancestors.shape
    _descend[(B * D,)](
        ancestors, origins, step, room, SLOTS=K, ROWS=triton.next_power_of_2(K), STEPS=STEPS, num_warps=1
    )  # fmt: skip
