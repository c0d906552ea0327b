"""Dropout, residual connection and layer normalization in one pass over the rows: norm(x + dropout(h)).

Forward reads x and h and writes the result; backward reads them once more with the result's gradient, draws the same
dropout again, and writes both gradients. The weights' gradients are summed per program and then over programs, always
in the same order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bothways.kernels.dropout import kept, new_seed
from bothways.kernels.pointwise import folded

ROWS = 4  # that a program holds at a time: more would take the registers of its neighbours
PROGRAMS = 1024  # of the backward pass: about eight for each multiprocessor of a large GPU


def add_norm(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor, epsilon: float, dropout: float) -> Tensor:
    """norm(x + dropout(h)) over the last axis, in h's type; sums are float32."""
    apply: Any = _AddNorm.apply
    return apply(x, h, weight, bias, epsilon, dropout)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor, epsilon: float, dropout: float) -> Tensor:
        E = h.size(-1)
        x, h = x.contiguous(), h.contiguous()
        out = torch.empty_like(h)
        rows, block = h.numel() // E, triton.next_power_of_2(E)
        seed = new_seed(h) if dropout else None
        stats = h.new_empty(2, rows, dtype=torch.float32)
        _add_norm[(triton.cdiv(rows, ROWS),)](
            x, h, weight, bias, out, stats, seed, rows, E, epsilon, dropout, ROWS, block, num_warps=_warps(block)
        )
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, h, weight, stats, seed)
            ctx.sizes = rows, E, dropout, block
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, h, weight, stats, seed = ctx.saved_tensors
        rows, E, dropout, block = ctx.sizes
        grad = grads[0].contiguous()
        grad_x, grad_h = torch.empty_like(x), torch.empty_like(h)
        tiles = triton.cdiv(rows, ROWS)
        programs = min(PROGRAMS, tiles)
        sums = h.new_empty(programs, 2, E, dtype=torch.float32)
        _add_norm_backward[(programs,)](
            grad, x, h, weight, stats, seed, grad_x, grad_h, sums, triton.cdiv(tiles, programs),
            rows, E, dropout, ROWS, block, num_warps=_warps(block),
        )  # fmt: skip
        grad_weight, grad_bias = folded(sums)
        return grad_x, grad_h, grad_weight, grad_bias, None, None


def _warps(block: int) -> int:
    return ROWS * min(4, max(1, block // 256))


@triton.jit
def _add_norm(
    x_at, h_at, weight_at, bias_at, out_at, stats_at, seed_at, rows, E, epsilon, dropout,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    begin = tl.program_id(0).to(tl.int64) * ROWS * E  # what follows counts from here, in 32 bits: half the registers
    places = tl.arange(0, ROWS)[:, None] * E + column[None, :]
    mask = (row < rows)[:, None] & (column < E)[None, :]
    h = tl.load(h_at + begin + places, mask=mask, other=0.0).to(tl.float32)
    if seed_at is not None:
        h *= kept(tl.load(seed_at), begin.to(tl.int32) + places, dropout)
    s = tl.load(x_at + begin + places, mask=mask, other=0.0).to(tl.float32) + h
    mean = tl.sum(s, 1) / E
    centred = tl.where(mask, s - mean[:, None], 0.0)
    rate = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / E + epsilon)
    weight = tl.load(weight_at + column, mask=column < E, other=0.0).to(tl.float32)
    bias = tl.load(bias_at + column, mask=column < E, other=0.0).to(tl.float32)
    out = centred * rate[:, None] * weight[None, :] + bias[None, :]
    tl.store(out_at + begin + places, out.to(out_at.dtype.element_ty), mask=mask)
    tl.store(stats_at + row, mean, mask=row < rows)
    tl.store(stats_at + rows + row, rate, mask=row < rows)


@triton.jit
def _add_norm_backward(
    grad_at, x_at, h_at, weight_at, stats_at, seed_at, grad_x_at, grad_h_at, sums_at, turns, rows, E, dropout,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_at + column, mask=column < E, other=0.0).to(tl.float32)
    for_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    for_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    places = tl.arange(0, ROWS)[:, None] * E + column[None, :]
    for turn in range(turns):
        tile = turn * tl.num_programs(0) + tl.program_id(0)
        row = tile * ROWS + tl.arange(0, ROWS)
        begin = tile.to(tl.int64) * ROWS * E
        mask = (row < rows)[:, None] & (column < E)[None, :]
        h = tl.load(h_at + begin + places, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(x_at + begin + places, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_at + begin + places, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(stats_at + row, mask=row < rows, other=0.0)
        rate = tl.load(stats_at + rows + row, mask=row < rows, other=0.0)
        if seed_at is not None:
            keep = kept(tl.load(seed_at), begin.to(tl.int32) + places, dropout)
            h *= keep
        normal = tl.where(mask, (s + h - mean[:, None]) * rate[:, None], 0.0)
        for_weight += grad * normal
        for_bias += grad
        grad *= weight[None, :]
        along = tl.sum(grad * normal, 1) / E
        level = tl.sum(grad, 1) / E
        grad_s = (grad - level[:, None] - normal * along[:, None]) * rate[:, None]
        tl.store(grad_x_at + begin + places, grad_s.to(grad_x_at.dtype.element_ty), mask=mask)
        if seed_at is not None:
            grad_s *= keep
        tl.store(grad_h_at + begin + places, grad_s.to(grad_h_at.dtype.element_ty), mask=mask)
    place = tl.program_id(0) * 2 * E + column
    tl.store(sums_at + place, tl.sum(for_weight, 0), mask=column < E)
    tl.store(sums_at + place + E, tl.sum(for_bias, 0), mask=column < E)
