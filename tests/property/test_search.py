"""What is true of search whatever the model: batches, order, padding, interaction, tags, prefixes, when it stops."""

import copy
import random
from itertools import permutations, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from toy import (
    CLOSE,
    FAMILIES,
    TIES,
    Family,
    Script,
    assert_same,
    decode,
    difference,
    hypothesis_difference,
    naive_run,
    norm,
    pad,
    path_scores,
    random_table,
    same_weights,
    settings,
    toy_model,
    toy_sources,
    trace_difference,
)

from bothways.config import SearchConfig
from bothways.models.interface import Lattice, Seq2Seq
from bothways.search.exhaustive import lattice
from bothways.search.hypothesis import Found, Hypothesis, Trace
from bothways.tokens import END, L2R, PAD, R2L, TAG_L2R, TAG_R2L, Direction

PAIRINGS = ["rank", "best", "mix"]
FORMS = [(family, meeting) for family in FAMILIES.values() for meeting in family.meetings]
forms = pytest.mark.parametrize("family, meeting", FORMS, ids=lambda x: x.both if isinstance(x, Family) else str(x))
pairings = pytest.mark.parametrize("pairing", PAIRINGS)
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def trace_of(found: Found) -> Trace:
    assert found.trace is not None
    return found.trace


# -- batches ---------------------------------------------------------------------------------------------------------


def assert_independent(model: Seq2Seq, config: SearchConfig, seed: int, count: int = 5) -> None:
    """Each sentence alone, in a batch, in every other order and company, with any padding."""
    sources = toy_sources(seed, count)
    limits = [random.Random(seed + i).randint(1, 9) for i in range(count)]
    alone = [decode(model, [source], limit, config)[0] for source, limit in zip(sources, limits, strict=True)]
    rng = random.Random(seed)
    for padding in (0, 3):
        order = rng.sample(range(count), count if padding else count - 1) * (1 + bool(padding))
        found = decode(model, [sources[i] for i in order], [limits[i] for i in order], config, padding=padding)
        for i, result in zip(order, found, strict=True):
            said = difference(result, alone[i])
            if config.greedy:
                assert said == ""
            else:
                assert_same(said, lambda i=i: naive_run(model, sources[i], limits[i], config))


@pairings
@forms
def test_a_result_does_not_depend_on_its_batch(family: Family, meeting: dict[str, Any], pairing: str) -> None:
    for seed in range(6):
        model = toy_model(family.both, seed=seed, **{**family.shapes[seed % len(family.shapes)], **meeting})
        config = settings(beam=4, nbest=1 + seed % 4, pairing=pairing, early_stop=seed != 3)
        assert_independent(model, config, seed)


@pytest.mark.parametrize("system", ["l2r", "r2l", "apart"])
@families
def test_a_result_does_not_depend_on_its_batch_without_interaction(family: Family, system: str) -> None:
    for seed in range(6):
        model = toy_model(getattr(family, system), seed=seed, **family.shapes[seed % len(family.shapes)])
        config = settings(direction="both" if system == "apart" else system, beam=4, nbest=1 + seed % 4)
        assert_independent(model, config, seed)


@families
def test_a_greedy_result_does_not_depend_on_its_batch(family: Family) -> None:
    for seed, direction in product(range(6), ["l2r", "both"]):
        assert_independent(toy_model(family.both, seed=seed), settings(direction=direction, greedy=True), seed)


def test_many_sentences_leave_the_batch_one_after_another() -> None:
    """Of long sentences more tokens than a history has room for at first; most leave long before."""
    model = toy_model(seed=1)
    sources = toy_sources(1, 12)
    limits = [40, *(1 + i % 7 for i in range(10)), 33]
    config = settings(beam=4, nbest=4, early_stop=False)
    found = decode(model, sources, limits, config)
    for source, limit, result in zip(sources, limits, found, strict=True):
        assert len(trace_of(result).steps) == limit + 2
        alone = decode(model, [source], limit, config)[0]
        assert_same(difference(result, alone), lambda s=source, n=limit: naive_run(model, s, n, config))


def test_how_often_search_looks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it looks every few steps only, and sentences that have finished run on meanwhile."""
    for seed, greedy in product(range(6), [False, True]):
        model, sources = toy_model(seed=seed), toy_sources(seed, 5)
        config = settings(beam=4, nbest=2, greedy=greedy)
        limits = [2, 9, 5, 1, 7]
        expected = decode(model, sources, limits, config)
        with monkeypatch.context() as patched:
            patched.setattr("bothways.search.beam.steps_between_looks", lambda _: 8)
            found = decode(model, sources, limits, config)
        for a, b in zip(found, expected, strict=True):
            assert difference(a, b) == ""
            assert trace_difference(a, b, config) == ""


def test_near_ties_are_allowed_only_where_they_are() -> None:
    """The allowance itself: it takes a wrong result of a near-tie, and of nothing else."""
    config = settings(beam=2)
    model = toy_model(seed=2)
    (source,) = toy_sources(2, 1)
    run = naive_run(model, source, 5, config)
    assert run.closest > CLOSE
    compared, allowed = TIES.compared, len(TIES.allowed)
    with pytest.raises(AssertionError, match="is no near-tie"):
        assert_same("something differs", lambda: run)
    copied = copy.deepcopy(model)
    with torch.no_grad():  # two tokens that look the same: whatever is decided between them is a near-tie
        copied.output_weight[5] = copied.output_weight[6]
    assert naive_run(copied, source, 5, config).closest < CLOSE
    assert (TIES.compared, len(TIES.allowed)) == (compared + 1, allowed)
    TIES.compared -= 1


# -- interaction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@families
def test_without_interaction_it_is_two_searches_merged(family: Family, alpha: float) -> None:
    """b hypotheses and 2b candidates each, the same limits, no early stop."""
    for seed in range(8):
        b = 1 + seed % 3
        model = toy_model(family.apart, seed=seed, **family.shapes[seed % len(family.shapes)])
        sources, limits = toy_sources(seed, 3), [3, 6, 8]
        shared = {"length_penalty": alpha, "early_stop": False, "nbest": b}
        both = decode(model, sources, limits, settings(beam=2 * b, **shared))
        single = [decode(model, sources, limits, settings(direction=d.label, beam=b, **shared)) for d in (L2R, R2L)]
        for i, found in enumerate(both):
            for d in Direction:
                half, own = trace_of(found), trace_of(single[d][i])
                for a, c in zip(half.steps, own.steps, strict=True):
                    assert (a.tokens[d], a.parents[d], a.live[d]) == (c.tokens[0], c.parents[0], c.live[0])
            merged = [h for results in single for h in results[i].hypotheses]
            complete = sorted((h for h in merged if not h.cut_off), key=lambda h: (-h.score, h.direction))
            wanted = complete[:b] or sorted(merged, key=lambda h: (-h.score, h.direction))[:1]
            said = difference(found, Found(wanted, {d: single[d][i].best[d] for d in Direction}))
            assert said == ""


@families
def test_the_future_decides_what_is_found(family: Family) -> None:
    """Otherwise the tests with λ > 0 would hold for a search that reads nobody."""
    for meeting in family.meetings:
        changed = 0
        for seed in range(10):
            model = toy_model(family.both, seed=seed, **meeting)
            apart = same_weights(model, family.apart, **meeting)
            sources = toy_sources(seed, 3)
            changed += sum(
                difference(a, b) != ""
                for a, b in zip(*(decode(m, sources, 6, settings(nbest=4)) for m in (model, apart)), strict=True)
            )
        assert changed >= 24


@families
def test_pairings_differ(family: Family) -> None:
    """Otherwise the tests of one would be tests of another."""
    for one, other in permutations(PAIRINGS, 2):
        changed = 0
        for seed in range(10):
            model, sources = toy_model(family.both, seed=seed), toy_sources(seed, 3)
            found = [decode(model, sources, 6, settings(nbest=4, pairing=pairing)) for pairing in (one, other)]
            changed += sum(difference(a, b) != "" for a, b in zip(*found, strict=True))
        assert changed >= 10


@pairings
@forms
def test_exchanging_the_tags_exchanges_the_directions(family: Family, meeting: dict[str, Any], pairing: str) -> None:
    """Nothing but the tag tells the directions apart."""
    for seed in range(5):
        model = toy_model(family.both, seed=seed, **{**family.shapes[seed % len(family.shapes)], **meeting})
        mirrored = copy.deepcopy(model)
        with torch.no_grad():
            weight = mirrored.target_embedding.weight
            weight[[TAG_L2R, TAG_R2L]] = weight[[TAG_R2L, TAG_L2R]].clone()
        sources = toy_sources(seed, 3)
        config = settings(nbest=4, pairing=pairing, early_stop=seed % 2 == 0, greedy=seed == 4)
        for source, a, b in zip(
            sources, decode(model, sources, 7, config), decode(mirrored, sources, 7, config), strict=True
        ):
            wanted = Found(
                [exchanged(h) for h in a.hypotheses], {h.direction: h for h in map(exchanged, a.best.values())}
            )
            said = difference(b, wanted)
            if config.greedy:
                assert said == ""
            else:
                assert_same(said, lambda s=source, c=config, m=model: naive_run(m, s, 7, c))


def exchanged(hypothesis: Hypothesis) -> Hypothesis:
    """The same, of the other direction."""
    return Hypothesis(
        hypothesis.tokens,
        hypothesis.token_scores,
        hypothesis.score,
        R2L if hypothesis.direction is L2R else L2R,
        hypothesis.cut_off,
    )


# -- states ----------------------------------------------------------------------------------------------------------


def consume(model: Seq2Seq, state: Any, seed: int, shape: tuple[int, int, int], steps: int = 2) -> tuple[Tensor, Any]:
    """Some steps with random tokens, every slot reading a random partner."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(END + 1, 9, shape, generator=generator)
        partners = torch.randint(shape[-1], (*shape, 1), generator=generator)
        following, state = model.step(tokens, state, partners, torch.ones(partners.shape))
    return following.log_probs(), state


@forms
def test_selecting_twice_is_selecting_by_the_composed_order(family: Family, meeting: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (2, 2, 3)
    for seed in range(4):
        model, source = toy_model(family.both, seed=seed, **meeting), pad(toy_sources(seed, 2))
        first, second = (torch.randint(3, shape, generator=generator) for _ in range(2))
        composed = first.gather(2, second)
        assert not torch.equal(composed, first) and not torch.equal(composed, second)
        results = []
        for orders in ([first, second], [composed]):
            with torch.inference_mode():
                _, state = consume(model, model.start(model.encode(source), 2, 3), seed, shape)
                for order in orders:
                    state = state.select(order)
                results.append(consume(model, state, seed + 1, shape)[0])
        torch.testing.assert_close(results[0], results[1])


@forms
def test_selecting_copies_hypotheses(family: Family, meeting: dict[str, Any]) -> None:
    """Slots that go on from the same one, with the same token and partner, predict the same."""
    model, source = toy_model(family.both, seed=1, **meeting), pad(toy_sources(1, 2))
    with torch.inference_mode():
        _, state = consume(model, model.start(model.encode(source), 2, 3), 1, (2, 2, 3))
        state = state.select(torch.full((2, 2, 3), 1))
        following, _ = model.step(
            torch.full((2, 2, 3), 5), state, torch.zeros(2, 2, 3, 1, dtype=torch.long), torch.ones(2, 2, 3, 1)
        )
        log_probs = following.log_probs()
    torch.testing.assert_close(log_probs[:, :, 1:], log_probs[:, :, :1].expand(-1, -1, 2, -1))


@forms
def test_keeping_sentences_is_decoding_only_those(family: Family, meeting: dict[str, Any]) -> None:
    model, source = toy_model(family.both, seed=2, **meeting), pad(toy_sources(2, 4))
    rows = torch.tensor([3, 1])
    results = []
    for kept_first in (True, False):
        with torch.inference_mode():
            state = model.start(model.encode(source[rows] if kept_first else source), 2, 3)
            generator = torch.Generator().manual_seed(3)
            for step in range(4):
                tokens, partners = (
                    torch.randint(low, high, (4, 2, 3), generator=generator) for low, high in ((4, 9), (0, 3))
                )
                if step == 2 and not kept_first:
                    state = state.keep(rows)
                small = kept_first or step >= 2
                tokens, partners = (tokens[rows], partners[rows]) if small else (tokens, partners)
                following, state = model.step(tokens, state, partners[..., None], torch.ones(*partners.shape, 1))
            results.append(following.log_probs())
    torch.testing.assert_close(results[0], results[1])


# -- forced beginnings -----------------------------------------------------------------------------------------------


def forcing(rows: list[tuple[list[int], list[int]]]) -> Tensor:
    """[B, D, F] from what l2r and r2l must begin with, in generation order."""
    width = max(len(half) for row in rows for half in row)
    return torch.tensor([[[*half, *[PAD] * (width - len(half))] for half in row] for row in rows])


@forms
def test_a_forced_direction_begins_as_told_and_wins(family: Family, meeting: dict[str, Any]) -> None:
    """A prefix for l2r, a suffix for r2l, both, and none, in one batch; scores are the model's own, unforced ones."""
    forced = forcing([([5, 7, 7], []), ([], [8, 4]), ([6], [4, 5]), ([], [])])
    for seed in range(4):
        model = toy_model(family.both, seed=seed, **{**family.shapes[seed % len(family.shapes)], **meeting})
        sources = toy_sources(seed, 4)
        config = settings(beam=4, nbest=3, early_stop=False, pairing=PAIRINGS[seed % 3])
        results = decode(model, sources, 7, config, forced)
        free = decode(model, sources[3:], 7, config)
        assert_same(difference(results[3], free[0]), lambda m=model, s=sources, c=config: naive_run(m, s[3], 7, c))
        allowed: list[set[Direction]] = [{L2R}, {R2L}, {L2R, R2L}, {L2R, R2L}]
        for source, row, directions, found in zip(sources, forced.tolist(), allowed, results, strict=True):
            for hypothesis in found.hypotheses:
                begins = [token for token in row[hypothesis.direction] if token != PAD]
                assert hypothesis.direction in directions
                assert hypothesis.tokens[: len(begins)] == begins
                begins = begins if hypothesis.direction is L2R else begins[::-1]
                text = hypothesis.reading_order
                assert (
                    text[: len(begins)] if hypothesis.direction is L2R else text[len(text) - len(begins) :]
                ) == begins
            assert_scores_are_the_models(model, source, found, config)


def assert_scores_are_the_models(model: Seq2Seq, source: Tensor, found: Found, config: SearchConfig) -> None:
    """Forced or not, each token and end mark has the log-probability that the model gives it."""
    steps = trace_of(found).steps
    K = len(steps[0].tokens[0])
    with torch.inference_mode():
        replayed = model.replay(model.encode(source[None]), Lattice(*lattice(steps))).tolist()
    for t, step in enumerate(steps[1:]):
        for d, k in product(range(2), range(K)):
            if step.live[d][k]:
                expected = replayed[d][t * K + step.parents[d][k]][step.tokens[d][k]]
                assert step.log_probs[d][k] == pytest.approx(expected, abs=CLOSE)
    ends = {(end.direction, end.step, end.slot): end for end in trace_of(found).ends}
    for (d, t, k), end in ends.items():
        assert end.log_prob == pytest.approx(replayed[d][t * K + k][END], abs=CLOSE)
    for hypothesis in found.hypotheses:
        expected = sum(hypothesis.token_scores) / norm(len(hypothesis.token_scores), config)
        assert hypothesis.score == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize("direction", [L2R, R2L], ids=lambda d: d.label)
@families
def test_forcing_what_is_found_anyway_changes_nothing(family: Family, direction: Direction) -> None:
    """One direction: the path of the best hypothesis, forced, ends as that hypothesis, with the same score."""
    for seed in range(6):
        model = toy_model(getattr(family, direction.label), seed=seed)
        sources, config = toy_sources(seed, 3), settings(direction=direction.label, early_stop=False)
        free = decode(model, sources, 7, config)
        rows = [found.hypotheses[0].tokens or [PAD] for found in free]
        width = max(map(len, rows))
        forced = torch.tensor([[row + [PAD] * (width - len(row))] for row in rows])
        for a, b in zip(free, decode(model, sources, 7, config, forced), strict=True):
            same = [h for h in b.hypotheses if h.tokens == a.hypotheses[0].tokens]
            assert b.hypotheses[0].score >= a.hypotheses[0].score - CLOSE
            assert all(hypothesis_difference(h, a.hypotheses[0]) == "" for h in same) and same


@families
def test_greedy_can_be_forced(family: Family) -> None:
    for seed in range(4):
        model = toy_model(family.both, seed=seed)
        forced = forcing([([5, 7], []), ([], [8])])
        first, second = decode(model, toy_sources(seed, 2), 6, settings(greedy=True), forced)
        assert first.hypotheses[0].direction is L2R and first.hypotheses[0].tokens[:2] == [5, 7]
        assert second.hypotheses[0].direction is R2L and second.hypotheses[0].reading_order[-1:] == [8]


# -- when a sentence ends --------------------------------------------------------------------------------------------

search_options = st.fixed_dictionaries(
    {
        "length_penalty": st.sampled_from([0.0, 0.6, 1.0]),
        "beam": st.sampled_from([2, 4, 6]),
        "nbest": st.sampled_from([1, 2]),
        "pairing": st.sampled_from(PAIRINGS),
    }
)
over_tables = hypothesis_settings(max_examples=100, deadline=None, derandomize=True, database=None)


@over_tables
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.6]), search_options, st.sampled_from(["both", "l2r", "r2l"]))
def test_search_stops_as_soon_as_nothing_can_win(
    seed: int, gaps: float, options: dict[str, Any], direction: str
) -> None:
    """Found from the trace of a search that goes on: the first step at which the rule of SPEC section 3.5 holds."""
    script = Script(random_table(seed, vocabulary=7, gaps=gaps), direction, vocabulary=7)
    limit = 6
    (long,) = script.found(limit, early_stop=False, **options)
    (short,) = script.found(limit, early_stop=True, **options)
    config = settings(**options)
    scores = path_scores(trace_of(long).steps)
    assert len(trace_of(long).steps) == limit + 2
    last = limit
    for t in range(limit):
        complete = sorted(
            (scores[e.step][e.direction if direction == "both" else 0][e.slot] + e.log_prob) / norm(e.step + 1, config)
            for e in trace_of(long).ends
            if e.step <= t
        )
        best_live = max(score for half in scores[t + 1] for score in half)
        if len(complete) >= config.nbest and best_live / norm(limit + 1, config) <= complete[-config.nbest]:
            last = t
            break
    assert len(trace_of(short).steps) == last + 2
    assert trace_of(short).steps[: last + 1] == trace_of(long).steps[: last + 1]
    enough = sum(not h.cut_off for h in long.hypotheses) == config.nbest
    if enough:  # stopping changes no winner
        assert [(h.tokens, h.score, h.direction) for h in short.hypotheses] == [
            (h.tokens, h.score, h.direction) for h in long.hypotheses
        ]


@over_tables
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.6]), search_options, st.booleans(), st.integers(0, 6))
def test_lists_are_sorted_short_and_alive(
    seed: int, gaps: float, options: dict[str, Any], greedy: bool, limit: int
) -> None:
    """At most n-best hypotheses, best first, each once, none longer than allowed, all of them possible."""
    script = Script(random_table(seed, vocabulary=7, gaps=gaps), vocabulary=7)
    (found,) = script.found(limit, greedy=greedy, early_stop=seed % 2 == 0, **options)
    hypotheses = found.hypotheses
    assert 1 <= len(hypotheses) <= options["nbest"]
    assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
    assert len({(h.direction, *h.tokens) for h in hypotheses}) == len(hypotheses)
    cut_off = [h for h in hypotheses if h.cut_off]
    assert not cut_off or len(hypotheses) == 1
    for h in [*hypotheses, *found.best.values()]:
        assert len(h.tokens) <= limit
        assert all(token > END for token in h.tokens)
        assert len(h.token_scores) == len(h.tokens) + (not h.cut_off)
        assert all(-50 < score <= 0 for score in h.token_scores)
        expected = sum(h.token_scores) / norm(len(h.token_scores), settings(**options))
        assert h.score == pytest.approx(expected, abs=1e-6)


@families
def test_a_limit_is_a_sentences_own(family: Family) -> None:
    """Of one sentence with several limits in one batch, each finds what it finds alone, and nothing longer."""
    for seed in range(4):
        model, (source,) = toy_model(family.both, seed=seed), toy_sources(seed, 1)
        config = settings(nbest=4, early_stop=seed % 2 == 0)
        limits = [0, 5, 1, 12, 3]
        for limit, found in zip(limits, decode(model, [source] * 5, limits, config), strict=True):
            assert all(len(h.tokens) <= limit for h in [*found.hypotheses, *found.best.values()])
            (alone,) = decode(model, [source], limit, config)
            assert_same(difference(found, alone), lambda n=limit, m=model, s=source, c=config: naive_run(m, s, n, c))
