"""N-best lists of several searches: their union, the new scores, the new order, and lists under another α."""

import pytest

from bothways.search.hypothesis import Hypothesis
from bothways.search.rerank import rerank, under, union, weights_of
from bothways.tokens import L2R, R2L, Direction


def hypothesis(tokens: list[int], direction: Direction = L2R, score: float = -1.0, cut_off: bool = False) -> Hypothesis:
    return Hypothesis(tokens, [], score, direction, cut_off)


def test_texts_that_read_the_same_are_one_candidate() -> None:
    first = [hypothesis([5, 6, 7], score=-0.5), hypothesis([5], score=-2.0)]
    second = [hypothesis([7, 6, 5], R2L, -0.1), hypothesis([5, 6, 7], R2L), hypothesis([], R2L)]
    found = union([first, second])
    assert found == [first[0], first[1], second[1], second[2]]  # read: 5 6 7, 5, 7 6 5, nothing
    assert union([second, first])[0] is second[0]  # whoever is named first has found it
    assert union([[], []]) == []


def test_cut_off_ones_are_candidates_only_where_nothing_is_complete() -> None:
    cut, other = hypothesis([5, 5], cut_off=True), hypothesis([6, 6], R2L, cut_off=True)
    assert union([[cut], [other]]) == [cut, other]
    assert union([[cut], [hypothesis([7])]]) == [hypothesis([7])]
    assert union([[cut], [hypothesis([5, 5])]]) == [hypothesis([5, 5])]


def test_candidates_are_ordered_by_the_weighted_sum_over_the_length() -> None:
    short, long = hypothesis([5]), hypothesis([6] * 12, R2L)  # 2 and 13 tokens with the end mark: 7 / 6 and 18 / 6
    log_probs = [[-2.0, -6.0], [-3.0, -3.0]]
    found = rerank([short, long], log_probs, [0.75, 0.25], 1.0)
    assert [(h.tokens, h.direction) for h in found] == [(long.tokens, R2L), ([5], L2R)]
    assert [h.score for h in found] == pytest.approx([-(0.75 * 6 + 0.25 * 3) / 3, -(0.75 * 2 + 0.25 * 3) / (7 / 6)])
    assert [h.tokens for h in rerank([short, long], log_probs, [0.75, 0.25], 0.0)] == [[5], long.tokens]
    assert [h.tokens for h in rerank([short, long], log_probs, [0.0, 1.0], 0.0)] == [[5], long.tokens]  # a tie
    assert [h.tokens for h in rerank([long, short], log_probs, [0.0, 1.0], 0.0)] == [long.tokens, [5]]


@pytest.mark.parametrize(
    "judges, second, expected",
    [
        ([1], 0.3, [1.0]),  # one model in one direction
        ([2], 0.3, [0.7, 0.3]),  # one model in both: l2r, r2l
        ([1, 1], 0.3, [0.7, 0.3]),  # two models
        ([1, 2], 0.3, [0.7, 0.15, 0.15]),  # the second has both directions
        ([1, 1, 2], 0.3, [1 / 3, 1 / 3, 1 / 6, 1 / 6]),
    ],
)
def test_weights(judges: list[int], second: float, expected: list[float]) -> None:
    assert weights_of(judges, second) == pytest.approx(expected)


def test_the_list_under_another_penalty() -> None:
    """By hand: log p -2 with 2 tokens, -3 with 13, -2.5 with 7; divided by (7/6)^α, 3^α, 2^α."""
    complete = [hypothesis([5], score=-2.0), hypothesis([7] * 6, R2L, -2.5), hypothesis([6] * 12, score=-3.0)]
    short, middle, long = complete
    assert [h.tokens for h in under(0.0, complete, 3)] == [short.tokens, middle.tokens, long.tokens]
    found = under(1.0, complete, 2)
    assert [h.tokens for h in found] == [long.tokens, middle.tokens]
    assert [h.score for h in found] == pytest.approx([-1.0, -1.25])


def test_ties_of_a_list_go_to_the_earlier_step_then_l2r() -> None:
    complete = [hypothesis([5, 6], R2L, -1.0), hypothesis([7], R2L, -1.0), hypothesis([5, 5], L2R, -1.0)]
    assert [h.tokens for h in under(0.0, complete, 3)] == [[7], [5, 5], [5, 6]]
