"""A search step's beginning: tokens become embeddings with their position, and are noted in the table of ancestors.

The formulas are `Embedding` and `sinusoids` in nn/layers.py. Angles are computed in float64 here too.
"""

import math

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embed(
    tokens, weight, clock, ancestors, out, scale, width, room,
    SLOTS: tl.constexpr, PAD: tl.constexpr, RATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = column < width
    step, token = tl.load(clock), tl.load(tokens + row)
    x = tl.load(weight + token * width + column, mask=fits, other=0.0)
    x = (x.to(tl.float32) * scale).to(weight.dtype.element_ty).to(tl.float32)  # rounded as the formulas round it
    half = width // 2
    angle = step.to(tl.float64) * tl.exp((column % half).to(tl.float64) * RATE)
    position = tl.where(column < half, tl.sin(angle), tl.cos(angle)).to(weight.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, x + position, mask=fits)
    if tl.program_id(1) == 0:
        tl.store(ancestors + row * room + step, tl.where(token == PAD, -1, row % SLOTS))


def embed_step(tokens: Tensor, weight: Tensor, step: Tensor, ancestors: Tensor, pad: int) -> Tensor:
    """Tokens [B, D, K] at a step -> [B, D, K, E]; the table [B, D, K, room] gets each slot, or -1 for padding."""
    E, block = weight.size(1), 256
    out = weight.new_empty(*tokens.shape, E)
    _embed[(tokens.numel(), triton.cdiv(E, block))](
        tokens.contiguous(), weight, step, ancestors, out, math.sqrt(E), E, ancestors.size(-1),
        SLOTS=tokens.size(-1), PAD=pad, RATE=-2 * math.log(10000) / E, BLOCK=block, num_warps=2,
    )  # fmt: skip
    return out
