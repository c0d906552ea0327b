"""Statistics of several systems on the same segments -> differences to one of them that chance may or may not explain.

    paired bootstrap          draw N of the N segments with replacement, the same for all systems, and score again:
                              how far do differences stray? (Koehn 2004)
    approximate randomization swap the two systems' outputs on every segment with probability 1/2: how often is the
                              difference as large as the real one? (Riezler and Maxwell 2005)

Both only add up other rows of the statistics, so a resample is one row of a matrix product; no text is read again.
The p-values are sacreBLEU's except for ties, which count here (docs/scores.md says why).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bothways.errors import ConfigError, DataError
from bothways.evaluate.scores import Measured, Metric, digits, gain, label

SEED = 12345  # sacreBLEU's; with it the bootstrap draws the very segments that sacreBLEU draws
RESAMPLES = 1_000
CELLS = 2**21  # of draws held at once, 16 MB in float64
ROUNDING = 1e-9  # of a score: sums in another order are not another result

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """A system beside the base under one metric."""

    metric: str
    signature: str
    base: str
    system: str
    base_score: float
    score: float
    difference: float
    """score - base_score, whichever way the metric counts."""
    interval: tuple[float, float]
    """95 % of the bootstrap's differences lie within."""
    p_bootstrap: float
    p_randomization: float


def compare(
    measured: Measured, base: str | None = None, resamples: int = RESAMPLES, seed: int = SEED
) -> list[Comparison]:
    """Each other system beside the base (by default the first) under one metric; both tests take `resamples`."""
    if resamples < 1:
        raise ConfigError(f"resamples must be at least 1, got {resamples}")
    base = base if base is not None else next(iter(measured.rows))
    if base not in measured.rows:
        raise DataError(f"the base {base!r} is none of the systems: {', '.join(measured.rows)}")
    others = [system for system in measured.rows if system != base]
    statistics = np.stack([measured.rows[system] for system in (base, *others)])
    bootstrapped = bootstrap(measured.metric, statistics, resamples, seed)
    shuffled = randomize(measured.metric, statistics, resamples, seed)
    base_score = measured.score(base)
    comparisons = []
    for system, ours, swapped in zip(others, bootstrapped[1:], shuffled, strict=True):
        score = measured.score(system)
        differences = ours - bootstrapped[0]
        strayed = np.abs(differences) - np.abs(differences).mean()
        comparisons.append(
            Comparison(
                metric=measured.name,
                signature=measured.signature,
                base=base,
                system=system,
                base_score=base_score,
                score=score,
                difference=score - base_score,
                interval=middle(differences),
                p_bootstrap=p_value(strayed, score - base_score),
                p_randomization=p_value(np.abs(swapped), score - base_score),
            )
        )
    return comparisons


def bootstrap(metric: Metric, statistics: NDArray[np.float64], resamples: int = RESAMPLES, seed: int = SEED) -> Scores:
    """The scores of S systems in each resample: [S, N, F] -> [S, R]; a resample is the same for all systems."""
    S, N, F = statistics.shape
    side_by_side = statistics.transpose(1, 0, 2).reshape(N, S * F)
    totals = [counts @ side_by_side for counts in _draws(N, resamples, np.random.default_rng(seed))]
    return _scores(metric, np.concatenate(totals).reshape(-1, S, F)).T


def randomize(metric: Metric, statistics: NDArray[np.float64], resamples: int = RESAMPLES, seed: int = SEED) -> Scores:
    """Differences of the others to the first after swaps: [1 + S, N, F] -> [S, R]."""
    base, others = statistics[0], statistics[1:]
    S, N, F = others.shape
    # With m = 1 where a segment is swapped: base + m (other - base) and other - m (other - base), summed over segments.
    change = (others - base).transpose(1, 0, 2).reshape(N, S * F)
    moved = [swaps @ change for swaps in _swaps(N, resamples, np.random.default_rng(seed))]
    moved_totals = np.concatenate(moved).reshape(-1, S, F)
    ours = _scores(metric, others.sum(axis=1) - moved_totals)
    return (ours - _scores(metric, base.sum(axis=0) + moved_totals)).T


def middle(values: Scores) -> tuple[float, float]:
    """The values between which 95 % lie, cut off as sacreBLEU does: a fortieth at either end."""
    ordered, cut = np.sort(values), len(values) // 40
    return float(ordered[cut]), float(ordered[-1 - cut])


def p_value(null: Scores, difference: float) -> float:
    """How often chance alone gives a difference as large as the real one; the real one counts as one of its draws."""
    as_large = int((null >= abs(difference) - ROUNDING).sum())
    return (as_large + 1) / (len(null) + 1)


def _draws(n: int, resamples: int, rng: np.random.Generator) -> Iterator[Scores]:
    """How often each of n segments is drawn: [R, n] in pieces of bounded size."""
    for rows in _pieces(n, resamples):
        drawn = rng.integers(n, size=(rows, n))
        drawn += np.arange(rows)[:, None] * n  # every resample counts in a range of its own
        yield np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float64)


def _swaps(n: int, resamples: int, rng: np.random.Generator) -> Iterator[Scores]:
    """1 where a segment is swapped, else 0: [R, n] in pieces of bounded size."""
    for rows in _pieces(n, resamples):
        yield rng.integers(2, size=(rows, n), dtype=np.bool_).astype(np.float64)


def _pieces(n: int, resamples: int) -> Iterator[int]:
    most = max(1, CELLS // n)
    while resamples > 0:
        yield min(most, resamples)
        resamples -= most


def _scores(metric: Metric, totals: NDArray[np.float64]) -> Scores:
    """[..., F] -> [...]"""
    flat = totals.reshape(-1, totals.shape[-1])
    return np.array([metric.score(total) for total in flat], dtype=np.float64).reshape(totals.shape[:-1])


# Segment by segment


@dataclass(frozen=True)
class Segment:
    """One segment's scores under the base and under another system."""

    index: int
    """From 0."""
    base_score: float
    score: float
    gain: float
    """Above 0 where the system is better than the base, whichever way the metric counts."""


@dataclass(frozen=True)
class Contest:
    """A system beside the base, segment by segment."""

    metric: str
    base: str
    system: str
    won: int
    tied: int
    lost: int
    segments: list[Segment]
    """Largest gain first; equal ones in the order of the text."""

    def winners(self, show: int) -> list[Segment]:
        """The segments the system improves most, at most `show`."""
        return [segment for segment in self.segments[:show] if segment.gain > 0]

    def losers(self, show: int) -> list[Segment]:
        """The segments the system harms most, at most `show`, the worst first."""
        worst = sorted(self.segments, key=lambda segment: segment.gain)
        return [segment for segment in worst[:show] if segment.gain < 0]


def contest(measured: Measured, system: str, base: str | None = None) -> Contest:
    """Where a system wins and loses against the base (by default the first)."""
    base = base if base is not None else next(iter(measured.rows))
    pairs = zip(measured.segment_scores(base), measured.segment_scores(system), strict=True)
    segments = [Segment(i, theirs, ours, gain(measured.name, ours, theirs)) for i, (theirs, ours) in enumerate(pairs)]
    won, lost = sum(s.gain > 0 for s in segments), sum(s.gain < 0 for s in segments)
    ranked = sorted(segments, key=lambda segment: -segment.gain)
    return Contest(measured.name, base, system, won, len(segments) - won - lost, lost, ranked)


# What `bothways compare` prints


def to_json(
    comparisons: Sequence[Comparison], contests: Sequence[Contest], show: int, resamples: int, seed: int
) -> dict[str, Any]:
    """{"resamples", "seed", "comparisons": [...], "segments": [{"winners": [...], "losers": [...], ...}]}."""
    shown = []
    for one in contests:
        row = {name: value for name, value in vars(one).items() if name != "segments"}
        row["winners"] = [asdict(segment) for segment in one.winners(show)]
        row["losers"] = [asdict(segment) for segment in one.losers(show)]
        shown.append(row)
    return {
        "resamples": resamples,
        "seed": seed,
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "segments": shown,
    }


def table(comparisons: Sequence[Comparison]) -> str:
    """For each metric its signature and the base's score, then a line for each other system."""
    names = [name for c in comparisons for name in (c.base, c.system)]
    width = max((len(name) for name in names), default=0)
    lines: list[str] = []
    for metric in dict.fromkeys(c.metric for c in comparisons):
        here = [c for c in comparisons if c.metric == metric]
        d = digits(metric)
        lines += ["", f"{label(metric)}  {here[0].signature}"]
        lines.append(
            f"  {'':{width}} {'score':>8} {'difference':>11}  {'95 % interval':^19} "
            f"{'p bootstrap':>12} {'p randomization':>16}"
        )
        lines.append(f"  {here[0].base:{width}} {here[0].base_score:8.{d}f} {'base':>11}")
        for c in here:
            interval = f"[{c.interval[0]:+.{d}f}, {c.interval[1]:+.{d}f}]"
            lines.append(
                f"  {c.system:{width}} {c.score:8.{d}f} {c.difference:+11.{d}f}  {interval:^19} "
                f"{c.p_bootstrap:12.4f} {c.p_randomization:16.4f}"
            )
    return "\n".join(lines[1:])


def side_by_side(
    one: Contest, systems: Mapping[str, Sequence[str]], references: Sequence[Sequence[str]], show: int
) -> str:
    """The winners and losers of a contest with their text; lines count from 1."""
    d = digits(one.metric)
    lines = [
        f"{one.system} against {one.base} by {label(one.metric)} of single lines: "
        f"{one.won} better, {one.tied} equal, {one.lost} worse"
    ]
    for title, segments in (("better", one.winners(show)), ("worse", one.losers(show))):
        for s in segments:
            i = s.index
            lines += ["", f"{title}, line {i + 1}: {s.base_score:.{d}f} -> {s.score:.{d}f}"]
            lines += [f"  reference  {reference[i]}" for reference in references]
            lines += [f"  base       {systems[one.base][i]}", f"  system     {systems[one.system][i]}"]
    return "\n".join(lines)
