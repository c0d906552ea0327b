"""Dropout inside kernels: which places are kept follows from a seed and the place alone, so that nothing is stored."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def new_seed(like: Tensor) -> Tensor:
    """A seed from PyTorch's own generator, drawn on the device: a recorded pass draws it anew at each replay."""
    return torch.randint(0, 2**62, (1,), device=like.device)


@triton.jit
def _mixed(x):
    """The last step of MurmurHash3: every bit of a 32-bit number changes about half of the result's."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def kept(seed, places, dropout):
    """What numbers at `places` are multiplied by: 1 / (1 - dropout), or nothing at all."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    x = _mixed(_mixed(places.to(tl.uint32) ^ low) + high)
    drawn = (x >> 8).to(tl.float32) * (1.0 / 16777216.0)  # in [0, 1)
    return tl.where(drawn >= dropout, 1.0 / (1.0 - dropout), 0.0)
