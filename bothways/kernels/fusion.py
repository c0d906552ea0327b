"""past + λ · tanh(dropout(future)) in one pass, and its gradient in another."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bothways.kernels.dropout import kept, new_seed
from bothways.kernels.pointwise import tanh

BLOCK = 2048  # numbers that a program works on


def add_tanh(past: Tensor, future: Tensor, weight: float, dropout: float) -> Tensor:
    """The paper's fusion of two tensors that lie alike in memory, whatever the order of their axes."""
    apply: Any = _AddTanh.apply
    return apply(past, future, weight, dropout)


class _AddTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, past: Tensor, future: Tensor, weight: float, dropout: float) -> Tensor:
        out = torch.empty_like(past)
        past, future = _like(past, out), _like(future, out)
        seed = new_seed(past) if dropout else None
        _fuse[(triton.cdiv(out.numel(), BLOCK),)](past, future, out, seed, out.numel(), weight, dropout, False, BLOCK)
        ctx.save_for_backward(future, seed)
        ctx.how = weight, dropout
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        future, seed = ctx.saved_tensors
        weight, dropout = ctx.how
        grad, found = _like(grads[0], future), torch.empty_like(future)
        count = found.numel()
        _fuse[(triton.cdiv(count, BLOCK),)](grad, future, found, seed, count, weight, dropout, True, BLOCK)
        return grad, found, None, None


def _like(x: Tensor, other: Tensor) -> Tensor:
    """The same numbers in the other's order in memory."""
    return x if x.stride() == other.stride() else torch.empty_like(other).copy_(x)


@triton.jit
def _fuse(past_at, future_at, out_at, seed_at, count, weight, dropout, IS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    begin, places = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    mask = places < count - begin
    past = tl.load(past_at + begin + places, mask=mask, other=0.0).to(tl.float32)
    future = tl.load(future_at + begin + places, mask=mask, other=0.0).to(tl.float32)
    keep = 1.0
    if seed_at is not None:
        keep = kept(tl.load(seed_at), begin.to(tl.int32) + places, dropout)
    squashed = tanh(future * keep, False)
    out = past * weight * (1.0 - squashed * squashed) * keep if IS_GRADIENT else past + weight * squashed
    tl.store(out_at + begin + places, out.to(out_at.dtype.element_ty), mask=mask)
