"""Runs that consist of other runs: an ensemble in one search, and a panel that rescores; both through all commands."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from corpus import SOURCES, command, make_prepared, random_run, tiny, write_config, write_lines
from toy import decode as search
from toy import naive_run, pad, settings, streams, toy_model, toy_sources

from bothways import decoding, load, reporting
from bothways.config import SearchConfig, parse
from bothways.data.corpus import Prepared
from bothways.errors import BothwaysError
from bothways.experiment import train
from bothways.models.ensemble import Ensemble, Panel
from bothways.models.table import build, one_direction, resolve
from bothways.run import Run
from bothways.search.hypothesis import length_norm
from bothways.tokens import L2R, R2L, Direction
from bothways.train.strategy import Part
from bothways.translator import Translator
from bothways.tuning import best_texts

CLOSE = 1e-5
ENDING = 0.3


# -- an ensemble -------------------------------------------------------------------------------------------------------


def test_a_model_twice_is_that_model() -> None:
    model = toy_model("bift", seed=1)
    twice = Ensemble([model, model])
    source, inputs = pad(toy_sources(1, 2)), streams(1, [(3, 2), (1, 4)])
    with torch.inference_mode():
        torch.testing.assert_close(twice(source, inputs), model(source, inputs), rtol=0, atol=0)
    for one, other in zip(
        search(twice, toy_sources(1), 6, settings(nbest=4)),
        search(model, toy_sources(1), 6, settings(nbest=4)),
        strict=True,
    ):
        assert one == other


def test_it_is_the_mean_of_the_members_log_probabilities() -> None:
    """Of different shapes, in teacher forcing and, through the naive search that replays, in steps."""
    members = [toy_model("bift", 1), toy_model("no-interaction", 2, width=12, decoder_layers=1), toy_model("bift", 3)]
    both, sources = Ensemble(members).eval(), toy_sources(4)
    inputs = streams(2, [(3, 2), (1, 4)])
    assert both.interaction and both.parameter_count() == sum(m.parameter_count() for m in members)
    with torch.inference_mode():
        expected = torch.stack([m(pad(sources[:2]), inputs) for m in members]).mean(0)
        torch.testing.assert_close(both(pad(sources[:2]), inputs), expected)
        state = both.start(both.encode(pad(sources[:2])), 2, 1)
        for t in range(3):  # both streams have so many
            step, state = both.step(
                inputs[..., t, None], state, torch.zeros(2, 2, 1, 1, dtype=torch.long), torch.ones(2, 2, 1, 1)
            )
            real = (inputs[..., t] != 0) & (inputs[..., t].flip(1) != 0)
            torch.testing.assert_close(step.log_probs().squeeze(2)[real], expected[..., t, :][real])
    config = settings(nbest=4)
    together = search(both, sources, 5, config)
    for found, source in zip(together, sources, strict=True):
        slow = naive_run(both, source, 5, config).found
        assert [h.tokens for h in found.hypotheses] == [h.tokens for h in slow.hypotheses]
        assert [h.score for h in found.hypotheses] == pytest.approx([h.score for h in slow.hypotheses], abs=CLOSE)
        (alone,) = search(both, [source], 5, config)
        assert [h.tokens for h in alone.hypotheses] == [h.tokens for h in found.hypotheses]


# -- runs of runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def members(prepared: Prepared, tmp_path: Path) -> dict[str, Path]:
    """Random runs of every kind, with one vocabulary."""
    seeds = {"transformer-l2r": 2, "transformer-r2l": 1, "no-interaction": 2, "bift": 3, "abd-transformer": 4}
    return {system: random_run(prepared, tmp_path / system, system, seed, ENDING) for system, seed in seeds.items()}


def of_runs(prepared: Prepared, folder: Path, system: str, *runs: Path, **search: Any) -> Path:
    """A run that consists of others."""
    config = tiny(prepared.folder, system, runs=[str(run) for run in runs], search={"beam": 4, "max_length": 9})
    train(config, folder, device="cpu", quiet=True)
    return folder


def forced(run: Path, source: str, text: str, direction: Direction) -> tuple[float, int]:
    """Log-probability and number of tokens that a run gives a text."""
    (one,) = Translator.open(run, device="cpu", beam=4, max_length=9).score([source], [text], direction)
    return sum(one.token_scores), len(one.token_scores)


@pytest.mark.parametrize("weight, alpha", [(0.5, 0.6), (0.2, 1.2)])
def test_rerank_is_the_union_ordered_by_forced_scores(
    prepared: Prepared, tmp_path: Path, members: dict[str, Path], weight: float, alpha: float
) -> None:
    l2r, r2l = members["transformer-l2r"], members["transformer-r2l"]
    run = of_runs(prepared, tmp_path / "rerank", "rerank", l2r, r2l)
    options: dict[str, Any] = {"beam": 4, "nbest": 4, "length_penalty": alpha, "max_length": 9, "device": "cpu"}
    found = load(str(run), **options, rerank_weight=weight).translate(SOURCES)
    lists = [load(str(path), **options).translate(SOURCES) for path in (l2r, r2l)]
    sizes = set()
    for i, source in enumerate(SOURCES):
        named = [h for some in lists for h in some[i].hypotheses]
        texts = {h.text for h in named if not h.cut_off} or {h.text for h in named}
        scores = {}
        for text in texts:
            (a, n), (b, _) = forced(l2r, source, text, L2R), forced(r2l, source, text, R2L)
            scores[text] = ((1 - weight) * a + weight * b) / float(length_norm(n, alpha))
        order = sorted(scores, key=lambda text: -scores[text])[:4]
        assert [h.text for h in found[i].hypotheses] == order
        assert [h.score for h in found[i].hypotheses] == pytest.approx([scores[text] for text in order], abs=CLOSE)
        sizes.add(len(texts))
        finders = {h.text: [o.direction for o in named if o.text == h.text] for h in named}
        assert all(h.direction == finders[h.text][0] for h in found[i].hypotheses)
    assert max(sizes) > 4  # neither list alone


def test_rerank_takes_runs_of_any_kind(prepared: Prepared, tmp_path: Path, members: dict[str, Path]) -> None:
    """Runs weigh alike, the two directions of one share its weight; batches change nothing; futures are read."""
    runs = [members[name] for name in ("transformer-l2r", "bift", "no-interaction", "abd-transformer")]
    run = of_runs(prepared, tmp_path / "rerank", "rerank", *runs)
    options: dict[str, Any] = {"nbest": 4, "device": "cpu"}
    found = load(str(run), **options).translate(SOURCES)
    alone = load(str(run), **options, batch_sentences=1).translate(SOURCES)
    for source, one, other in zip(SOURCES, found, alone, strict=True):
        assert [h.text for h in one.hypotheses] == [h.text for h in other.hypotheses]
        assert [h.score for h in one.hypotheses] == pytest.approx([h.score for h in other.hypotheses], abs=CLOSE)
        for h in one.hypotheses:
            a, n = forced(runs[0], source, h.text, L2R)
            b, c = ([forced(path, source, h.text, d)[0] for d in (L2R, R2L)] for path in runs[1:3])
            d, _ = forced(runs[3], source, h.text, L2R)
            total = (a + sum(b) / 2 + sum(c) / 2 + d) / 4
            assert h.score == pytest.approx(total / float(length_norm(n, 0.6)), abs=CLOSE)
    decoded = load(str(run), **options, rerank_future="decoded").translate(SOURCES)
    assert [one.score for one in decoded] != pytest.approx([one.score for one in found], abs=1e-4)


@pytest.mark.parametrize("future", ["none", "decoded"])
def test_tuning_knows_what_a_rerank_run_finds(
    prepared: Prepared, tmp_path: Path, members: dict[str, Path], future: str
) -> None:
    run = of_runs(prepared, tmp_path / "rerank", "rerank", members["transformer-l2r"], members["bift"])
    translator = load(str(run), device="cpu", rerank_future=future)
    penalties, weights = [0.0, 0.6, 1.3], [0.0, 0.5, 0.9]
    found, different = best_texts(translator, SOURCES, penalties, weights), set()
    for penalty in penalties:
        for weight in weights:
            options = {"length_penalty": penalty, "rerank_weight": weight, "rerank_future": future}
            texts = [one.text for one in load(str(run), device="cpu", **options).translate(SOURCES)]
            decode = translator.run.target_vocabulary.decode
            assert [decode(list(one[penalty, weight])) for one in found] == texts
            different.add(tuple(texts))
    assert len(different) > 3


def test_given_candidates_are_rescored(prepared: Prepared, tmp_path: Path, members: dict[str, Path]) -> None:
    """From files of several toolkits; by a panel, by one model in both directions, by a model of one direction."""
    write_lines(tmp_path / "source", ["a b", "c"])
    write_lines(tmp_path / "ours", ["0 ||| b a ||| -0.5", "1 ||| c ||| -1", "0 ||| a b ||| -2"])
    write_lines(tmp_path / "theirs", ["0 ||| b a ||| LM0= -3 ||| -1", "0 ||| a a a", "1 |||  ||| -3"])
    panel = of_runs(prepared, tmp_path / "rerank", "rerank", members["transformer-l2r"], members["transformer-r2l"])
    judges = {
        panel: [(members["transformer-l2r"], L2R, 0.5), (members["transformer-r2l"], R2L, 0.5)],
        members["no-interaction"]: [(members["no-interaction"], d, 0.5) for d in (L2R, R2L)],
        members["transformer-r2l"]: [(members["transformer-r2l"], R2L, 1.0)],
    }
    for run, parts in judges.items():
        words = ["--candidates", tmp_path / "ours", tmp_path / "theirs", "--beam", "4", "--nbest", "4"]
        found = command("decode", run, "--input", tmp_path / "source", "--device", "cpu", "--quiet", *words)
        assert found.returncode == 0, found.stderr
        rows = [line.split(" ||| ") for line in found.stdout.splitlines()]
        assert sorted((row[0], row[1]) for row in rows) == [
            ("0", "a a a"),
            ("0", "a b"),
            ("0", "b a"),
            ("1", ""),
            ("1", "c"),
        ]
        for number, text, score in rows:
            said = [(forced(path, ["a b", "c"][int(number)], text, d), weight) for path, d, weight in parts]
            total = sum(weight * log_prob for (log_prob, _), weight in said)
            assert float(score) == pytest.approx(total / float(length_norm(said[0][0][1], 0.6)), abs=CLOSE)
        assert [float(row[2]) for row in rows[:3]] == sorted((float(row[2]) for row in rows[:3]), reverse=True)
    # a score of given text is that of a single candidate
    found = command(
        "decode", panel, "--input", tmp_path / "source", "--device", "cpu", "--quiet", "--score", tmp_path / "source"
    )
    again = load(str(panel), device="cpu").rescore(["a b", "c"], [["a b"], ["c"]])
    assert [float(line) for line in found.stdout.splitlines()] == pytest.approx([one.score for one in again], abs=CLOSE)
    assert (again[0].text, again[0].direction, again[0].hypotheses[0].token_scores) == ("a b", "", [])


def test_rerank_trains_what_it_consists_of(prepared: Prepared, tmp_path: Path) -> None:
    """Two stages, done once; the folder can be moved, and every command takes it."""
    config = write_config(tmp_path / "c.yaml", tiny(prepared.folder, "rerank", train={"updates": 2, "save_every": 1}))
    first = command("train", config, "--output", tmp_path / "run", "--device", "cpu")
    again = command("train", config, "--output", tmp_path / "run", "--device", "cpu")
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert "stage 1/2 l2r: done before" in again.stderr and "stage 2/2 r2l: done before" in again.stderr
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert written["runs"] == ["l2r", "r2l"]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert list(manifest["stages"]) == ["l2r", "r2l"]
    run = shutil.move(tmp_path / "run", tmp_path / "moved")
    assert [member.config.system for member in Run.open(run).members] == ["transformer-l2r", "transformer-r2l"]
    write_lines(tmp_path / "in", SOURCES)
    for words in (
        ["decode", run, "--input", tmp_path / "in", "--beam", "3"],
        ["decode", run, "--split", "dev", "--output", tmp_path / "decoded"],
        ["tune", run, "--on", "dev"],
        ["report", run, "--test", "dev", "--json", tmp_path / "report.json", "--resamples", "10"],
        ["report", run, "--test", "dev", "--resamples", "10"],
    ):
        found = command(*words, "--device", "cpu")
        assert found.returncode == 0, found.stderr
    assert "decoding dev" not in found.stderr  # the second report decodes nothing
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert "updates_per_second" in json.dumps(told)
    speeds = [reporting._updates_per_second(one) for one in (Run.open(run), *Run.open(run).members)]
    assert speeds[0] is not None and speeds[0] == pytest.approx(1 / sum(1 / (x or 0) for x in speeds[1:]))
    assert "rerank_weight" in json.loads((run / "tuned.json").read_text(encoding="utf-8"))["chosen"]


@pytest.mark.parametrize("system", ["rerank", "ensemble"])
def test_runs_elsewhere_are_found_from_anywhere(
    prepared: Prepared, tmp_path: Path, members: dict[str, Path], monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [Path("no-interaction"), Path("bift")]
    run = of_runs(prepared, Path("run"), system, *runs)
    expected = [one.text for one in load(str(run), device="cpu").translate(SOURCES)]
    monkeypatch.chdir("/")
    assert [one.text for one in load(str(tmp_path / "run"), device="cpu").translate(SOURCES)] == expected
    train(tmp_path / "run" / "config.yaml", tmp_path / "run", device="cpu", quiet=True)  # its own file says the same
    model = Run.open(tmp_path / "run").model()
    assert isinstance(model, Panel if system == "rerank" else Ensemble)
    count = [load(str(path), device="cpu").model.parameter_count() for path in (tmp_path / "bift", tmp_path / "run")]
    assert count[1] == 2 * count[0]
    if system == "ensemble":  # it rescores like any model with both directions
        reranked = load(str(tmp_path / "run"), device="cpu", rerank="self").translate(SOURCES)
        assert {one.direction for one in reranked} <= {"l2r", "r2l"}


def test_rerank_has_twice_the_transformers_parameters_at_big() -> None:
    config = resolve(parse({"system": "rerank", "data": "-", "model": {"preset": "big"}}))
    with torch.device("meta"):
        parts = [build(one_direction(config, d), 30_000, 30_000) for d in ("l2r", "r2l")]
    panel = Panel(parts, [(L2R,), (R2L,)])
    assert panel.parameter_count() / parts[0].parameter_count() == 2.0
    assert parts[0].parameter_count() == pytest.approx(207e6, rel=0.02)  # the paper has 207.8M


def test_shards_of_one_system_are_not_taken_for_the_others(
    prepared: Prepared, tmp_path: Path, members: dict[str, Path]
) -> None:
    """A panel and an ensemble of the same runs have the same weights, and decode other text with them."""
    job = decoding.Job(prepared, "dev", SearchConfig(), tmp_path / "decoded", "cpu")
    found = set()
    for system in ("rerank", "ensemble"):
        run = of_runs(prepared, tmp_path / system, system, members["no-interaction"], members["bift"])
        part = Part(run, np.arange(len(job.sources)), "both", "best")
        found.add(decoding._identity(job, [part], decoding._Translators(job, print)))
    assert len(found) == 2


def test_runs_that_do_not_fit_are_refused(prepared: Prepared, tmp_path: Path, members: dict[str, Path]) -> None:
    l2r, r2l, bift, abd = (members[name] for name in ("transformer-l2r", "transformer-r2l", "bift", "abd-transformer"))
    other = make_prepared(tmp_path / "other", seed=5, train=4)
    strange = random_run(other, tmp_path / "strange", "transformer-l2r")
    panel = of_runs(prepared, tmp_path / "panel", "rerank", l2r, r2l)
    pair = of_runs(prepared, tmp_path / "pair", "ensemble", bift, bift)
    for system, runs, message in (
        (
            "ensemble",
            [l2r, r2l],
            f"runs: an ensemble's must have the same directions, but {l2r} has l2r and {r2l} r2l; ",
        ),
        ("ensemble", [l2r, bift], f"but {l2r} has l2r and {bift} l2r and r2l; system rerank takes both"),
        (
            "ensemble",
            [l2r, abd],
            f"runs: {abd} decodes in two passes (abd-transformer) and cannot be part of an ensemble",
        ),
        ("rerank", [l2r, strange], f"runs: {strange} has another vocabulary than {l2r}; they must share it"),
        ("rerank", [strange, strange], f"runs: {strange} has another vocabulary than {prepared.folder}, the `data:`"),
        ("rerank", [panel, l2r], f"runs: {panel} has system rerank; name the runs that it consists of"),
        ("ensemble", [panel, l2r], f"runs: {panel} has system rerank; name the runs that it consists of"),
        ("ensemble", [pair, bift], f"runs: {pair} has system ensemble; name the runs that it consists of"),
        ("rerank", [l2r], f"runs: must name two or more runs, got ['{l2r}']"),
        ("rerank", [l2r, tmp_path / "no"], f"{tmp_path / 'no'}: is not a run"),
        ("bift", [l2r, r2l], "runs: belongs to the systems rerank and ensemble, but system is bift"),
    ):
        with pytest.raises(BothwaysError) as said:
            of_runs(prepared, tmp_path / "run", system, *runs)
        assert message in str(said.value) and "\n" not in str(said.value)
        assert not (tmp_path / "run").exists()
    with pytest.raises(BothwaysError, match="runs: is required for system ensemble: two or more trained runs"):
        train(tiny(prepared.folder, "ensemble"), tmp_path / "run", device="cpu", quiet=True)
    three = of_runs(prepared, tmp_path / "three", "rerank", l2r, r2l, bift)
    for run, options, message in (
        (panel, {"rerank": "self"}, "search.rerank: .* is a rerank run, whose runs rescore in any case; `self` is for"),
        (
            panel,
            {"direction": "l2r"},
            "search.direction: .* is a rerank run, whose runs decode as they can; decode one",
        ),
        (panel, {"rerank_future": "decoded"}, "--future: .* is a rerank run, which reads no future; accepted: none"),
        (three, {"rerank_weight": 0.3}, "search.rerank_weight: is for two runs; the 3 of .* weigh alike, got 0.3"),
    ):
        with pytest.raises(BothwaysError, match=message):
            load(str(run), device="cpu", **options)
    with pytest.raises(
        BothwaysError, match=r"--trace: .* is a rerank run, which searches several times; trace its runs"
    ):
        load(str(panel), device="cpu").translate(["a"], trace=True)
    with pytest.raises(BothwaysError, match="is a rerank run, which scores texts by all its runs: see `rescore`"):
        load(str(panel), device="cpu").score(["a"], ["a"], L2R)
