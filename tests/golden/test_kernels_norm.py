"""The kernels against the formulas they stand for."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from bothways.kernels.dropout import new_seed
from bothways.kernels.norm import add_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers that want a gradient."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE).requires_grad_()


def gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Of a random linear function of `out`."""
    return list(torch.autograd.grad(out, inputs, torch.cos(torch.arange(out.numel(), device=DEVICE)).view(out.shape)))


@pytest.mark.parametrize("shape", [(3, 5, 48), (1, 64), (130, 256)])
def test_add_norm_is_the_norm_of_the_sum(shape: tuple[int, ...]) -> None:
    x, h, weight, bias = drawn(*shape), drawn(*shape, seed=1), drawn(shape[-1], seed=2), drawn(shape[-1], seed=3)
    ours = add_norm(x, h, weight, bias, 1e-5, 0.0)
    theirs = F.layer_norm(x + h, shape[-1:], weight, bias, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(ours, x, h, weight, bias), gradients(theirs, x, h, weight, bias), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_add_norm_drops_the_same_in_both_passes() -> None:
    """What is dropped is found from the result; the formula with that mask must give the same gradients."""
    x, h, weight, bias = drawn(40, 64), drawn(40, 64, seed=1), drawn(64, seed=2), drawn(64, seed=3)
    ones, zero = torch.ones_like(weight), torch.zeros_like(bias)
    torch.manual_seed(7)
    normal = add_norm(torch.zeros_like(x), torch.ones_like(h), ones, zero, 1e-5, 0.4)
    mask = (normal > 0).float() / 0.6
    torch.manual_seed(7)
    ours = add_norm(x, h, weight, bias, 1e-5, 0.4)
    theirs = F.layer_norm(x + h * mask, (64,), weight, bias, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(ours, x, h, weight, bias), gradients(theirs, x, h, weight, bias), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_dropout_keeps_the_share_it_should_and_differs_from_seed_to_seed() -> None:
    x, ones, zero = torch.zeros(200, 64, device=DEVICE), torch.ones(64, device=DEVICE), torch.zeros(64, device=DEVICE)
    masks = [add_norm(x, torch.ones_like(x), ones, zero, 1e-5, 0.3) > 0 for _ in range(3)]
    for mask in masks:
        assert abs(float(mask.float().mean()) - 0.7) < 0.02  # four standard deviations
        assert mask.float().mean(0).std() < 0.06 and mask.float().mean(1).std() < 0.09
    for one, other in ((0, 1), (0, 2), (1, 2)):  # independent: 0.7² + 0.3² agree
        assert abs(float((masks[one] == masks[other]).float().mean()) - 0.58) < 0.02
    torch.manual_seed(3)
    first = new_seed(x)
    torch.manual_seed(3)
    assert torch.equal(first, new_seed(x))
