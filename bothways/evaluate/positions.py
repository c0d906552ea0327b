"""Words of a hypothesis and of its references -> counts that say where in the sentence a system is right.

Counts of segments add up to the counts of a corpus; the tokenizer is the scorer's (see scores.py).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

Words = Sequence[str]
End = Literal["first", "last"]


def matches_at(end: End, hypothesis: Words, references: Sequence[Words], span: int = 4) -> tuple[int, int]:
    """Positions among the first (last) `span` with the same word on both sides, and the reference words there.

    Of several references the one with the highest share counts; of equal shares the one with more matches,
    then the one with fewer words there, so that the order of the references never matters.

        first 4   hypothesis  the cat sat on the mat
                  reference   the cat lay on it           3 of 4
        last 4    hypothesis        sat on the mat
                  reference         cat lay on it         0 of 4: positions count from the end
    """
    return max((_matches(end, hypothesis, reference, span) for reference in references), key=_preference)


def _matches(end: End, hypothesis: Words, reference: Words, span: int) -> tuple[int, int]:
    if end == "last":
        hypothesis, reference = hypothesis[::-1], reference[::-1]
    same = sum(ours == theirs for ours, theirs in zip(hypothesis[:span], reference[:span], strict=False))
    return same, len(reference[:span])


def _preference(counts: tuple[int, int]) -> tuple[float, int, int]:
    """A reference without words comes last: it would excuse any hypothesis."""
    same, there = counts
    return (same / there if there else -1.0, same, -there)


def matches_in_parts(hypothesis: Words, references: Sequence[Words], parts: int = 10) -> list[tuple[int, int]]:
    """For each equal part of the hypothesis: its words that stand in the same part of the reference too, its words.

    Matches are clipped: a word counts as often as it stands in both parts. Of several references the one with most
    matches in the whole sentence counts (the hypothesis' words are the same for all of them); of equally many the
    one that matches earlier, so that the order of the references never matters.

        hypothesis  a b c d e       parts 0 2 4 6 8
        reference   a c b d         parts 0 2 5 7       a in part 0: 1 of 1; the other words: 0 of 1 each
    """
    ours = split(hypothesis, parts)
    matched = max(
        ([_common(x, y) for x, y in zip(ours, split(reference, parts), strict=True)] for reference in references),
        key=lambda counts: (sum(counts), counts),
    )
    return list(zip(matched, map(len, ours), strict=True))


def split(words: Words, parts: int = 10) -> list[list[str]]:
    """The words of each part: word p of n, p from 0, lies in part floor(parts · p / n)."""
    shares: list[list[str]] = [[] for _ in range(parts)]
    for p, word in enumerate(words):
        shares[parts * p // len(words)].append(word)
    return shares


def _common(ours: Words, theirs: Words) -> int:
    return (Counter(ours) & Counter(theirs)).total()


def closest_length(length: int, references: Sequence[int]) -> int:
    """The reference length closest to a hypothesis' length; of two equally close ones the shorter, as in BLEU."""
    return min(references, key=lambda reference: (abs(reference - length), reference))
