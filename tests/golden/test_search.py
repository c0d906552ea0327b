"""Search against something slower or independent: the naive decoder, teacher forcing, replay, enumeration, a loop."""

import random
from collections import defaultdict
from itertools import product
from math import exp, inf
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from toy import (
    FAMILIES,
    Family,
    Script,
    assert_same,
    decode,
    difference,
    naive_over,
    naive_run,
    norm,
    path,
    path_scores,
    random_table,
    settings,
    toy_model,
    toy_sources,
    trace_difference,
)

from bothways.models.interface import Lattice, Seq2Seq
from bothways.search.exhaustive import enumerate_all, lattice
from bothways.search.hypothesis import Found, Hypothesis
from bothways.tokens import DIRECTIONS, END, L2R, PAD, R2L, Direction

PAIRINGS = ["rank", "best", "mix"]
FORMS = [(family, meeting) for family in FAMILIES.values() for meeting in family.meetings]
forms = pytest.mark.parametrize("family, meeting", FORMS, ids=lambda x: x.both if isinstance(x, Family) else str(x))
pairings = pytest.mark.parametrize("pairing", PAIRINGS)
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)

OPTIONS: list[dict[str, Any]] = [
    {"length_penalty": alpha, "early_stop": early, "beam": beam, "nbest": nbest}
    for alpha, early, (beam, nbest) in product((0.0, 0.6, 1.0), (True, False), ((2, 1), (4, 1), (4, 3), (6, 6)))
]


# -- the naive decoder -------------------------------------------------------------------------------------------------


def compare_with_naive(model: Seq2Seq, sources: list[Tensor], limits: list[int], options: dict[str, Any]) -> None:
    """In float64 everything is equal; in float32 everything but what a near-tie explains."""
    config = settings(**options)
    slow = [naive_run(model, source, limit, config) for source, limit in zip(sources, limits, strict=True)]
    for found, run in zip(decode(model, sources, limits, config), slow, strict=True):
        said = trace_difference(found, run.found, config) or difference(found, run.found)
        assert_same(said, lambda run=run: run)
    model.double()
    for found, run in zip(decode(model, sources, limits, config), slow, strict=True):
        assert trace_difference(found, run.found, config, 1e-6) == ""
        assert difference(found, run.found, 1e-6) == ""
    model.float()


@pairings
@forms
def test_fast_search_is_the_naive_decoder(family: Family, meeting: dict[str, Any], pairing: str) -> None:
    """Every token, parent, partner, weight, live flag, end, score and direction."""
    for i, options in enumerate(OPTIONS):
        shape = family.shapes[i % len(family.shapes)]
        model = toy_model(family.both, seed=i, **{**shape, **meeting})
        limits = [random.Random(i).randint(1, 8), 5]
        compare_with_naive(model, toy_sources(i, 2), limits, {**options, "pairing": pairing})


@pytest.mark.parametrize("direction", ["l2r", "r2l"])
@families
def test_fast_search_is_the_naive_decoder_in_one_direction(family: Family, direction: str) -> None:
    for i, options in enumerate(OPTIONS):
        shape = family.shapes[i % len(family.shapes)]
        model = toy_model(getattr(family, direction), seed=i, **shape)
        beam = options["beam"] - i % 2  # odd ones are right here
        options = {**options, "direction": direction, "beam": beam, "nbest": min(options["nbest"], beam)}
        compare_with_naive(model, toy_sources(i, 2), [6, 4], options)


@families
def test_a_bidirectional_model_decodes_in_one_direction(family: Family) -> None:
    """It has no partner then, and is the model without interaction."""
    for seed, direction in product(range(4), ["l2r", "r2l"]):
        model = toy_model(family.both, seed=seed)
        compare_with_naive(model, toy_sources(seed, 2), [6, 4], {"direction": direction, "beam": 3})


@hypothesis_settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 10**6),
    gaps=st.sampled_from([0.0, 0.4, 0.8]),
    direction=st.sampled_from(["both", "both", "l2r", "r2l"]),
    options=st.sampled_from(OPTIONS),
    pairing=st.sampled_from(PAIRINGS),
    limits=st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
def test_fast_search_is_the_naive_one_over_any_table(
    seed: int, gaps: float, direction: str, options: dict[str, Any], pairing: str, limits: list[int]
) -> None:
    """Without a model in between; with impossible tokens, so that slots and whole half beams die."""
    script = Script(random_table(seed, vocabulary=8, gaps=gaps), direction, vocabulary=8)
    options = {**options, "pairing": pairing, "direction": direction}
    config = settings(**options)
    found = script.found(limits, sentences=len(limits), **options)
    for sentence, limit in enumerate(limits):
        slow = naive_over(script.distributions(sentence), limit, config).found
        assert trace_difference(found[sentence], slow, config, 1e-6) == ""
        assert difference(found[sentence], slow, 1e-6) == ""


def test_halves_die_in_the_tables_above() -> None:
    """The property above would be empty if they never did."""
    dead = 0
    for seed in range(30):
        (found,) = Script(random_table(seed, 8, 0.8), vocabulary=8).found(6, beam=4, early_stop=False)
        assert found.trace is not None
        dead += any(not any(half) for step in found.trace.steps for half in step.live)
    assert dead >= 10


# -- teacher forcing ---------------------------------------------------------------------------------------------------


def live_paths(found: Found) -> list[list[int]]:
    """What slot 0 of each direction holds at the end of the trace."""
    assert found.trace is not None
    last = len(found.trace.steps) - 1
    return [path(found.trace.steps, last, d, 0) for d in range(2)]


@pairings
@forms
def test_one_hypothesis_each_is_two_streams_in_parallel(family: Family, meeting: dict[str, Any], pairing: str) -> None:
    """b = 1: teacher forcing over both streams at once gives every token's and end mark's log-probability."""
    for seed in range(3):
        model = toy_model(family.both, seed=seed, **{**family.shapes[seed % len(family.shapes)], **meeting})
        sources = toy_sources(seed, 3)
        for source, found in zip(
            sources, decode(model, sources, 6, settings(beam=2, pairing=pairing, early_stop=False)), strict=True
        ):
            assert found.trace is not None
            rows = live_paths(found)
            inputs = torch.tensor([[d.tag, *row[:-1]] for d, row in zip(Direction, rows, strict=True)])
            expected = model(source[None], inputs[None])[0].tolist()
            for t, step in enumerate(found.trace.steps[1:]):
                for d, row in enumerate(rows):
                    assert step.log_probs[d][0] == pytest.approx(expected[d][t][row[t]], abs=1e-5)
            for end in found.trace.ends:
                assert end.log_prob == pytest.approx(expected[end.direction][end.step][END], abs=1e-5)
            for hypothesis in found.hypotheses:
                assert hypothesis.tokens == rows[hypothesis.direction][: len(hypothesis.tokens)]


@pairings
@forms
def test_replaying_the_trace_gives_every_log_probability(family: Family, meeting: dict[str, Any], pairing: str) -> None:
    """b > 1: all nodes at once and without a cache, end marks included; a hypothesis' score is their sum."""
    for seed in range(4):
        model = toy_model(family.both, seed=10 + seed, **{**family.shapes[seed % len(family.shapes)], **meeting})
        sources = toy_sources(seed, 3)
        config = settings(beam=(4, 6)[seed % 2], nbest=4, pairing=pairing, early_stop=seed % 2 == 0)
        for source, found in zip(sources, decode(model, sources, 7, config), strict=True):
            assert found.trace is not None
            steps, K = found.trace.steps, len(found.trace.steps[0].tokens[0])
            replayed = model.replay(model.encode(source[None]), Lattice(*lattice(steps))).tolist()
            for t, step in enumerate(steps[1:]):
                for d, half in enumerate(step.live):
                    for k in [k for k, live in enumerate(half) if live]:
                        expected = replayed[d][t * K + step.parents[d][k]][step.tokens[d][k]]
                        assert step.log_probs[d][k] == pytest.approx(expected, abs=1e-5)
            totals = {}
            for end in found.trace.ends:
                expected = replayed[end.direction][end.step * K + end.slot][END]
                assert end.log_prob == pytest.approx(expected, abs=1e-5)
                tokens = path(steps, end.step, end.direction, end.slot)
                total = path_scores(steps)[end.step][end.direction][end.slot] + expected
                totals[end.direction, tuple(tokens)] = total
            for hypothesis in found.hypotheses:
                if not hypothesis.cut_off:
                    total = totals[hypothesis.direction, tuple(hypothesis.tokens)]
                    assert sum(hypothesis.token_scores) == pytest.approx(total, abs=1e-5)
                    score = total / norm(len(hypothesis.tokens) + 1, config)
                    assert hypothesis.score == pytest.approx(score, abs=1e-5)


# -- enumeration -------------------------------------------------------------------------------------------------------

SMALL = 7  # a vocabulary of three tokens besides the end mark
LENGTH = 4
SEQUENCES = 3 * 3**LENGTH  # with one token more than is allowed: nothing is ever pruned


def every_sequence(length: int) -> set[tuple[int, ...]]:
    return {row for n in range(length + 1) for row in product((4, 5, 6), repeat=n)}


@pytest.mark.parametrize("direction", ["l2r", "r2l", "both"])
@families
def test_unlimited_beams_find_what_enumeration_finds(family: Family, direction: str) -> None:
    """Without interaction a prefix' distribution is its own: brute force knows every sequence's probability."""
    for seed, alpha in enumerate((0.0, 0.6, 1.0)):
        system = family.apart if direction == "both" else getattr(family, direction)
        shape = family.shapes[seed % len(family.shapes)]
        model = toy_model(system, seed=seed, vocabulary=SMALL, **shape).double()
        (source,) = toy_sources(seed, 1, SMALL)
        beam = SEQUENCES * len(DIRECTIONS[direction])
        config = settings(direction=direction, beam=beam, nbest=beam, length_penalty=alpha, early_stop=False)
        (found,) = decode(model, [source], LENGTH, config)
        expected = {}
        for d in DIRECTIONS[direction]:

            def distribution(prefix: Any, d: Direction = d, model: Seq2Seq = model, source: Tensor = source) -> Any:
                with torch.inference_mode():
                    return model(source[None], torch.tensor([[[d.tag, *prefix]]]))[0, 0, -1].tolist()

            for tokens, total in enumerate_all(distribution, LENGTH).items():
                expected[d, tokens] = total / norm(len(tokens) + 1, config)
        assert len(expected) == 121 * len(DIRECTIONS[direction])
        assert {(h.direction, tuple(h.tokens)): h.score for h in found.hypotheses} == pytest.approx(expected, abs=1e-6)
        assert [h.score for h in found.hypotheses] == sorted((h.score for h in found.hypotheses), reverse=True)
        assert not any(h.cut_off for h in found.hypotheses)


@pairings
@forms
def test_nothing_is_lost_or_counted_twice(family: Family, meeting: dict[str, Any], pairing: str) -> None:
    """λ > 0, no pruning: each direction completes every sequence once; all its probability is complete or live."""
    seed, length = 3, LENGTH if pairing != "mix" else 3  # mixing over all is cubic in their number
    model = toy_model(family.both, seed=seed, vocabulary=SMALL, **meeting)
    beam = 2 * 3 ** (length + 1)
    config = settings(beam=beam, nbest=beam, early_stop=False, pairing=pairing)
    (found,) = decode(model, toy_sources(seed, 1, SMALL), length, config)
    assert found.trace is not None
    for d in Direction:
        complete = [h for h in found.hypotheses if h.direction is d]
        assert sorted(tuple(h.tokens) for h in complete) == sorted(every_sequence(length))
        live = [score for score in path_scores(found.trace.steps)[-1][d] if score > -inf]
        assert len(live) == 3 ** (length + 1)
        mass = sum(exp(sum(h.token_scores)) for h in complete) + sum(exp(score) for score in live)
        assert mass == pytest.approx(1, abs=1e-5)


# -- greedy ------------------------------------------------------------------------------------------------------------


def plain_greedy(model: Seq2Seq, source: Tensor, limit: int, directions: tuple[Direction, ...]) -> list[Hypothesis]:
    """The best next token of each direction, all computed anew each time; one that has ended stays as it is."""
    rows: list[list[int]] = [[] for _ in directions]
    scores: list[list[float]] = [[] for _ in directions]
    ended = [False] * len(directions)
    for t in range(limit + 1):
        inputs = [[d.tag, *row, *[PAD] * (t - len(row))] for d, row in zip(directions, rows, strict=True)]
        with torch.inference_mode():
            newest = model(source[None], torch.tensor([inputs]))[0, :, t]
        for d, log_probs in enumerate(newest):
            token = int(log_probs.argmax())
            if ended[d] or (token != END and t == limit):
                continue
            ended[d] = token == END
            scores[d].append(float(log_probs[token]))
            rows[d] += [] if ended[d] else [token]
        if all(ended):
            break
    return [
        Hypothesis(rows[d], scores[d], sum(scores[d]) / norm(len(scores[d]), settings()), direction, not ended[d])
        for d, direction in enumerate(directions)
    ]


@pytest.mark.parametrize("direction", ["l2r", "r2l", "both"])
@forms
def test_greedy_is_a_plain_loop(family: Family, meeting: dict[str, Any], direction: str) -> None:
    directions = DIRECTIONS[direction]
    lengths: dict[bool, int] = defaultdict(int)
    for seed in range(12):
        shape = family.shapes[seed % len(family.shapes)]
        model = toy_model(family.both, seed=seed, **{**shape, **meeting}).double()
        sources, limits = toy_sources(seed, 4), [6, 3, 1, 5]
        config = settings(direction=direction, greedy=True, nbest=2)
        for source, limit, found in zip(sources, limits, decode(model, sources, limits, config), strict=True):
            expected = plain_greedy(model, source, limit, directions)
            complete = sorted((h for h in expected if not h.cut_off), key=lambda h: (-h.score, h.direction))
            best = sorted(expected, key=lambda h: (-h.score, h.direction))[:1]
            wanted = Found(complete or best, {h.direction: h for h in expected})
            assert difference(found, wanted, 1e-6) == ""
            lengths[len({len(h.tokens) for h in expected}) == 2] += 1
    assert direction != "both" or lengths[True] >= 3, "one direction must sometimes end before the other"


def test_greedy_stands_immediate_end_marks() -> None:
    """Both ends at once, one of them at once, and in one direction."""
    nothing = {END: 0.9, 5: 0.1}
    (found,) = Script(lambda *_: nothing).found(5, greedy=True)
    assert found.hypotheses[0].tokens == [] and found.hypotheses[0].direction is L2R
    assert [found.best[d].tokens for d in Direction] == [[], []]
    (found,) = Script(lambda *_: nothing, "r2l").found(5, greedy=True)
    assert found.hypotheses[0].tokens == [] and found.hypotheses[0].direction is R2L
    seen = []

    def table(sentence: int, direction: Direction, own: Any, futures: Any) -> dict[int, float]:
        if direction is L2R:
            return nothing
        seen.append((own, futures))
        return {END: 0.9, 5: 0.1} if len(own) == 3 else {END: 0.1, 5: 0.9}

    (found,) = Script(table).found(5, greedy=True)
    assert found.best[L2R].tokens == [] and found.best[R2L].tokens == [5, 5, 5]
    assert seen == [((5,) * n, (((), 1.0),)) for n in range(4)], "the ended direction stays the other's future"
