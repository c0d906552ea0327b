"""The rules of search one by one, on tables small enough to be worked out by hand."""

from math import exp, inf, log
from typing import Any

import pytest
import torch
from toy import Futures, Script

from bothways.errors import SearchError
from bothways.search.hypothesis import (
    End,
    Found,
    Hypothesis,
    TraceStep,
    extend,
    first_ones,
    length_norm,
    order_key,
    partners_of,
)
from bothways.stepwise import GROUP, largest
from bothways.tokens import END, L2R, R2L, Direction

A, B, C = 5, 6, 7


# -- the functions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens, direction, read", [([5, 6, 7], R2L, [7, 6, 5]), ([], R2L, []), ([5, 6], L2R, [5, 6])])
def test_reading_order_undoes_r2l(tokens: list[int], direction: Direction, read: list[int]) -> None:
    hypothesis = Hypothesis(tokens, [], 0.0, direction, False)
    assert hypothesis.reading_order == read
    assert hypothesis.tokens == tokens


@pytest.mark.parametrize(
    "length, penalty, expected",
    [(1, 0.6, 1.0), (7, 1.0, 2.0), (7, 0.0, 1.0), (19, 0.5, 2.0), (1, 1.0, 1.0), (13, 2.0, 9.0)],
)
def test_length_norm(length: int, penalty: float, expected: float) -> None:
    assert length_norm(length, penalty) == pytest.approx(expected)
    assert length_norm(torch.tensor([float(length)]), penalty) == pytest.approx(expected)


def extended(scores: torch.Tensor, log_probs: torch.Tensor, candidates: int) -> tuple[torch.Tensor, ...]:
    """From all words, of which each slot's own best are taken."""
    return extend(scores, *largest(log_probs, min(candidates, log_probs.size(-1))), candidates)


def test_extend_takes_the_best_of_all_slots() -> None:
    scores = torch.tensor([[[-1.0, -2.0]]], dtype=torch.float64)
    log_probs = torch.tensor([[[[-4.0, -0.5, -3.0], [-0.25, -9.0, -0.75]]]])
    best, origin, token, log_prob = (x[0, 0].tolist() for x in extended(scores, log_probs, 4))
    assert best == [-1.5, -2.25, -2.75, -4.0]
    assert (origin, token) == ([0, 1, 1, 0], [1, 0, 2, 2])
    assert log_prob == [-0.5, -0.25, -0.75, -3.0]


@pytest.mark.parametrize("size", [1, 8, GROUP - 1, GROUP, 8 * GROUP, 8 * GROUP + 1, 20 * GROUP + 77])
@pytest.mark.parametrize("distinct", [10**6, 50, 2, 1], ids=lambda n: f"{n} values")
@pytest.mark.parametrize("count", [1, 4, 8])
def test_largest_finds_what_topk_finds(size: int, distinct: int, count: int) -> None:
    """Equal values, impossible tokens and a vocabulary that is no multiple of the group included."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(distinct, (3, 2, 2, size), generator=generator).float()
    x[0] = -inf
    x[1, ..., size // 2 :] = -inf
    count = min(count, size)
    values, indices = largest(x, count)
    assert torch.equal(values, x.topk(count).values)
    assert torch.equal(x.gather(-1, indices), values)
    assert all(len(set(row)) == count for row in indices.flatten(0, -2).tolist())


def test_extend_lets_one_slot_place_all() -> None:
    scores = torch.tensor([[[0.0, -50.0]]], dtype=torch.float64)
    log_probs = torch.log_softmax(torch.arange(8.0), 0).expand(1, 1, 2, 8)
    _, origin, token, _ = extended(scores, log_probs, 4)
    assert (origin.flatten().tolist(), token.flatten().tolist()) == ([0] * 4, [7, 6, 5, 4])


def test_extend_adds_in_float64() -> None:
    """In float32 the second would be lost in the first: -1e5 + -1e-4 = -1e5."""
    scores = torch.tensor([[[-1e5]]], dtype=torch.float64)
    best, *_ = extended(scores, torch.tensor([[[[-2e-4, -1e-4]]]]), 2)
    assert best.dtype is torch.float64
    assert (best.flatten() + 1e5).tolist() == pytest.approx([-1e-4, -2e-4], rel=1e-3)


def test_extend_never_prefers_a_dead_slot() -> None:
    scores = torch.tensor([[[-1.0, -inf]]], dtype=torch.float64)
    best, origin, *_ = extended(scores, torch.zeros(1, 1, 2, 3), 4)
    assert best.flatten().tolist() == [-1.0, -1.0, -1.0, -inf]
    assert origin.flatten().tolist()[:3] == [0, 0, 0]


def test_first_ones_are_stable() -> None:
    assert first_ones(torch.tensor([1.0, 3.0, 3.0, -inf, 3.0, 1.0]), 5).tolist() == [1, 2, 4, 0, 5]


SCORES = torch.tensor([[[-1.0, -2.0, -3.0], [-0.5, -1.5, -inf]], [[0.0, -inf, -inf], [-inf, -inf, -inf]]]).double()


@pytest.mark.parametrize(
    "pairing, l2r, r2l",
    [("rank", [[0], [1], [0]], [[0], [1], [2]]), ("best", [[0], [0], [0]], [[0], [0], [0]])],
)
def test_partners(pairing: str, l2r: list[list[int]], r2l: list[list[int]]) -> None:
    """By rank slot k reads slot k, and slot 0 instead of a dead one; a half without a live slot gives no future."""
    partners, weights = partners_of(SCORES, pairing)
    assert partners[0].tolist() == [l2r, r2l]
    assert weights[0].tolist() == [[[1.0]] * 3] * 2
    assert weights[1].tolist() == [[[0.0]] * 3, [[1.0]] * 3]
    assert partners[1, 1].tolist() == [[0], [0], [0]]


def test_mixed_partners_are_weighted_by_probability() -> None:
    partners, weights = partners_of(SCORES, "mix")
    assert partners[0].tolist() == [[[0, 1, 2]] * 3] * 2
    mass = [exp(-1.0), exp(-2.0), exp(-3.0)]
    assert weights[0, 1, 2].tolist() == pytest.approx([m / sum(mass) for m in mass])
    assert weights[0, 0, 0].tolist() == pytest.approx([1 / (1 + exp(-1)), 1 / (1 + exp(1)), 0.0])
    assert weights[1, 0].tolist() == [[0.0] * 3] * 3
    assert weights[1, 1].tolist() == [[1.0, 0.0, 0.0]] * 3


def test_mixing_stands_small_probabilities() -> None:
    _, weights = partners_of(torch.tensor([[[-1000.0, -1001.0], [-2000.0, -inf]]]).double(), "mix")
    assert weights[0, 1, 0].tolist() == pytest.approx([1 / (1 + exp(-1)), 1 / (1 + exp(1))])
    assert weights[0, 0, 0].tolist() == [1.0, 0.0]


def test_order_of_ties() -> None:
    """Better score, then earlier step, then l2r, then lower slot."""
    rows = [(-1.0, 5, R2L, 3), (-2.0, 1, R2L, 1), (-2.0, 2, L2R, 1), (-2.0, 2, R2L, 0), (-2.0, 2, R2L, 1)]
    pairs = [(score, End(step, d, slot, 0.0)) for score, step, d, slot in rows]
    assert sorted(reversed(pairs), key=lambda pair: order_key(*pair)) == pairs


# -- search over tables ------------------------------------------------------------------------------------------------


def run(table: Any, limit: int = 5, directions: str = "both", **options: Any) -> Found:
    return Script(table, directions).found(limit, **options)[0]


def steps_of(found: Found) -> list[TraceStep]:
    assert found.trace is not None
    return found.trace.steps


def by_prefix(rows: dict[tuple[int, ...], dict[int, float]], otherwise: dict[int, float]) -> Any:
    """The same for both directions, and blind to the future."""
    return lambda sentence, direction, own, futures: rows.get(own, otherwise)


def test_a_beam_that_two_directions_cannot_share() -> None:
    with pytest.raises(SearchError, match=r"search\.beam: must be even when both directions decode .* got 3"):
        run(by_prefix({}, {END: 1.0}), beam=3, direction=None)
    assert run(by_prefix({}, {END: 1.0}), directions="l2r", beam=3).hypotheses[0].tokens == []


def test_beginning() -> None:
    """Every direction starts with its tag in slot 0; the other slots are dead."""
    first = steps_of(run(by_prefix({}, {END: 0.5, A: 0.3, B: 0.2}), beam=6))[0]
    assert first.tokens == [[1, 1, 1], [2, 2, 2]]
    assert first.live == [[True, False, False]] * 2
    assert first.partners[0] == [[0], [0], [0]]


def test_twice_as_many_candidates_as_slots() -> None:
    """b = 1: END is second best and completes, A goes on; with one candidate only it would not be seen."""
    found = run(by_prefix({(): {A: 0.6, END: 0.3, B: 0.1}}, {A: 0.9, END: 0.06, B: 0.04}), 2, "l2r", beam=1, nbest=1)
    assert [e.step for e in found.trace.ends] == [0] if found.trace else False
    assert found.hypotheses[0].tokens == []
    # third best is not a candidate
    found = run(by_prefix({}, {A: 0.6, B: 0.3, END: 0.1}), 2, "l2r", beam=1)
    assert found.hypotheses[0].cut_off and found.trace is not None and not found.trace.ends


def test_what_ends_leaves_its_slot_to_the_next() -> None:
    """K = 2, four candidates: END, A, B, C; END leaves, A and B go on."""
    found = run(by_prefix({}, {END: 0.4, A: 0.3, B: 0.2, C: 0.1}), 1, "l2r", beam=2, early_stop=False)
    assert steps_of(found)[1].tokens == [[A, B]]
    assert steps_of(found)[1].live == [[True, True]]
    # next: A+END .12, A+A .09, B+END .08, then A+B and B+A .06: two end, and two go on
    assert found.trace is not None
    assert [(e.step, e.slot) for e in found.trace.ends] == [(0, 0), (1, 0)]  # two are kept, of three


def test_score_divides_by_the_length_norm() -> None:
    """n counts the end mark, not the tag."""
    rows = {(): {A: 1.0}, (A,): {B: 0.5, C: 0.5}, (A, B): {END: 0.8, C: 0.2}}
    found = run(by_prefix(rows, {END: 0.1, A: 0.9}), 2, "r2l", beam=2, length_penalty=0.6)
    (hypothesis,) = found.hypotheses
    assert hypothesis.reading_order == [B, A]
    assert hypothesis.token_scores == pytest.approx([0.0, log(0.5), log(0.8)])
    assert hypothesis.score == pytest.approx(log(0.4) / (8 / 6) ** 0.6)


@pytest.mark.parametrize("alpha, tokens", [(0.0, []), (1.0, [A, A, A])])
def test_length_penalty_decides(alpha: float, tokens: list[int]) -> None:
    rows = {(): {END: 0.3, A: 0.7}, (A, A, A): {END: 1.0}}
    found = run(by_prefix(rows, {A: 0.62, B: 0.38}), 3, "l2r", beam=2, length_penalty=alpha)
    assert found.hypotheses[0].tokens == tokens


def test_all_end_at_once() -> None:
    """Every candidate ends: nothing is live any more, and the search returns what is complete."""
    found = run(by_prefix({(): {A: 0.5, B: 0.5}}, {END: 1.0}), 4, beam=4, nbest=4, early_stop=False)
    assert steps_of(found)[2].live == [[False, False]] * 2
    assert len(steps_of(found)) == 6
    assert [(h.tokens, h.direction) for h in found.hypotheses] == [([A], L2R), ([B], L2R), ([A], R2L), ([B], R2L)]


def test_a_dead_half_gives_no_future() -> None:
    """r2l ends at once; l2r goes on and reads nobody, rather than the tag or what r2l had."""
    seen: list[tuple[tuple[int, ...], Futures]] = []

    def table(sentence: int, direction: Direction, own: tuple[int, ...], futures: Futures) -> dict[int, float]:
        if direction is R2L:
            return {END: 1.0}
        seen.append((own, futures))
        return {A: 1.0} if len(own) < 3 else {END: 1.0}

    for pairing in ("rank", "best", "mix"):
        seen.clear()
        found = run(table, beam=2, pairing=pairing, early_stop=False)
        assert seen[:4] == [((), (((), 1.0),)), ((A,), ()), ((A, A), ()), ((A, A, A), ())]
        assert found.best[L2R].tokens == [A, A, A]
        assert steps_of(found)[1].weights == [[[0.0]], [[1.0]]]


def test_a_dead_partner_is_replaced_by_the_best() -> None:
    """r2l has one live slot of two: both of l2r read it. l2r has two: r2l's slot 0 reads slot 0."""

    def table(sentence: int, direction: Direction, own: tuple[int, ...], futures: Futures) -> dict[int, float]:
        return {C: 1.0} if direction is R2L else {A: 0.6, B: 0.4}

    second = steps_of(run(table, limit=2, beam=4))[1]
    assert second.live == [[True, True], [True, False]]
    assert second.partners == [[[0], [0]], [[0], [1]]]
    assert second.weights == [[[1.0], [1.0]], [[1.0], [1.0]]]


def test_directions_read_what_stood_before_the_step() -> None:
    """Both step from the same previous state: after n own tokens each reads exactly n of the other's."""
    lengths: set[tuple[int, int]] = set()

    def table(sentence: int, direction: Direction, own: tuple[int, ...], futures: Futures) -> dict[int, float]:
        lengths.update((len(own), len(tokens)) for tokens, _ in futures)
        return {A: 0.5, B: 0.3, END: 0.2}

    run(table, limit=4, beam=4, early_stop=False)
    assert {(n, n) for n in range(5)} == {pair for pair in lengths if pair[1]} | {(0, 0)}


def test_partners_meet_by_rank_not_by_descent() -> None:
    """Slot 1 overtakes slot 0 in l2r; in the next step it reads r2l's slot 0."""
    seen: dict[tuple[int, ...], Futures] = {}

    def table(sentence: int, direction: Direction, own: tuple[int, ...], futures: Futures) -> dict[int, float]:
        if direction is R2L:
            return {A: 0.7, B: 0.3} if not own else {C: 1.0}
        seen.setdefault(own, futures)
        return {(): {A: 0.6, B: 0.4}, (A,): {C: 0.5, A: 0.5}, (B,): {B: 0.9, END: 0.1}}.get(own, {C: 1.0})

    run(table, limit=3, beam=4, early_stop=False)
    assert seen[(A,)] == (((A,), 1.0),) and seen[(B,)] == (((B,), 1.0),)
    assert seen[(B, B)] == (((A, C), 1.0),), "B B (.36) is now before A C (.30)"
    assert seen[(A, C)] == (((B, C), 1.0),) or seen[(A, A)] == (((B, C), 1.0),)


def test_equal_scores_keep_the_earlier_then_l2r_then_the_lower_slot() -> None:
    rows = {(): {A: 0.5, B: 0.5}, (A,): {END: 1.0}, (B,): {END: 0.5, C: 0.5}}
    found = run(by_prefix(rows, {END: 1.0}), 4, beam=4, nbest=4, length_penalty=0.0, early_stop=False)
    # A has .5; B (step 1) and B C (step 2) have .25, of either direction: of these four equal ones two are kept
    assert [(h.tokens, h.direction) for h in found.hypotheses] == [([A], L2R), ([A], R2L), ([B], L2R), ([B], R2L)]
    found = run(by_prefix(rows, {END: 1.0}), 4, "l2r", beam=3, nbest=3, length_penalty=0.0, early_stop=False)
    assert [h.tokens for h in found.hypotheses] == [[A], [B], [B, C]]
    found = run(by_prefix({(): {A: 0.5, B: 0.5}}, {END: 1.0}), 4, "l2r", beam=2, nbest=2)
    first = steps_of(found)[1].tokens[0]
    assert [h.tokens for h in found.hypotheses] == [[token] for token in first], (
        "equal ones in the order of their slots"
    )


def test_at_most_beam_are_kept_both_directions_together() -> None:
    def table(sentence: int, direction: Direction, own: tuple[int, ...], futures: Futures) -> dict[int, float]:
        return {END: 0.3, A: 0.7} if direction is L2R else {END: 0.01, A: 0.99}

    found = run(table, limit=6, beam=2, nbest=2, early_stop=False)
    assert [h.direction for h in found.hypotheses] == [L2R, L2R]
    assert found.best[R2L].direction is R2L


def test_stops_when_nothing_can_win_in_either_direction() -> None:
    """l2r is done for at once, r2l is not: it goes on, and l2r steps with it, being its future."""
    seen: list[Futures] = []

    def table(sentence: int, direction: Direction, own: tuple[int, ...], futures: Futures) -> dict[int, float]:
        if direction is L2R:
            return {END: 0.5, A: 0.01, B: 0.49} if not own else {A: 0.5, B: 0.5}
        seen.append(futures)
        return {A: 1.0} if len(own) < 3 else {END: 1.0}

    found = run(table, limit=8, beam=2, length_penalty=0.0)
    assert found.hypotheses[0].direction is R2L and found.hypotheses[0].tokens == [A, A, A]
    assert len(steps_of(found)) == 5, "step 3 completes r2l with probability 1: nothing can be better"
    assert [len(f[0][0]) for f in seen] == [0, 1, 2, 3]


@pytest.mark.parametrize("limit, steps", [(3, 2), (4, 3)])
def test_a_live_hypothesis_is_judged_by_the_longest_it_can_become(limit: int, steps: int) -> None:
    """α = 1: the empty output has log .5 = -0.693. A has log .45, and A A log .3375 = -1.086, which is divided by
    9/6 (limit 3) to -0.724, too little, or by 10/6 (limit 4) to -0.652; A A A has log .169 = -1.779, too little."""
    found = run(
        by_prefix({(): {END: 0.5, A: 0.45, B: 0.05}, (A,): {A: 0.75, B: 0.25}}, {A: 0.5, B: 0.5}),
        limit,
        "l2r",
        beam=1,
        length_penalty=1.0,
    )
    assert len(steps_of(found)) == steps + 1
    assert found.hypotheses[0].tokens == []


def test_nbest_is_waited_for() -> None:
    table = by_prefix({(): {END: 0.9, A: 0.1}, (A,): {END: 0.9, B: 0.1}}, {END: 0.2, C: 0.8})
    assert len(steps_of(run(table, 9, "l2r", beam=2, nbest=1))) == 2
    found = run(table, 9, "l2r", beam=2, nbest=2)
    assert len(steps_of(found)) == 3 and [h.tokens for h in found.hypotheses] == [[], [A]]


def test_cut_off_when_nothing_completes() -> None:
    """One hypothesis, the best live one of either direction, with as many tokens as are allowed."""

    def table(sentence: int, direction: Direction, own: tuple[int, ...], futures: Futures) -> dict[int, float]:
        return {A: 0.6, B: 0.4} if direction is L2R else {C: 0.7, B: 0.3}

    found = run(table, limit=3, beam=4, nbest=4, length_penalty=1.0)
    (hypothesis,) = found.hypotheses
    assert hypothesis == Hypothesis([C] * 3, hypothesis.token_scores, hypothesis.score, R2L, True)
    assert hypothesis.token_scores == pytest.approx([log(0.7)] * 3)
    assert hypothesis.score == pytest.approx(3 * log(0.7) / (8 / 6))
    assert found.best[L2R].tokens == [A] * 3 and found.best[L2R].cut_off


def test_a_tie_of_cut_off_ones_is_l2rs() -> None:
    found = run(by_prefix({}, {A: 0.6, B: 0.4}), limit=2, beam=2)
    assert found.hypotheses[0].direction is L2R and found.hypotheses[0].cut_off


def test_an_end_mark_may_follow_the_last_token() -> None:
    """Maximum length 2: A A END is allowed, A A A END is not."""
    rows = {(): {A: 1.0}, (A,): {A: 1.0}, (A, A): {END: 0.1, A: 0.9}}
    found = run(by_prefix(rows, {END: 1.0}), 2, "l2r", beam=2)
    assert found.hypotheses[0].tokens == [A, A] and not found.hypotheses[0].cut_off
    rows[A, A] = {A: 1.0}
    found = run(by_prefix(rows, {END: 1.0}), 2, "l2r", beam=2)
    assert found.hypotheses[0].tokens == [A, A] and found.hypotheses[0].cut_off


def test_a_forced_direction_wins_and_the_other_is_its_future() -> None:
    """l2r is forced to an unlikely beginning; r2l, certain of itself, may not win, but is read."""
    seen: dict[tuple[int, ...], Futures] = {}

    def table(sentence: int, direction: Direction, own: tuple[int, ...], futures: Futures) -> dict[int, float]:
        if direction is R2L:
            return {C: 1.0} if len(own) < 2 else {END: 1.0}
        seen.setdefault(own, futures)  # a dead slot is asked as well, with what it last held
        return {A: 0.9, B: 0.1} if len(own) < 3 else {END: 1.0}

    forced = torch.tensor([[[B, B], [0, 0]]])
    found = Script(table).found(5, forced=forced, beam=4, nbest=4, early_stop=False)[0]
    assert [h.tokens for h in found.hypotheses] == [[B, B, A], [B, B, B]]
    assert found.hypotheses[0].token_scores == pytest.approx([log(0.1), log(0.1), log(0.9), 0.0])
    assert {h.direction for h in found.hypotheses} == {L2R}
    assert seen[(B,)] == (((C,), 1.0),) and seen[(B, B)] == (((C, C), 1.0),)
    assert set(seen) == {(), (B,), (B, B), (B, B, A), (B, B, B)}


def test_a_forced_beginning_is_each_sentences_own() -> None:
    forced = torch.tensor([[[B]], [[0]], [[C]]])
    script = Script(by_prefix({(): {A: 0.98, B: 0.01, C: 0.01}}, {END: 0.9, A: 0.1}), "r2l")
    found = script.found([3, 3, 3], forced=forced, beam=2)
    assert [one.hypotheses[0].reading_order for one in found] == [[B], [A], [C]]


def test_sentences_do_not_meet() -> None:
    """Different tables, limits and lengths in one batch; each leaves when it is done."""

    def table(sentence: int, direction: Direction, own: tuple[int, ...], futures: Futures) -> dict[int, float]:
        return {A + sentence % 3: 1.0} if len(own) < sentence else {END: 1.0}

    found = Script(table).found([9] * 8, beam=2, sentences=8)
    assert [one.hypotheses[0].tokens for one in found] == [[A + s % 3] * s for s in range(8)]
    found = Script(table).found([2] * 8, beam=2, sentences=8)
    assert [one.hypotheses[0].cut_off for one in found] == [s > 2 for s in range(8)]
