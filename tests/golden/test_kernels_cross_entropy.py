"""The kernel against the formula it stands for."""

import pytest
import torch

pytest.importorskip("triton")

from bothways.tokens import FIRST_PREDICTED
from bothways.train.loss import _chunk, _chunk_in_a_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("V", [11, 130, 5000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_kernel_is_the_formula(V: int, smoothing: float) -> None:
    torch.manual_seed(V)
    logits = (3 * torch.randn(7, V)).to(DEVICE)
    label = torch.randint(FIRST_PREDICTED, V, (7, 1)).to(DEVICE)
    share = torch.tensor([1.0, 0.0, 0.5, 1, 1, 2, 1]).to(DEVICE)
    theirs = _chunk(logits.clone(), label, share, smoothing, torch.float32, True)
    ours = _chunk_in_a_kernel(logits.clone(), label, share, smoothing, torch.float32, True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_logits_stay_where_no_gradient_is_needed() -> None:
    logits = torch.randn(3, 40, device=DEVICE)
    before = logits.clone()
    labels = torch.full((3, 1), 9, device=DEVICE)
    _, _, grad = _chunk_in_a_kernel(logits, labels, torch.ones(3, device=DEVICE), 0.1, torch.float32, False)
    assert grad is None and torch.equal(logits, before)
