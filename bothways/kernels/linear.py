"""A linear layer for training in bfloat16: one cast of the weight, and gradients that are summed in float32.

The products are cuBLAS'; what is gained is around them. The bias' gradient is one pass over the rows, and the weight's
leaves the product in float32 where PyTorch can do that, so that neither is rounded nor copied once more.
"""

from typing import Any

import torch
from torch import Tensor

from bothways.kernels.pointwise import sum_of_rows

HAS_OUT_DTYPE = "out_dtype" in (torch.mm.__doc__ or "")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, in autocast's type if that is on."""
    apply: Any = _Linear.apply
    return apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        x, matrix = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, matrix)
        ctx.dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        with torch.autocast("cuda", enabled=False):
            return torch.nn.functional.linear(x, matrix, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        rows = grads[0].reshape(-1, matrix.size(0))
        grad_x = (rows @ matrix).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = product(rows.T, x.reshape(-1, matrix.size(1)), ctx.dtype)
        grad_bias = sum_of_rows(rows).to(ctx.bias_dtype) if ctx.bias_dtype is not None else None
        return grad_x, grad_weight, grad_bias


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`, not rounded to a shorter one on the way where that can be avoided."""
    if HAS_OUT_DTYPE and a.dtype != dtype and dtype == torch.float32 and a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)
