"""Whole models with every kernel that they use, against the same models without: loss and gradients."""

import pytest
import torch
from toy import toy_model

pytest.importorskip("triton")

from bothways import kernels
from bothways.data.batch import Batch
from bothways.models.table import SYSTEMS
from bothways.nn import layers
from bothways.tokens import DIRECTIONS, END, L2R, PAD, R2L
from bothways.train.loss import Objective

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch_of(system: str) -> Batch:
    """Three sources with streams of several lengths; two rows for a source where one stream of two bears the loss."""
    random = torch.Generator().manual_seed(1)
    directions = (L2R, R2L, R2L) if system.startswith("abd") else DIRECTIONS[SYSTEMS[system].direction]
    rows = 6 if system == "bift" else 3
    source, streams = (torch.randint(6, 40, shape, generator=random) for shape in ((3, 7), (rows, len(directions), 9)))
    for texts in (source, streams.flatten(0, 1)):
        for i, text in enumerate(texts):
            length = (3 * i + 2) % len(text)
            text[length], text[length + 1 :] = END, PAD
    weights = torch.eye(2).repeat(3, 1) if system == "bift" else torch.ones(streams.shape[:2])
    return Batch.of_streams(source.numpy(), streams.numpy(), [d.tag for d in directions], weights.numpy(), True)


@pytest.mark.parametrize("system", ["transformer-l2r", "no-interaction", "bift", "abd-transformer"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_training_with_kernels_is_training_without(system: str, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"width": 32, "heads": 2, "feed_forward": 64, "dropout": 0.0, "future_dropout": 0.0, "norm": norm}
    found = []
    for taken in (False, True):
        model = toy_model(system, seed=3, vocabulary=40, **shape).to(DEVICE).train()
        monkeypatch.setattr(kernels, "usable", lambda x, taken=taken: taken)
        monkeypatch.setattr(layers, "MANY", 1)
        loss, likelihood = Objective(model, 0.1)(batch_of(system).to(torch.device(DEVICE)))
        loss.backward()
        found.append({"loss": loss, "likelihood": likelihood} | {n: p.grad for n, p in model.named_parameters()})
    for name, one in found[0].items():
        assert one is not None
        torch.testing.assert_close(
            found[1][name], one, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("system", ["transformer-l2r", "bift", "abd-transformer"])
def test_texts_that_are_scored_with_kernels_have_the_same_scores(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"width": 32, "heads": 2, "feed_forward": 64}
    model, batch = (
        toy_model(system, seed=3, vocabulary=40, **shape).to(DEVICE),
        batch_of(system).to(torch.device(DEVICE)),
    )
    found = []
    for taken in (False, True):
        monkeypatch.setattr(kernels, "usable", lambda x, taken=taken: taken)
        with torch.no_grad():
            hidden = model.hidden(model.encode(batch.source), batch.inputs)
            found.append(model.following(hidden).of(batch.inputs.clamp(min=END))[batch.inputs != PAD])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
