"""Tests of significance against enumeration by hand, against sacreBLEU's own, and on what must not be significant."""

import json
import random
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from bothways import cli
from bothways.errors import ConfigError, DataError
from bothways.evaluate import scores, significance
from bothways.evaluate.scores import measure
from bothways.evaluate.significance import compare, contest, middle, p_value

WORDS = "the a minister law house said that in of and was not three people on Monday , . new old".split()


def reference_lines(lines: int = 120) -> list[str]:
    draw = random.Random(1)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 20))) for _ in range(lines)]


def corrupted(lines: list[str], seed: int, share: float) -> list[str]:
    """Some words replaced, some dropped, a tenth of the lines left alone."""
    draw = random.Random(seed)
    changed = []
    for line in lines:
        words = [draw.choice(WORDS) if draw.random() < share else word for word in line.split() if draw.random() > 0.03]
        changed.append(line if draw.random() < 0.1 else " ".join(words))
    return changed


REFERENCE = reference_lines()
SYSTEMS = {"base": corrupted(REFERENCE, 2, 0.38), "new": corrupted(REFERENCE, 3, 0.30)}


@pytest.mark.parametrize("test, column", [("bs", "p_bootstrap"), ("ar", "p_randomization")])
@pytest.mark.parametrize("seed", [12345, 1])
def test_p_values_agree_with_sacrebleu(test: str, column: str, seed: int) -> None:
    metrics = {"BLEU": BLEU(), "CHRF": CHRF()}
    _, theirs = PairedTest(list(SYSTEMS.items()), metrics, [REFERENCE], test, n_samples=1_000)()
    for name, key in (("bleu", "BLEU"), ("chrf", "chrF2")):
        (measured,) = measure(SYSTEMS, [REFERENCE], [name])
        (ours,) = compare(measured, seed=seed)
        base, new = theirs[key]
        assert ours.base_score == pytest.approx(base.score)
        assert ours.score == pytest.approx(new.score)
        expected = new.p_value
        assert 0.01 < expected < 0.5  # a p-value at either end says little
        # both are means of 1,000 draws
        assert abs(getattr(ours, column) - expected) < 3 * np.sqrt(2 * expected * (1 - expected) / 1_000)


def test_interval_agrees_with_sacrebleu() -> None:
    # Their interval is of one system's score. With the same seed the resamples are the very same.
    theirs = PairedTest(list(SYSTEMS.items()), {"BLEU": BLEU()}, [REFERENCE], "bs", n_samples=1_000)()[1]["BLEU"][1]
    (measured,) = measure(SYSTEMS, [REFERENCE])
    drawn = significance.bootstrap(measured.metric, np.stack([measured.rows["new"]]))[0]
    low, high = middle(drawn)
    assert drawn.mean() == pytest.approx(theirs.mean, abs=1e-3)
    assert (high - low) / 2 == pytest.approx(theirs.ci, abs=1e-3)


def test_randomization_agrees_with_enumeration() -> None:
    base, new = ["a b", "a", "x", "c d e", "a"], ["a b c", "a", "b", "c d", "b"]
    (measured,) = measure({"base": base, "new": new}, [["a b c", "a", "b", "c d e", "b"]], ["length_ratio"])
    real = abs(measured.score("new") - measured.score("base"))
    rows = [measured.rows["base"], measured.rows["new"]]
    as_large = 0
    for swaps in product((0, 1), repeat=5):
        one = sum(rows[swap][i] for i, swap in enumerate(swaps))
        other = sum(rows[1 - swap][i] for i, swap in enumerate(swaps))
        as_large += abs(measured.metric.score(one) - measured.metric.score(other)) >= real - 1e-9
    (ours,) = compare(measured, resamples=4_000)
    assert ours.p_randomization == pytest.approx(as_large / 2**5, abs=0.03)


@pytest.mark.parametrize("name", list(scores.METRICS))
def test_every_metric_can_be_tested(name: str) -> None:
    (measured,) = measure(SYSTEMS, [REFERENCE], [name])
    (row,) = compare(measured, resamples=200)
    assert (row.metric, row.base, row.system, row.signature) == (name, "base", "new", measured.signature)
    assert row.difference == pytest.approx(row.score - row.base_score)
    low, high = row.interval
    assert low < row.difference < high
    assert 0 < row.p_bootstrap <= 1 and 0 < row.p_randomization <= 1


def test_a_resample_is_the_same_for_all_systems_and_as_if_scored_anew() -> None:
    (measured,) = measure(SYSTEMS, [REFERENCE], ["ter"])
    statistics = np.stack(list(measured.rows.values()))
    drawn = significance.bootstrap(measured.metric, statistics, resamples=3, seed=5)
    rng = np.random.default_rng(5)
    for r in range(3):
        rows = rng.integers(len(REFERENCE), size=len(REFERENCE))
        for s, lines in enumerate(SYSTEMS.values()):
            (again,) = scores.score([lines[i] for i in rows], [[REFERENCE[i] for i in rows]], ["ter"])
            assert drawn[s, r] == pytest.approx(again.score)


def test_pieces_do_not_change_the_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    (measured,) = measure(SYSTEMS, [REFERENCE])
    whole = compare(measured, resamples=100)
    monkeypatch.setattr(significance, "CELLS", 7 * len(REFERENCE))
    pieces = compare(measured, resamples=100)
    assert (pieces[0].interval, pieces[0].p_bootstrap) == (whole[0].interval, whole[0].p_bootstrap)
    assert pieces[0].p_randomization == pytest.approx(whole[0].p_randomization, abs=0.2)


def test_seed_decides() -> None:
    (measured,) = measure(SYSTEMS, [REFERENCE])
    assert compare(measured, seed=1) == compare(measured, seed=1)
    assert compare(measured, seed=1)[0].interval != compare(measured, seed=2)[0].interval


def test_a_clear_difference_is_significant() -> None:
    (measured,) = measure({"base": corrupted(REFERENCE, 4, 0.6), "new": REFERENCE}, [REFERENCE])
    (row,) = compare(measured)
    assert row.p_bootstrap == row.p_randomization == 1 / 1_001
    assert row.interval[0] > 20
    (back,) = compare(measured, base="new")
    assert back.difference == -row.difference
    assert back.interval == pytest.approx((-row.interval[1], -row.interval[0]))


@pytest.mark.parametrize("name", list(scores.METRICS))
def test_equal_systems_do_not_differ(name: str) -> None:
    lines = SYSTEMS["base"]
    (measured,) = measure({"base": lines, "copy": list(lines)}, [REFERENCE], [name])
    (row,) = compare(measured, resamples=100)
    assert (row.difference, row.interval, row.p_bootstrap, row.p_randomization) == (0, (0, 0), 1, 1)


@pytest.mark.parametrize("name", ["exact_match", "rouge1", "ter", "bleu"])
def test_one_changed_line_is_no_evidence(name: str) -> None:
    # However the two lines are swapped, the difference is the real one: every draw is a tie.
    changed = [REFERENCE[0], *SYSTEMS["base"][1:]]
    (measured,) = measure({"base": SYSTEMS["base"], "new": changed}, [REFERENCE], [name])
    (row,) = compare(measured)
    assert row.difference != 0
    assert row.p_randomization == 1
    assert row.p_bootstrap > 0.05


@pytest.mark.parametrize(
    "null, difference, expected", [([0, 1, 2], 1, 3 / 4), ([0, 1, 2], -2, 2 / 4), ([0, 1, 2], 3, 1 / 4), ([0], 0, 1)]
)
def test_p_value(null: list[float], difference: float, expected: float) -> None:
    assert p_value(np.array(null, dtype=float), difference) == expected


@pytest.mark.parametrize("count, expected", [(1, (0, 0)), (39, (0, 38)), (40, (1, 38)), (1_000, (25, 974))])
def test_middle(count: int, expected: tuple[float, float]) -> None:
    assert middle(np.arange(count, dtype=float)[::-1]) == expected


def test_what_cannot_be_compared_says_why() -> None:
    (measured,) = measure(SYSTEMS, [REFERENCE])
    with pytest.raises(ConfigError, match="resamples must be at least 1, got 0"):
        compare(measured, resamples=0)
    with pytest.raises(DataError, match="the base 'other' is none of the systems: base, new"):
        compare(measured, base="other")
    with pytest.raises(DataError, match="new has 119 lines but reference 1 has 120"):
        measure({**SYSTEMS, "new": SYSTEMS["new"][1:]}, [REFERENCE])


@pytest.mark.parametrize(
    "name, base, new, gains",
    [
        ("exact_match", ["a", "b", "x", "d"], ["a", "x", "c", "d"], [100, 0, 0, -100]),
        ("ter", ["a", "b b", "c", "d"], ["a", "b", "x", "d"], [100, 0, 0, -100]),  # fewer edits are better
        ("length_ratio", ["a a", "b", "c c", "d"], ["a", "b b", "c c c", "d"], [1, 0, -1, -1]),  # nearer to 1 is better
    ],
)
def test_winners_and_losers(name: str, base: list[str], new: list[str], gains: list[float]) -> None:
    (measured,) = measure({"base": base, "new": new}, [["a", "b", "c", "d"]], [name])
    result = contest(measured, "new")
    assert [segment.gain for segment in result.segments] == gains
    assert (result.won, result.tied, result.lost) == (1, gains.count(0), 4 - 1 - gains.count(0))
    assert [segment.gain for segment in result.winners(10)] == gains[:1]
    assert [segment.gain for segment in result.losers(1)] == gains[-1:]
    assert result.winners(0) == result.losers(0) == []
    winner = result.winners(1)[0]
    assert (winner.base_score, winner.score) == (
        measured.segment_scores("base")[winner.index],
        measured.segment_scores("new")[winner.index],
    )


# `bothways compare`


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["bothways", "compare", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts = {"ref.txt": REFERENCE, "base.txt": SYSTEMS["base"], "new.txt": SYSTEMS["new"], "copy.txt": SYSTEMS["base"]}
    for name, lines in texts.items():
        Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return tmp_path


def test_command_prints_a_table(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "base.txt new.txt copy.txt --reference ref.txt --metric bleu --metric ter --show 2 --resamples 50"
    assert run(arguments.split(), monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    (measured,) = measure(SYSTEMS, [REFERENCE])
    (row,) = compare(measured, resamples=50)
    assert lines[0].startswith("BLEU  nrefs:1|case:mixed")
    assert lines[2].split() == ["base.txt", f"{row.base_score:.2f}", "base"]
    assert lines[3].split() == [
        *("new.txt", f"{row.score:.2f}", f"{row.difference:+.2f}", f"[{row.interval[0]:+.2f},"),
        *(f"{row.interval[1]:+.2f}]", f"{row.p_bootstrap:.4f}", f"{row.p_randomization:.4f}"),
    ]
    assert lines[4].split() == ["copy.txt", f"{row.base_score:.2f}", "+0.00", "[+0.00,", "+0.00]", "1.0000", "1.0000"]
    assert lines[6].startswith("TER  nrefs:1|case:mixed")
    result = contest(measured, "new")
    assert f"new.txt against base.txt by BLEU of single lines: {result.won} better, {result.tied} equal" in "\n".join(
        lines
    )
    assert "copy.txt against base.txt by BLEU of single lines: 0 better, 120 equal, 0 worse" in lines
    first = result.winners(1)[0]
    at = lines.index(f"better, line {first.index + 1}: {first.base_score:.2f} -> {first.score:.2f}")
    assert lines[at + 1 : at + 4] == [
        f"  reference  {REFERENCE[first.index]}",
        f"  base       {SYSTEMS['base'][first.index]}",
        f"  system     {SYSTEMS['new'][first.index]}",
    ]
    assert (
        sum(line.startswith("better, line") for line in lines)
        == sum(line.startswith("worse, line") for line in lines)
        == 2
    )


def test_command_prints_json(files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "base.txt new.txt --reference ref.txt --reference ref.txt --metric chrf --show 1 --json --seed 3"
    assert run([*arguments.split(), "--resamples", "20"], monkeypatch) == 0
    read = json.loads(capsys.readouterr().out)
    (measured,) = measure({"base.txt": SYSTEMS["base"], "new.txt": SYSTEMS["new"]}, [REFERENCE, REFERENCE], ["chrf"])
    (row,) = compare(measured, resamples=20, seed=3)
    assert (read["resamples"], read["seed"]) == (20, 3)
    assert read["comparisons"] == [{**vars(row), "interval": list(row.interval)}]
    (shown,) = read["segments"]
    assert shown["winners"] == [vars(segment) for segment in contest(measured, "new.txt").winners(1)]
    assert shown["losers"][0]["gain"] < 0
    assert shown["won"] + shown["tied"] + shown["lost"] == len(REFERENCE)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("base.txt --reference ref.txt", "compare needs two or more different files, the base first; got base.txt"),
        ("base.txt base.txt --reference ref.txt", "compare needs two or more different files"),
        ("base.txt new.txt --reference none.txt", "none.txt: no such file"),
        ("base.txt new.txt --reference ref.txt --resamples 0", "resamples must be at least 1, got 0"),
        ("base.txt new.txt --reference ref.txt --metric blue", "unknown metric 'blue'; accepted: bleu"),
    ],
)
def test_command_says_what_is_wrong(
    files: Path, arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments.split(), monkeypatch) == 2
    assert capsys.readouterr().err.startswith(f"bothways: {message}")
