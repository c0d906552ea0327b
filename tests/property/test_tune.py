"""Tuning: what a set scores under every setting is what decoding it anew scores, and the choice becomes the run's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import command, random_run, translator_of

from bothways.config import load
from bothways.data.corpus import Prepared
from bothways.evaluate.scores import score
from bothways.search.hypothesis import Found, Hypothesis
from bothways.search.rerank import under
from bothways.tokens import DIRECTIONS
from bothways.translator import Translator, search_each
from bothways.tuning import PENALTIES, WEIGHTS, Value, best_texts, measured, table, tune

ENDING = 0.3
CASES: list[tuple[str, dict[str, Any]]] = [
    ("transformer-l2r", {}),
    ("transformer-r2l", {"beam": 3}),
    ("bift", {}),
    ("abd-transformer", {}),
    ("no-interaction", {"rerank": "self"}),
    ("bift", {"rerank": "self", "rerank_future": "decoded"}),
    ("bift", {"rerank": "self", "greedy": True}),
]


@pytest.mark.parametrize("system, options", CASES)
def test_one_search_gives_what_decoding_anew_gives(
    prepared: Prepared, tmp_path: Path, system: str, options: dict[str, Any]
) -> None:
    """For every length penalty and weight, with early stop, which tuning does without."""
    options = {"max_length": 9, "nbest": 1, **options}
    translator = translator_of(prepared, tmp_path / "run", system, 2, ENDING, **options)
    lines = [*prepared.valid["dev"].source_lines(), "", "a b c"]
    penalties, weights = [0.0, 0.3, 0.6, 1.0, 1.7], [0.0, 0.4, 1.0] if translator.rescores else [0.5]
    found = best_texts(translator, lines, penalties, weights)
    different = set()
    for penalty in penalties:
        for weight in weights:
            change = {"length_penalty": penalty, "rerank_weight": weight}
            anew = Translator.open(tmp_path / "run", device="cpu", **{"beam": 4, **options, **change})
            texts = tuple(one.text for one in anew.stream(lines, allow_empty=True))
            decode = translator.run.target_vocabulary.decode
            assert tuple(decode(list(one[penalty, weight])) for one in found) == texts
            different.add(texts)
    assert len(different) > 2 or options.get("greedy")


@torch.inference_mode()
@pytest.mark.parametrize("system", ["transformer-l2r", "bift"])
def test_all_that_is_complete_holds_every_list(prepared: Prepared, tmp_path: Path, system: str) -> None:
    """The n-best lists of ordinary searches under several penalties, hypothesis by hypothesis."""

    translator = translator_of(prepared, tmp_path / "run", system, 2, ENDING, max_length=9)
    sources = translator.encoded(["a b c d", "h", "< a b"])
    panel, places, device = translator.panel, [0, 1, 2], translator.device
    _, (every,) = search_each(panel, sources, places, translator.config, device, all_complete=True)

    def told(hypotheses: list[Hypothesis]) -> list[tuple[Any, ...]]:
        return [(h.tokens, h.direction, h.cut_off, pytest.approx(h.score, abs=1e-6)) for h in hypotheses]

    for penalty in (0.0, 0.6, 1.4):
        config = translator.config.model_copy(update={"length_penalty": penalty})
        found: list[Found]
        _, (found,) = search_each(panel, sources, places, config, device)
        for one, whole in zip(found, every, strict=True):
            assert len(whole.hypotheses) > 4
            assert told(under(penalty, whole.hypotheses, 4)) == told(one.hypotheses)
    assert {h.direction for one in every for h in one.hypotheses} <= set(DIRECTIONS[translator.config.direction or ""])


@pytest.mark.parametrize("metric", ["bleu", "length_ratio", "ter"])
def test_the_best_value_is_chosen(prepared: Prepared, tmp_path: Path, metric: str) -> None:
    """Scores are those of `score`; the best is the highest, or the lowest, or the nearest to 1."""
    translator = translator_of(prepared, tmp_path / "run", "bift", 2, ENDING, max_length=9)
    valid = prepared.valid["dev"]
    tuned = measured(translator, valid, metric, found := best_texts(translator, valid.source_lines(), PENALTIES, [0.5]))
    decode = translator.run.target_vocabulary.decode
    for value in tuned.values:
        texts = [decode(list(one[value.length_penalty, 0.5])) for one in found]
        expected = [score(texts, valid.references(), [name])[0].score for name in (metric, "length_ratio")]
        assert [value.score, value.length_ratio] == pytest.approx(expected)
    best = {"bleu": max, "ter": min, "length_ratio": lambda scores: min(scores, key=lambda x: abs(x - 1))}[metric]
    assert tuned.chosen.score == best([value.score for value in tuned.values])
    near = min(abs(v.length_penalty - 0.6) for v in tuned.values if v.score == tuned.chosen.score)
    assert abs(tuned.chosen.length_penalty - 0.6) == near  # of equals the one that changes least
    assert tuned.before.length_penalty == 0.6
    assert table(tuned).count("\n") == 1 + len(PENALTIES)


def test_the_choice_is_written_and_decoded_with(prepared: Prepared, tmp_path: Path) -> None:
    run = random_run(prepared, tmp_path / "run", "bift", 2, ENDING)
    found = command("tune", run, "--on", "dev", "--rerank", "self", "--search.max_length=9", "--device", "cpu")
    assert found.returncode == 0, found.stderr
    written, told = load(run / "config.yaml"), json.loads((run / "tuned.json").read_text(encoding="utf-8"))
    assert found.stdout.count("\n") >= 1 + len(PENALTIES) and "chosen" in found.stdout and "weight" in found.stdout
    assert len(told["values"]) == len(PENALTIES) * len(WEIGHTS)
    assert (told["on"], told["metric"], told["checkpoint"]) == ("dev", "bleu", "best")
    chosen = Value(**told["chosen"])
    assert chosen.score == max(value["score"] for value in told["values"])
    search = written.search
    assert (search.length_penalty, search.rerank_weight) == (chosen.length_penalty, chosen.rerank_weight)
    assert (search.rerank, search.max_length) == ("self", 9)
    valid = prepared.valid["dev"]
    outputs = [one.text for one in Translator.open(run, device="cpu").stream(valid.source_lines())]
    assert score(outputs, valid.references())[0].score == pytest.approx(chosen.score)
    again = tune(run, device="cpu")  # from where it stands now, nothing is better
    assert again.before == again.chosen
