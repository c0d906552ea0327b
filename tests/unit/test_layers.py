"""Layers compute what their names say, whichever way they take."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from bothways.nn.layers import Linear, linear

SHAPES = [(1, 8), (5, 8), (3, 2, 4, 8), (0, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_linear_is_the_same_with_and_without_gradients(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(len(shape))
    x, weight = torch.randn(shape).to(dtype), torch.randn(6, 8).to(dtype)
    b = torch.randn(6).to(dtype) if bias else None
    with torch.inference_mode():
        assert_close(linear(x, weight, b), F.linear(x, weight, b))
        if x.dim() == 4:
            swapped = x.transpose(0, 2)
            assert_close(linear(swapped, weight, b), F.linear(swapped, weight, b))
    assert_close(linear(x, weight, b), F.linear(x, weight, b))


def test_linear_has_a_gradient() -> None:
    x, weight = torch.randn(3, 8), torch.randn(6, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    assert_close(weight.grad, x.sum(0).expand(6, 8))


def test_linear_compiles() -> None:
    layer = Linear(8, 6)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(3, 8)
    assert_close(compiled(x), layer(x))
    with torch.no_grad():
        assert_close(compiled(x), layer(x))
