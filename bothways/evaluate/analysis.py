"""Hypotheses, references and statistics of segments -> the numbers behind a report's figures.

Accuracy at the first and last words is a metric like any other (first4, last4 in scores.py); here is what takes more
than one number: accuracy over the parts of a sentence, scores by source length, which direction won, several test sets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bothways.errors import DataError
from bothways.evaluate.positions import matches_in_parts
from bothways.evaluate.scores import AS_IT_STANDS, Measured, Reading, check_lines

DIRECTIONS = ("l2r", "r2l")


# Parts of the sentence


@dataclass(frozen=True)
class Part:
    """One of the equal parts into which hypotheses and references are cut."""

    matched: int
    """Words of hypotheses that the same part of the reference has too, clipped, over all sentences."""
    words: int
    """Words of hypotheses in this part, over all sentences."""

    @property
    def accuracy(self) -> float:
        """Per cent; 0 where no hypothesis has a word in this part."""
        return 100 * self.matched / self.words if self.words else 0.0


def accuracy_by_part(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    reading: Reading = AS_IT_STANDS,
    parts: int = 10,
) -> list[Part]:
    """The accuracy of each equal part, from the first words of sentences to the last (see matches_in_parts)."""
    check_lines(hypotheses, references)
    matched, words = [0] * parts, [0] * parts
    for ours, *theirs in zip(hypotheses, *references, strict=True):
        counts = matches_in_parts(reading.words(ours), [reading.words(reference) for reference in theirs], parts)
        for part, (same, there) in enumerate(counts):
            matched[part] += same
            words[part] += there
    return [Part(*counts) for counts in zip(matched, words, strict=True)]


# Length of the source


@dataclass(frozen=True)
class Bucket:
    """The segments whose source has more than `above` and at most `up_to` words."""

    above: int
    """-1 in the first bucket, so that an empty source belongs to it."""
    up_to: int | None
    """None in the last bucket: it has no end."""
    segments: int
    scores: dict[str, float | None]
    """Name of a system -> its score on these segments; None if there are none."""

    @property
    def label(self) -> str:
        """How a figure names it: 0-10, 11-20, over 20."""
        if self.up_to is None:
            return "all" if self.above < 0 else f"over {self.above}"
        return f"{self.above + 1}-{self.up_to}"


def score_by_length(measured: Measured, lengths: Sequence[int], bounds: Sequence[int] | None = None) -> list[Bucket]:
    """Any metric by length of the source: the statistics of a bucket's segments are summed, then scored.

    `bounds` are the buckets' upper ends, rising; one more bucket takes what is longer. By default sensible_bounds.
    """
    for system, rows in measured.rows.items():
        if len(rows) != len(lengths):
            raise DataError(f"{system} has {len(rows)} segments but there are {len(lengths)} source lengths")
    ends = list(sensible_bounds(lengths) if bounds is None else bounds)
    if any(end < 0 for end in ends) or any(b <= a for a, b in pairwise(ends)):
        raise DataError(f"bounds of source lengths must rise from 0 on, got {', '.join(map(str, ends))}")
    buckets = []
    for above, up_to in zip([-1, *ends], [*ends, None], strict=True):
        chosen = [i for i, length in enumerate(lengths) if above < length and (up_to is None or length <= up_to)]
        scores = {
            system: measured.metric.score(rows[chosen].sum(axis=0)) if chosen else None
            for system, rows in measured.rows.items()
        }
        buckets.append(Bucket(above, up_to, len(chosen), scores))
    return buckets


def word_counts(lines: Sequence[str], reading: Reading = AS_IT_STANDS) -> list[int]:
    """How many of the scorer's words each line has. A source in another script may need another tokenizer."""
    return [len(reading.words(line)) for line in lines]


def sensible_bounds(lengths: Sequence[int], buckets: int = 6) -> list[int]:
    """Upper ends of buckets of one round width (1, 2, 5, 10, 20, ...), the least with 95 % of lengths before the last.

    News (95 % have at most 45 words) gives 10, 20, 30, 40, 50; captions (at most 19) give 5, 10, 15, 20.
    """
    if not lengths:
        return []
    most = max(sorted(lengths)[math.ceil(0.95 * len(lengths)) - 1], 1)
    widths = (digit * 10**power for power in range(20) for digit in (1, 2, 5))
    width = next(width for width in widths if width * (buckets - 1) >= most)
    return [width * (i + 1) for i in range(math.ceil(most / width))]


# Directions


@dataclass(frozen=True)
class Winners:
    """How often a hypothesis of either direction was the best."""

    l2r: int
    r2l: int

    @property
    def l2r_share(self) -> float:
        """Per cent of the sentences."""
        return 100 * self.l2r / (self.l2r + self.r2l)

    @property
    def r2l_share(self) -> float:
        """Per cent of the sentences."""
        return 100 * self.r2l / (self.l2r + self.r2l)


def count_winners(directions: Sequence[str]) -> Winners:
    """The direction of each sentence's best hypothesis -> how often each won."""
    wrong = [direction for direction in directions if direction not in DIRECTIONS]
    if wrong:
        raise DataError(f"a direction must be {' or '.join(DIRECTIONS)}, got {wrong[0]!r}")
    if not directions:
        raise DataError("no sentences: no direction has won")
    return Winners(*(directions.count(direction) for direction in DIRECTIONS))


# Several test sets


@dataclass(frozen=True)
class Row:
    """One system over several named test sets."""

    system: str
    scores: dict[str, float]
    """Name of a test set -> score."""
    mean: float
    """Of the sets' scores, each set weighing the same."""
    differences: dict[str, float]
    """To the base, set by set; of the base itself 0."""
    difference: float
    """Mean less the base's mean."""


def over_sets(scores: Mapping[str, Mapping[str, float]], base: str) -> list[Row]:
    """Scores of systems on named test sets, system -> set -> score, beside a base; all need the same sets."""
    if base not in scores:
        raise DataError(f"the base {base!r} is none of the systems: {', '.join(scores)}")
    sets = list(scores[base])
    if not sets:
        raise DataError(f"{base} has no test set")
    for system, row in scores.items():
        unlike = [name for name in (*sets, *row) if name not in row or name not in sets]
        if unlike:
            lacks = system if unlike[0] in sets else base
            raise DataError(f"{lacks} has no score on {unlike[0]}; systems must be scored on the same sets")
    means = {system: math.fsum(row.values()) / len(sets) for system, row in scores.items()}
    return [
        Row(
            system=system,
            scores={name: row[name] for name in sets},
            mean=means[system],
            differences={name: row[name] - scores[base][name] for name in sets},
            difference=means[system] - means[base],
        )
        for system, row in scores.items()
    ]
