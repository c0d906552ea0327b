"""Systems and what they decoded of named test sets -> everything a report says, as numbers; no form yet.

tables.py writes it for a terminal and for LaTeX, page.py as an HTML page; `to_json` is all of it. Text only: whether
it was decoded from runs or read from files is the caller's affair (see bothways/reporting.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from bothways.errors import ConfigError, DataError
from bothways.evaluate import significance
from bothways.evaluate.analysis import (
    DIRECTIONS,
    Bucket,
    Part,
    Row,
    Winners,
    accuracy_by_part,
    count_winners,
    over_sets,
    score_by_length,
    word_counts,
)
from bothways.evaluate.scores import AS_IT_STANDS, Measured, Reading, check_lines, digits, gain, label, measure, notes

FORMAT = "bothways report 1"
ALWAYS = ("first4", "last4", "length_ratio")  # measured whether they were asked for or not
MEAN = "mean"  # the name of all sets together, beside the sets' own
LEVELS = ((0.01, "**"), (0.05, "*"))  # p of approximate randomization below this -> the mark


# What comes in


@dataclass(frozen=True)
class NamedSet:
    """A test set as text."""

    name: str
    references: Sequence[Sequence[str]]
    sources: Sequence[str] | None = None
    """None if nobody said what was translated: then there are no scores by source length."""
    files: Sequence[str] = ()
    """Names of the references, for messages."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Checksums, for the recipe card."""


@dataclass(frozen=True)
class Side:
    """What one direction found for a sentence."""

    text: str
    score: float
    cut_off: bool
    """The search had ended before this direction had."""


@dataclass(frozen=True)
class Decoded:
    """One system's output for one test set."""

    texts: Sequence[str]
    directions: Sequence[str] = ()
    """Which direction found each text; empty for files."""
    best: Sequence[Mapping[str, Side]] = ()
    """For each line what each direction found; empty where only one decoded, and for files."""


@dataclass(frozen=True)
class System:
    """A run or a file of hypotheses."""

    name: str
    outputs: Mapping[str, Decoded]
    """Name of a test set -> output."""
    parameters: int | None = None
    sentences_per_second: float | None = None
    updates_per_second: float | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Checkpoint, data and settings, for the recipe card."""


# What comes out


@dataclass(frozen=True)
class Tested:
    """A system beside the base on one set, or on the mean of all."""

    metric: str
    on: str
    system: str
    difference: float
    interval: tuple[float, float]
    p_bootstrap: float
    p_randomization: float

    @property
    def mark(self) -> str:
        """** below 0.01, * below 0.05, by approximate randomization."""
        return next((mark for level, mark in LEVELS if self.p_randomization < level), "")


@dataclass(frozen=True)
class Example:
    """A line on which the two directions of a system are shown."""

    set: str
    line: int
    """From 1."""
    source: str | None
    references: list[str]
    winner: str
    best: Mapping[str, Side]


@dataclass(frozen=True)
class Directions:
    """How the two directions of a system shared the work."""

    winners: Winners
    by_set: dict[str, Winners]
    differing: int
    """Lines on which they found different texts."""
    examples: list[Example]


@dataclass(frozen=True)
class Change:
    """A line that a system changed against the base, for the better or the worse."""

    set: str
    line: int
    """From 1."""
    source: str | None
    references: list[str]
    base_text: str
    text: str
    base_score: float
    score: float
    gain: float


@dataclass(frozen=True)
class Report:
    """All that a report says."""

    systems: list[System]
    sets: list[NamedSet]
    base: str
    metrics: list[str]
    """The main one first."""
    signatures: dict[str, dict[str, str]]
    """Metric -> test set -> signature."""
    scores: dict[str, list[Row]]
    """Metric -> a row for each system."""
    tests: list[Tested]
    parts: dict[str, list[Part]]
    """System -> accuracy over ten equal parts, all sets together."""
    lengths: list[Bucket]
    """The main metric by source length, all sets together; empty without sources."""
    directions: dict[str, Directions]
    """Of those systems that decoded both."""
    compared: str | None
    """The system whose changes against the base are shown."""
    changes: list[Change]
    """Those with the largest gains first, then those with the largest losses."""
    notes: list[str]
    settings: dict[str, Any]

    @property
    def main(self) -> str:
        """The metric of the headline."""
        return self.metrics[0]

    @property
    def others(self) -> list[str]:
        """The systems beside the base."""
        return [system.name for system in self.systems if system.name != self.base]

    def row(self, metric: str, system: str) -> Row:
        """A system's scores under a metric."""
        return next(row for row in self.scores[metric] if row.system == system)

    def test(self, metric: str, system: str, on: str = MEAN) -> Tested | None:
        """How sure a difference to the base is; None of the base itself."""
        return next((t for t in self.tests if (t.metric, t.system, t.on) == (metric, system, on)), None)

    def ranked(self) -> list[Row]:
        """By the main metric's mean, the best first; of equals the one named first."""
        return sorted(self.scores[self.main], key=lambda row: -gain(self.main, row.mean, 0.0))


def make(
    systems: Sequence[System],
    sets: Sequence[NamedSet],
    base: str | None = None,
    metrics: Sequence[str] = ("bleu", "chrf"),
    reading: Reading = AS_IT_STANDS,
    source_tokenize: str = "13a",
    resamples: int = significance.RESAMPLES,
    seed: int = significance.SEED,
    examples: int = 6,
    settings: Mapping[str, Any] | None = None,
) -> Report:
    """Score, test and analyse; the base is the first system unless another is named."""
    base = _checked(systems, sets, base)
    metrics = list(dict.fromkeys([*metrics, *ALWAYS]))
    measured = {one.name: _measure(systems, one, metrics, reading) for one in sets}
    scores = {
        metric: over_sets({s.name: {n: m[metric].score(s.name) for n, m in measured.items()} for s in systems}, base)
        for metric in metrics
    }
    compared = _most_interesting(scores[metrics[0]], metrics[0], base)
    main = [one[metrics[0]] for one in measured.values()]
    return Report(
        systems=list(systems),
        sets=list(sets),
        base=base,
        metrics=metrics,
        signatures={metric: {name: one[metric].signature for name, one in measured.items()} for metric in metrics},
        scores=scores,
        tests=_tests(measured, metrics, base, resamples, seed) if len(systems) > 1 else [],
        parts={system.name: _parts(system, sets, reading) for system in systems},
        lengths=_lengths(main, sets, Reading(tokenize=source_tokenize)),
        directions={s.name: _directions(s, sets, examples) for s in systems if _has_both(s, sets)},
        compared=compared,
        changes=_changes(systems, sets, main, base, compared, examples) if compared else [],
        notes=[f"{one.name}: {note}" for one in sets for note in notes(one.references, _names(one))],
        settings={
            "lowercase": reading.lowercase,
            "tokenize": reading.tokenize,
            "source_tokenize": source_tokenize,
            "resamples": resamples,
            "seed": seed,
            **(settings or {}),
        },
    )


def _checked(systems: Sequence[System], sets: Sequence[NamedSet], base: str | None) -> str:
    """The base's name; raises unless there is something to report and all names tell things apart."""
    for what, names in (("systems", [s.name for s in systems]), ("test sets", [one.name for one in sets])):
        if not names:
            raise ConfigError(f"a report needs {what}, and there are none")
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(f"two {what} are called {twice[0]!r}; give each a name of its own")
        if MEAN in names:
            raise ConfigError(f"{what} cannot be called {MEAN!r}, which a report calls all test sets together")
    base = systems[0].name if base is None else base
    if base not in [system.name for system in systems]:
        raise ConfigError(f"--base: must be one of {', '.join(s.name for s in systems)}, got {base!r}")
    for system in systems:
        for one in sets:
            if one.name not in system.outputs:
                raise DataError(f"{system.name} has no output for the test set {one.name}; all systems need the same")
            if one.sources is not None:
                check_lines(one.sources, one.references, (f"the source of {one.name}", *_names(one)))
    return base


def _names(one: NamedSet) -> list[str]:
    return list(one.files or (f"reference {r}" for r in range(1, len(one.references) + 1)))


def _measure(systems: Sequence[System], one: NamedSet, metrics: Sequence[str], reading: Reading) -> dict[str, Measured]:
    texts = {system.name: system.outputs[one.name].texts for system in systems}
    return {m.name: m for m in measure(texts, one.references, metrics, reading, _names(one))}


# Significance


def _tests(
    measured: Mapping[str, Mapping[str, Measured]], metrics: Sequence[str], base: str, resamples: int, seed: int
) -> list[Tested]:
    found = []
    for metric in metrics:
        sets = {name: one[metric] for name, one in measured.items()}
        for name, one in sets.items():
            for c in significance.compare(one, base, resamples, seed):
                found.append(Tested(metric, name, c.system, c.difference, c.interval, c.p_bootstrap, c.p_randomization))
        if len(sets) == 1:  # the mean of one set is that set
            found += [Tested(**{**vars(tested), "on": MEAN}) for tested in found if tested.metric == metric]
        else:
            found += _test_mean(metric, list(sets.values()), base, resamples, seed)
    return found


def _test_mean(metric: str, sets: Sequence[Measured], base: str, resamples: int, seed: int) -> list[Tested]:
    """Both tests for the mean of the sets: every set is drawn from by itself, and a draw is the mean of the sets'."""
    others = [system for system in sets[0].rows if system != base]
    drawn: Any = 0.0
    swapped: Any = 0.0
    for i, one in enumerate(sets):
        statistics = np.stack([one.rows[system] for system in (base, *others)])
        scores = significance.bootstrap(one.metric, statistics, resamples, seed + i)  # no set repeats another's draws
        drawn = drawn + (scores[1:] - scores[0]) / len(sets)
        swapped = swapped + significance.randomize(one.metric, statistics, resamples, seed + i) / len(sets)
    found = []
    for system, ours, shuffled in zip(others, drawn, swapped, strict=True):
        difference = sum(one.score(system) - one.score(base) for one in sets) / len(sets)
        strayed = np.abs(ours) - np.abs(ours).mean()
        found.append(
            Tested(
                metric,
                MEAN,
                system,
                difference,
                significance.middle(ours),
                significance.p_value(strayed, difference),
                significance.p_value(np.abs(shuffled), difference),
            )
        )
    return found


# Analyses over all sets together


def _parts(system: System, sets: Sequence[NamedSet], reading: Reading) -> list[Part]:
    each = [accuracy_by_part(system.outputs[one.name].texts, one.references, reading) for one in sets]
    return [Part(sum(p.matched for p in same), sum(p.words for p in same)) for same in zip(*each, strict=True)]


def _lengths(main: Sequence[Measured], sets: Sequence[NamedSet], reading: Reading) -> list[Bucket]:
    lengths: list[int] = []
    for one in sets:
        if one.sources is None:
            return []
        lengths += word_counts(one.sources, reading)
    rows = {system: np.concatenate([one.rows[system] for one in main]) for system in main[0].rows}
    return score_by_length(Measured(main[0].name, main[0].metric, main[0].signature, rows), lengths)


def _has_both(system: System, sets: Sequence[NamedSet]) -> bool:
    return all(system.outputs[one.name].best for one in sets)


def _directions(system: System, sets: Sequence[NamedSet], examples: int) -> Directions:
    by_set = {one.name: [d for d in system.outputs[one.name].directions if d] for one in sets}
    lines = [(one, i) for one in sets for i in range(len(system.outputs[one.name].texts))]
    differing = [
        (one, i) for one, i in lines if len({side.text for side in system.outputs[one.name].best[i].values()}) > 1
    ]
    won = [
        _spread([(one, i) for one, i in differing if system.outputs[one.name].directions[i] == direction], examples)
        for direction in DIRECTIONS
    ]
    alternating = [place for pair in zip_longest(*won) for place in pair if place is not None]
    chosen = sorted((alternating or _spread(lines, 2))[:examples], key=lines.index)
    return Directions(
        count_winners([direction for directions in by_set.values() for direction in directions]),
        {name: count_winners(directions) for name, directions in by_set.items()},
        len(differing),
        [_example(system.outputs[one.name], one, i) for one, i in chosen],
    )


def _spread(places: list[tuple[NamedSet, int]], count: int) -> list[tuple[NamedSet, int]]:
    """At most `count` of them, from all over the text: the choice flatters nobody."""
    step = max(1, len(places) // max(1, count))
    return places[::step][:count]


def _example(output: Decoded, one: NamedSet, i: int) -> Example:
    source = one.sources[i] if one.sources is not None else None
    return Example(one.name, i + 1, source, [r[i] for r in one.references], output.directions[i], output.best[i])


def _most_interesting(rows: Sequence[Row], metric: str, base: str) -> str | None:
    """The best of the systems that are not the base."""
    others = [row for row in rows if row.system != base]
    return max(others, key=lambda row: gain(metric, row.mean, 0.0)).system if others else None


def _changes(
    systems: Sequence[System],
    sets: Sequence[NamedSet],
    main: Sequence[Measured],
    base: str,
    compared: str,
    examples: int,
) -> list[Change]:
    texts = {system.name: system.outputs for system in systems}
    winners: list[Change] = []
    losers: list[Change] = []
    half = max(1, examples // 2) if examples else 0
    for one, measured in zip(sets, main, strict=True):
        contest = significance.contest(measured, compared, base)
        for segments, into in ((contest.winners(half), winners), (contest.losers(half), losers)):
            for s in segments:
                into.append(
                    Change(
                        one.name,
                        s.index + 1,
                        one.sources[s.index] if one.sources is not None else None,
                        [reference[s.index] for reference in one.references],
                        texts[base][one.name].texts[s.index],
                        texts[compared][one.name].texts[s.index],
                        s.base_score,
                        s.score,
                        s.gain,
                    )
                )
    winners.sort(key=lambda change: -change.gain)
    losers.sort(key=lambda change: change.gain)
    return winners[:half] + losers[:half]


# In words and as JSON


@dataclass(frozen=True)
class Finding:
    """The report in two sentences."""

    headline: str
    detail: str


def finding(report: Report) -> Finding:
    """Which system leads by how much, and whether that may be chance."""
    name, d = label(report.main).replace("_", " "), digits(report.main)
    first, *rest = report.ranked()
    where = report.sets[0].name if len(report.sets) == 1 else f"the mean of {len(report.sets)} test sets"
    if not rest:
        return Finding(f"{first.system} scores {first.mean:.{d}f} {name}", f"On {where}; there is no other system.")
    other = rest[0] if first.system == report.base else report.row(report.main, report.base)
    apart = abs(first.mean - other.mean)
    tested = report.test(report.main, other.system if first.system == report.base else first.system)
    assert tested is not None
    sure = tested.p_randomization < LEVELS[-1][0]
    beside = "the base" if other.system == report.base else "the next best"
    scores = f"{first.mean:.{d}f} against {other.mean:.{d}f} on {where}; {p_text(tested.p_randomization)}."
    if not sure:
        return Finding(
            f"No clear winner: {first.system} is {apart:.{d}f} {name} from {other.system}",
            f"Chance may explain a difference to {beside} of this size. {scores}",
        )
    return Finding(
        f"{first.system} leads {other.system} by {apart:.{d}f} {name}",
        f"That is more than chance explains. {scores}",
    )


def p_text(p: float) -> str:
    """p = 0.012, p < 0.001."""
    return f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"


def to_json(report: Report) -> dict[str, Any]:
    """Everything but the systems' whole outputs."""
    told = finding(report)
    systems = []
    for system in report.systems:
        systems.append({name: value for name, value in vars(system).items() if name != "outputs"})
    return {
        "format": FORMAT,
        "headline": told.headline,
        "detail": told.detail,
        "base": report.base,
        "metrics": [{"name": metric, "signatures": report.signatures[metric]} for metric in report.metrics],
        "sets": [
            {"name": one.name, "sentences": len(one.references[0]), "references": len(one.references), **one.recipe}
            for one in report.sets
        ],
        "systems": systems,
        "scores": {metric: [asdict(row) for row in rows] for metric, rows in report.scores.items()},
        "tests": [{**asdict(tested), "mark": tested.mark} for tested in report.tests],
        "parts": {
            name: [{**asdict(part), "accuracy": part.accuracy} for part in parts]
            for name, parts in report.parts.items()
        },
        "lengths": [{"label": bucket.label, **asdict(bucket)} for bucket in report.lengths],
        "directions": {
            name: {**asdict(one), "l2r_share": one.winners.l2r_share, "r2l_share": one.winners.r2l_share}
            for name, one in report.directions.items()
        },
        "changes": {"system": report.compared, "lines": [asdict(change) for change in report.changes]},
        "notes": report.notes,
        "settings": report.settings,
    }
