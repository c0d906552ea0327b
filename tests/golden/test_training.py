"""The training loop against a textbook's: sentence by sentence, with no padding, no fused kernel and no sharing out."""

import copy
import math
from itertools import islice
from pathlib import Path

import pytest
import torch
from corpus import tiny

from bothways.config import TrainConfig, parse
from bothways.data.batch import PairBuilder
from bothways.data.corpus import Prepared
from bothways.data.sampler import Sampler
from bothways.experiment import builder_of, validation_of
from bothways.models.interface import Seq2Seq
from bothways.models.table import build, resolve
from bothways.run import Run
from bothways.tokens import DIRECTIONS, END, FIRST_PREDICTED, L2R, PAD, R2L, turn
from bothways.train.loop import Trainer, learning_rate
from bothways.translator import Translator

UPDATES, SMOOTHING = 7, 0.1


@pytest.mark.parametrize(
    "update, rate", [(1, 0.001), (2, 0.002), (4, 0.004), (16, 0.002), (64, 0.001), (400, 0.0004), (40_000, 0.00004)]
)
def test_the_rate_rises_to_its_peak_and_falls_with_the_square_root(update: int, rate: float) -> None:
    assert learning_rate(TrainConfig(learning_rate=0.004, warmup=4), update - 1) == pytest.approx(rate)


def smoothed(model: Seq2Seq, source: list[int], target: list[int], direction: int) -> tuple[torch.Tensor, int]:
    """Label-smoothed negative log-likelihood of one target, in one direction, and its tokens."""
    way = DIRECTIONS["both"][direction]
    own = turn(target, way)
    log_probs = model(torch.tensor([[*source, END]]), torch.tensor([[[way.tag, *own]]]))[0, 0]
    gold = log_probs[range(len(own) + 1), [*own, END]]
    spread = log_probs[:, FIRST_PREDICTED:].mean(1)
    return -((1 - SMOOTHING) * gold + SMOOTHING * spread).sum(), len(own) + 1


@pytest.mark.parametrize("clip, decay", [(0.5, 0.0), (0.0, 0.0), (0.0, 0.2)])
@pytest.mark.parametrize("system", ["transformer-l2r", "no-interaction"])
def test_training_is_the_textbooks_loop(
    prepared: Prepared, tmp_path: Path, system: str, clip: float, decay: float
) -> None:
    """Epsilon is large so that Adam does not scale up rounding noise, where a gradient should be zero."""
    options = {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": decay}
    config = TrainConfig(
        updates=UPDATES, batch_tokens=90, learning_rate=0.01, warmup=3, seed=3, label_smoothing=SMOOTHING, clip=clip,
        adam_betas=[0.8, 0.9], adam_epsilon=1e-3, weight_decay=decay, accumulation=2,
    )  # fmt: skip
    settings = resolve(parse(tiny(prepared.folder, system, model={"dropout": 0.0})))
    torch.manual_seed(3)
    model = build(settings, prepared.source_vocabulary.size, prepared.target_vocabulary.size)
    slow, pair = copy.deepcopy(model), prepared.train
    directions = DIRECTIONS[settings.model.direction or "both"]
    Trainer(model, PairBuilder(pair, directions), config, tmp_path, device="cpu", quiet=True).run()

    adam = torch.optim.AdamW(slow.parameters(), lr=0.0, **options, foreach=False)  # type: ignore[arg-type]
    lengths = (pair.source.lengths, pair.target.lengths)
    clipped = 0
    for n, update in enumerate(islice(Sampler(lengths, 90, config.max_length, 3).updates(0), UPDATES), 1):
        adam.zero_grad()
        found = [
            smoothed(slow, pair.source[row].tolist(), pair.target[row].tolist(), d)
            for row in update.rows
            for d in directions
        ]
        (sum(loss for loss, _ in found) / sum(tokens for _, tokens in found)).backward()  # type: ignore[union-attr]
        gradients = [p.grad for p in slow.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        if clip and norm > clip:
            clipped += 1
            for gradient in gradients:
                gradient *= clip / norm
        adam.param_groups[0]["lr"] = 0.01 * (n / 3 if n <= 3 else math.sqrt(3 / n))
        adam.step()
    assert bool(clipped) == bool(clip)
    for (name, fast), expected in zip(model.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(fast, expected, rtol=1e-4, atol=2e-5, msg=name)


def test_pairs_are_never_built_for_a_model_that_reads_the_other_side(prepared: Prepared) -> None:
    """Gold text in both streams with interaction is the leak: not even our own mistake may get that far."""
    config = resolve(parse(tiny(prepared.folder, "bift")))
    with pytest.raises(AssertionError, match="gold text on both sides"):
        builder_of(config, prepared)


def test_the_validation_loss_of_each_direction_is_under_the_others_decoded_text(
    prepared: Prepared, tmp_path: Path
) -> None:
    """As search will see it. Under gold text it is another number, and under none yet another."""
    settings = resolve(parse(tiny(prepared.folder, "bift", model={"future_weight": 1.0, "dropout": 0.0})))
    run = Run.create(tmp_path, settings, prepared)
    model = run.fresh_model().eval()
    with torch.no_grad():
        model.output_weight.mul_(3)
    valid, validate = next(iter(prepared.valid.values())), validation_of(run, prepared)
    search = settings.search.model_copy(update={"greedy": True})
    decoded = Translator(run, model, search).translate(valid.source_lines())
    totals, count = {"decoded": 0.0, "gold": 0.0, "none": 0.0}, 0
    for i, found in enumerate(decoded):
        source, gold = torch.tensor([[*valid.pair.source[i].tolist(), END]]), valid.pair.target[i].tolist()
        for way, other in ((L2R, R2L), (R2L, L2R)):
            futures = {"decoded": run.target_vocabulary.encode(found.best[other.label].text), "gold": gold, "none": []}
            own = turn(gold, way)
            labels, count = [*own, END], count + len(own) + 1
            for name, text in futures.items():
                streams = {way: [way.tag, *own]}
                if name != "none":
                    streams[other] = [other.tag, *turn(text, other), *[PAD] * len(own)][: len(labels)]
                with torch.no_grad():
                    log_probs = model(source, torch.tensor([[streams[d] for d in sorted(streams)]]))
                log_probs = log_probs[0, sorted(streams).index(way)]
                totals[name] -= float(log_probs[range(len(labels)), labels].sum())
    assert validate is not None
    loss = validate(model)["loss"]
    assert loss == pytest.approx(totals["decoded"] / count, abs=1e-5)
    assert min(abs(loss - totals[name] / count) for name in ("gold", "none")) > 1e-3
