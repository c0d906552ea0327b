"""What a GPU computes in one kernel instead of many, in Triton.

The formulas stay where they are, in nn/, train/ and search/, and are what runs elsewhere; a kernel has the same
contract, is taken where `usable` says so, and tests hold it to the formula. Without a GPU kernels run in Triton's
interpreter (TRITON_INTERPRET=1, float32 only), which is how they are tested there.
"""

from functools import cache
from importlib.util import find_spec

import torch


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None  # torch brings it wherever it brings CUDA, but for Windows


def usable(x: torch.Tensor) -> bool:
    """Whether kernels may take this tensor: on a GPU, outside of torch.compile, which makes kernels of its own."""
    return x.is_cuda and _has_triton() and not torch.compiler.is_compiling()
