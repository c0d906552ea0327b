"""N-best lists and judges' log-probabilities in, one order out; which models the judges are is not known here.

candidates   the union of the lists: texts that read the same are one
score        sum over judges of weight · log p / ((5 + n) / 6)^α, n the tokens with the end mark
ties         go to the candidate that the lists name first

A judge is a model in one of its directions, told to say the candidate: a text is judged by how probable both of its
ends are, whoever found it.
"""

from collections.abc import Sequence
from dataclasses import replace

from bothways.search.hypothesis import Hypothesis, length_norm


def union(lists: Sequence[Sequence[Hypothesis]]) -> list[Hypothesis]:
    """All hypotheses once, by what they read, in the order of the lists: who named a text first counts as its finder.

    Those without an end mark are candidates only where no list has one with it.
    """
    found: dict[tuple[int, ...], Hypothesis] = {}
    named = [hypothesis for one in lists for hypothesis in one]
    some_complete = any(not hypothesis.cut_off for hypothesis in named)
    for hypothesis in named:
        if not (hypothesis.cut_off and some_complete):
            found.setdefault(tuple(hypothesis.reading_order), hypothesis)
    return list(found.values())


def rerank(
    candidates: Sequence[Hypothesis],
    log_probs: Sequence[Sequence[float]],
    weights: Sequence[float],
    length_penalty: float,
) -> list[Hypothesis]:
    """The candidates under their new scores, best first; log_probs[judge][candidate] are of the whole text."""
    rescored = []
    for candidate, judged in zip(candidates, zip(*log_probs, strict=True), strict=True):
        total = sum(weight * log_prob for weight, log_prob in zip(weights, judged, strict=True))
        norm = float(length_norm(len(candidate.tokens) + 1, length_penalty))
        rescored.append(replace(candidate, score=total / norm))
    return sorted(rescored, key=lambda candidate: -candidate.score)


def weights_of(judges: Sequence[int], second: float) -> list[float]:
    """The weight of every judge, for models that bring so many judges each.

    The two directions of one model, or two models, weigh 1 - `second` and `second`; more models weigh alike. Directions
    of a model share what it has.
    """
    if list(judges) == [2]:
        return [1 - second, second]
    shares = [1 - second, second] if len(judges) == 2 else [1 / len(judges)] * len(judges)
    return [share / count for share, count in zip(shares, judges, strict=True) for _ in range(count)]


def under(penalty: float, complete: Sequence[Hypothesis], beam: int) -> list[Hypothesis]:
    """The n-best list of the same search under another length penalty, from all that it completed, α being 0.

    A hypothesis lives or dies by its log-probability alone, so α decides only which complete ones are kept.
    """
    scored = [
        replace(hypothesis, score=hypothesis.score / float(length_norm(len(hypothesis.tokens) + 1, penalty)))
        for hypothesis in complete
    ]
    return sorted(scored, key=lambda hypothesis: (-hypothesis.score, len(hypothesis.tokens), hypothesis.direction))[
        :beam
    ]
