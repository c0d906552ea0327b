"""The loss against PyTorch's own cross-entropy over all logits at once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bothways.tokens import FIRST_PREDICTED
from bothways.train import loss as module
from bothways.train.loss import linear_cross_entropy

N, V, E = 23, 31, 12


def inputs(dtype: torch.dtype, n: int = N) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(n, E, generator=draw, dtype=dtype).requires_grad_()
    weight = torch.randn(V, E, generator=draw, dtype=dtype).requires_grad_()
    labels = torch.randint(FIRST_PREDICTED, V, (n,), generator=draw)
    weights = torch.rand(n, generator=draw)
    weights[::5] = 0
    weights[1::5] = 1
    return hidden, weight, labels, weights


def reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Over the tokens that can be predicted, PyTorch's definition of label smoothing."""
    logits = (hidden @ weight.T)[:, FIRST_PREDICTED:]
    each = [
        F.cross_entropy(logits, labels - FIRST_PREDICTED, label_smoothing=s, reduction="none") @ weights.to(logits)
        for s in (smoothing, 0.0)
    ]
    return each[0], each[1]


@pytest.mark.parametrize("chunk", [4096, 23, 22, 7, 1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("dtype, close", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_cross_entropy(
    dtype: torch.dtype, close: float, smoothing: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    found, expected = inputs(dtype), inputs(dtype)
    loss, likelihood = linear_cross_entropy(*found, smoothing)
    wanted, wanted_likelihood = reference(*expected, smoothing)
    torch.testing.assert_close(loss, wanted, rtol=close, atol=close)
    torch.testing.assert_close(likelihood, wanted_likelihood, rtol=close, atol=close)
    (loss * 0.37).backward()  # the update's normalization comes after it
    (wanted * 0.37).backward()
    for name, a, b in zip(("hidden", "weight"), found, expected, strict=False):
        torch.testing.assert_close(
            a.grad, b.grad, rtol=close, atol=close, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert not likelihood.requires_grad
    assert (found[1].grad[:FIRST_PREDICTED] == 0).all()  # type: ignore[index]


def test_gradient_by_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)
    hidden, weight, labels, weights = inputs(torch.float64, 5)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels, weights, 0.1)[0], (hidden, weight))


def test_without_gradient() -> None:
    with torch.no_grad():
        hidden, weight, labels, weights = inputs(torch.float32)
        found = linear_cross_entropy(hidden, weight, labels, weights, 0.1)
        torch.testing.assert_close(found, reference(hidden, weight, labels, weights, 0.1))


def test_nothing_with_a_loss() -> None:
    hidden, weight, labels, weights = inputs(torch.float32, 1)
    loss, _ = linear_cross_entropy(hidden[:0], weight, labels[:0], weights[:0], 0.1)
    loss.backward()
    assert loss == 0 and (weight.grad == 0).all()  # type: ignore[union-attr]


def test_bfloat16_is_close() -> None:
    found, expected = inputs(torch.float32), inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, likelihood = linear_cross_entropy(*found, 0.1)
    assert loss.dtype == likelihood.dtype == torch.float32  # sums stay exact
    wanted, _ = reference(*expected, 0.1)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-2)
    loss.backward()
    wanted.backward()
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert a.grad is not None and b.grad is not None and a.grad.dtype == torch.float32
        assert F.cosine_similarity(a.grad.flatten(), b.grad.flatten(), dim=0) > 0.999
        assert (a.grad - b.grad).norm() / b.grad.norm() < 0.02
    shift = 100 + torch.zeros(N, 1)  # large logits: no overflow, no loss of the small differences in float32
    assert torch.isfinite(linear_cross_entropy(found[0] * shift, *found[1:], 0.1)[0])
