"""The kernel against the formula it stands for."""

import pytest
import torch

pytest.importorskip("triton")

from bothways.kernels.fusion import add_tanh

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("turned", [False, True])
def test_kernel_is_the_formula(turned: bool) -> None:
    torch.manual_seed(1)
    past, future = (3 * torch.randn(2, 5, 7, 30, device=DEVICE) for _ in range(2))
    past, future = (x.transpose(1, 2) if turned else x for x in (past, future))
    past, future = past.requires_grad_(), future.requires_grad_()
    ours, theirs = add_tanh(past, future, 0.3, 0.0), past + 0.3 * torch.tanh(future)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn(ours.shape, device=DEVICE)
    for one, other in zip(*(torch.autograd.grad(x, (past, future), grad) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_what_is_dropped_gives_nothing_and_gets_no_gradient() -> None:
    past, future = torch.zeros(3000, device=DEVICE), torch.full((3000,), 0.2, device=DEVICE, requires_grad=True)
    out = add_tanh(past, future, 1.0, 0.4)
    (grad,) = torch.autograd.grad(out.sum(), future)
    assert abs(float((out == 0).float().mean()) - 0.4) < 0.04
    expected = torch.tanh(torch.tensor(0.2 / 0.6, device=DEVICE))
    torch.testing.assert_close(out[out != 0], expected.expand(int((out != 0).sum())))
    torch.testing.assert_close(grad, torch.where(out == 0, 0.0, (1 - expected**2) / 0.6))
