"""What stands between matrix products: relu with dropout, sums over rows, and tanh for other kernels."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bothways.kernels.dropout import kept, new_seed

BLOCK = 2048  # numbers that a program works on
COLUMNS, ROWS = 128, 32  # the tile of a sum
SPLITS = 256  # partial sums of a column, at most
FEW = 32  # columns of partial sums that a program adds up


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """Within 1e-7; `FAST` within 5e-4 of the result, far below what bfloat16 keeps of it, in one instruction."""
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 1 - 2 / (1 + tl.exp(2 * x))


def relu_dropout(x: Tensor, dropout: float) -> Tensor:
    """dropout(relu(x))."""
    apply: Any = _ReluDropout.apply
    return apply(x, dropout)


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        seed = new_seed(x) if dropout else None
        _relu_dropout[(triton.cdiv(x.numel(), BLOCK),)](x, out, seed, x.numel(), dropout, BLOCK)
        ctx.dropout = dropout
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        found = torch.empty_like(grad)
        scale = 1 / (1 - ctx.dropout)
        _where_positive[(triton.cdiv(out.numel(), BLOCK),)](grad, out, found, out.numel(), scale, BLOCK)
        return found, None


@triton.jit
def _relu_dropout(x_at, out_at, seed_at, count, dropout, BLOCK: tl.constexpr):
    begin, places = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    mask = places < count - begin
    x = tl.maximum(tl.load(x_at + begin + places, mask=mask, other=0.0).to(tl.float32), 0.0)
    if seed_at is not None:
        x *= kept(tl.load(seed_at), begin.to(tl.int32) + places, dropout)
    tl.store(out_at + begin + places, x.to(out_at.dtype.element_ty), mask=mask)


@triton.jit
def _where_positive(grad_at, out_at, found_at, count, scale, BLOCK: tl.constexpr):
    """What was dropped or negative is zero in the result, so the result says where the gradient goes."""
    begin, places = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    mask = places < count - begin
    out = tl.load(out_at + begin + places, mask=mask, other=0.0)
    grad = tl.load(grad_at + begin + places, mask=mask, other=0.0).to(tl.float32) * scale
    tl.store(found_at + begin + places, tl.where(out > 0, grad, 0.0).to(found_at.dtype.element_ty), mask=mask)


def sum_of_rows(x: Tensor) -> Tensor:
    """[N, E] -> [E] in float32, always in the same order."""
    x = x.contiguous()
    rows, E = x.shape
    splits = min(SPLITS, triton.cdiv(rows, ROWS))
    partial = x.new_empty(splits, E, dtype=torch.float32)
    turns = triton.cdiv(triton.cdiv(rows, ROWS), splits)
    _sum_of_rows[(triton.cdiv(E, COLUMNS), splits)](x, partial, turns, rows, E, ROWS, COLUMNS)
    return folded(partial)


def folded(partial: Tensor) -> Tensor:
    """What programs have summed, [programs, ...] in float32 -> [...]: one by one they are few, and many columns."""
    out = torch.empty_like(partial[0])
    count, columns = len(partial), out.numel()
    _fold[(triton.cdiv(columns, FEW),)](partial, out, count, columns, triton.next_power_of_2(count), FEW)
    return out


@triton.jit
def _fold(partial_at, out_at, count, columns, COUNT: tl.constexpr, FEW: tl.constexpr):
    column, row = tl.program_id(0) * FEW + tl.arange(0, FEW), tl.arange(0, COUNT)
    mask = (row < count)[:, None] & (column < columns)[None, :]
    x = tl.load(partial_at + row[:, None] * columns + column[None, :], mask=mask, other=0.0)
    tl.store(out_at + column, tl.sum(x, 0), mask=column < columns)


@triton.jit
def _sum_of_rows(x_at, partial_at, turns, rows, E, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for turn in range(turns):
        tile = turn * tl.num_programs(1) + tl.program_id(1)
        row, begin = tl.arange(0, ROWS), tile.to(tl.int64) * ROWS * E
        mask = (row < rows - tile * ROWS)[:, None] & (column < E)[None, :]
        total += tl.load(x_at + begin + row[:, None] * E + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(partial_at + tl.program_id(1) * E + column, tl.sum(total, 0), mask=column < E)
