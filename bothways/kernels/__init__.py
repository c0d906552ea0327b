"""What a GPU computes in one kernel instead of many, in Triton.

The formulas stay where they are, in nn/, train/ and search/, and are what runs elsewhere; a kernel has the same
contract, is taken where `usable` says so, and tests hold it to the formula. Without a GPU kernels run in Triton's
interpreter (TRITON_INTERPRET=1, float32 only), which is how they are tested there.
"""

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

OLDEST = (8, 0)  # compute capability: older GPUs cannot multiply bfloat16
SWITCH = "BOTHWAYS_KERNELS"  # 0 in the environment: formulas only


def usable(x: torch.Tensor) -> bool:
    """Whether kernels may take this tensor: on a GPU, outside of torch.compile, which makes kernels of its own."""
    return x.is_cuda and not torch.compiler.is_compiling() and why_not(x.device) is None


@cache
def why_not(device: torch.device) -> str | None:
    """What keeps a device from running kernels, for a person to read; None: nothing."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    if device.type != "cuda" or torch.version.cuda is None:
        return "they are for NVIDIA's GPUs"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return f"they need compute capability {OLDEST[0]}.{OLDEST[1]}"
    return _why_not_compiled()


def _why_not_compiled() -> str | None:
    """Triton compiles a few lines of C beside every kernel."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang")))):
        return "Triton needs a C compiler, and neither gcc nor clang is installed"
    schemes = sysconfig.get_scheme_names()  # systems differ in which of them names the place
    if not any(Path(sysconfig.get_path("include", scheme), "Python.h").exists() for scheme in schemes):
        return "Triton needs Python.h, the headers of Python (the package python3-dev of many systems)"
    return None
