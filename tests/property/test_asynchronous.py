"""What is true of every model with two passes: the second is a model of its own that reads what the first has said."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from toy import (
    FAMILIES,
    Family,
    Naive,
    assert_same,
    difference,
    naive_over,
    naive_run,
    pad,
    settings,
    streams,
    toy_model,
    toy_sources,
    trace_difference,
)

from bothways.config import SearchConfig, parse
from bothways.models.interface import Lattice, Seq2Seq, TwoPass, TwoPassMemory
from bothways.models.table import build, resolve
from bothways.search.exhaustive import lattice
from bothways.search.hypothesis import Found, TraceStep
from bothways.tokens import END, FIRST_PREDICTED, L2R, PAD, R2L
from bothways.translator import decode, decoded_futures, force, max_length

ASYNCHRONOUS = [family for family in FAMILIES.values() if family.asynchronous]
families = pytest.mark.parametrize("family", ASYNCHRONOUS, ids=lambda family: family.asynchronous)
LENGTHS = [[(4, 4), (2, 5), (5, 0), (0, 3)], [(1, 1), (5, 2), (3, 4), (0, 0)]]
CPU = torch.device("cpu")


def two_pass(family: Family, seed: int, **options: Any) -> TwoPass:
    model = toy_model(family.asynchronous, seed, **{**family.shapes[seed % len(family.shapes)], **options})
    assert isinstance(model, TwoPass)
    return model


def memory_of(model: TwoPass, source: torch.Tensor, said: torch.Tensor) -> TwoPassMemory:
    """Sources [B, S], informed of r2l tokens [B, T]."""
    return model.informed(model.encode(source), said)


def searched(model: Seq2Seq, sources: Sequence[torch.Tensor], config: SearchConfig) -> list[Found]:
    """Both passes, as the translator runs them; sources in toy form, each with its end mark."""
    found = decode(model, [source[:-1].tolist() for source in sources], (L2R,), config, CPU, trace=True)
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


# -- the model -------------------------------------------------------------------------------------------------------


def stepwise(model: Seq2Seq, memory: Any, inputs: torch.Tensor) -> torch.Tensor:
    """[B, D, T, V]: the same streams, a token at a time."""
    state, out = model.start(memory, inputs.size(1), 1), []
    for t in range(inputs.size(-1)):
        following, state = model.step(inputs[..., t, None], state)
        out.append(following.log_probs().squeeze(2))
    return torch.stack(out, dim=2)


@families
def test_stepping_is_teacher_forcing(family: Family) -> None:
    """Both passes: an l2r stream under what the memory was informed of, and the r2l stream on the same memory."""
    for seed in range(6):
        model = two_pass(family, seed)
        source, inputs = pad(toy_sources(seed, 4), seed % 2), streams(seed, LENGTHS[seed % 2])
        with torch.inference_mode():
            expected = model(source, inputs)
            memory = memory_of(model, source, inputs[:, 1])
            passes = ((model, memory), (model.first, memory.first))
            found = [stepwise(one, read, inputs[:, d : d + 1]) for d, (one, read) in enumerate(passes)]
            forced = model.log_probs(model.hidden(memory, inputs[:, :1]))
        real = inputs != PAD
        torch.testing.assert_close(torch.cat(found, dim=1)[real], expected[real], atol=1e-5, rtol=0)
        torch.testing.assert_close(forced[:, 0][real[:, 0]], expected[:, 0][real[:, 0]], atol=1e-5, rtol=0)


@families
def test_every_position_reads_all_that_was_said_and_nobody_reads_ahead(family: Family) -> None:
    """Another token anywhere in the second stream changes l2r everywhere; one in the third changes nothing of it."""
    model = two_pass(family, 3)
    source = pad(toy_sources(3, 1))
    inputs = torch.cat([streams(3, [(5, 5)]), streams(4, [(0, 5)])[:, 1:]], dim=1)
    with torch.inference_mode():
        before = model(source, inputs)[..., FIRST_PREDICTED:]
        for stream in range(3):
            for j in range(1, 6):
                changed = inputs.clone()
                changed[0, stream, j] = 4 + (inputs[0, stream, j] - 3) % 5
                moved = (model(source, changed)[..., FIRST_PREDICTED:] - before)[0].abs().amax(-1) > 1e-6  # [D, T]
                assert moved[stream].tolist() == [t >= j for t in range(6)]
                assert moved[0].all() if stream == 1 else moved.any(1).sum() == 1


@families
def test_padding_is_not_seen(family: Family) -> None:
    model = two_pass(family, 4)
    sources, inputs = toy_sources(4, 3), streams(4, [(3, 1), (4, 4), (0, 2)])
    wider = torch.cat([inputs, inputs.new_full((3, 2, 2), PAD)], dim=-1)
    with torch.inference_mode():
        expected = model(pad(sources), inputs)
        found = model(pad(sources, 4), wider)[..., : inputs.size(-1), :]
        torch.testing.assert_close(found[inputs != PAD], expected[inputs != PAD])


@families
def test_bypassed_it_is_a_plain_l2r_model_with_the_same_weights(family: Family) -> None:
    """Without interaction, and where the memory was informed of nothing: teacher-forced and searched."""
    for seed in range(6):
        model = two_pass(family, seed)
        shape = family.shapes[seed % len(family.shapes)]
        off, plain = two_pass(family, seed, interaction=False), toy_model(family.l2r, **shape)
        own = model.state_dict()
        off.load_state_dict({name: own[name] for name in off.state_dict()})
        kept = {name: own[name if name in own else f"first.{name}"] for name in plain.state_dict()}
        plain.load_state_dict(kept)
        assert any(name in own and not torch.equal(own[name], own[f"first.{name}"]) for name in kept)
        sources, inputs = toy_sources(seed, 4), streams(seed, LENGTHS[seed % 2])
        with torch.inference_mode():
            expected = plain(pad(sources), inputs[:, :1])
            assert torch.equal(off(pad(sources), inputs)[:, :1], expected)
            assert torch.equal(model(pad(sources), inputs[:, :1]), expected)
        config = settings(direction="l2r", beam=4, nbest=4, max_length=5)
        for a, b in zip(searched(off, sources, config), searched(plain, sources, config), strict=True):
            assert (a.hypotheses, a.trace, a.best[L2R]) == (b.hypotheses, b.trace, b.best[L2R])
            assert b.best.keys() == {L2R} and a.best.keys() == {L2R, R2L}


@families
def test_several_rows_share_a_source(family: Family) -> None:
    model = two_pass(family, 2)
    source, inputs = pad(toy_sources(2, 2), 1), streams(2, [((i * 2) % 5, (i * 3) % 4) for i in range(4)])
    with torch.inference_mode():
        expected = model(source.repeat_interleave(2, 0), inputs)
        torch.testing.assert_close(model(source, inputs)[inputs != PAD], expected[inputs != PAD], atol=1e-5, rtol=0)


@families
def test_what_the_interaction_adds_learns_and_is_all_that_it_adds(family: Family) -> None:
    model, off = two_pass(family, 1), two_pass(family, 1, interaction=False)
    added = {name for name, _ in model.named_parameters()} - {name for name, _ in off.named_parameters()}
    assert model.interaction_parameters() == added and off.interaction_parameters() == set()
    model(pad(toy_sources(6, 2)), streams(6, [(3, 3), (2, 4)]))[:, 0, :, FIRST_PREDICTED].sum().backward()
    for name, parameter in model.named_parameters():  # the loss of l2r reaches the r2l decoder too
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    "single, system, preset, millions, ratio",
    [
        ("transformer-l2r", "abd-transformer", "big", 207.8, 1.60),
        ("rnmt-l2r", "abd-rnmt", "paper", 86.0, 1.38),
    ],
)
def test_size_at_the_papers_shape(single: str, system: str, preset: str, millions: float, ratio: float) -> None:
    """With 30,000 words; for Transformers the paper has 207.8 and 333.8 million numbers."""

    def size(name: str) -> int:
        with torch.device("meta"):
            config = resolve(parse({"system": name, "data": "-", "model": {"preset": preset}}))
            return build(config, 30_000, 30_000).parameter_count()

    assert size(single) == pytest.approx(millions * 1e6, rel=0.01)
    assert size(system) / size(single) == pytest.approx(ratio, abs=0.01)


# -- the search ------------------------------------------------------------------------------------------------------


def naive_both(model: TwoPass, source: torch.Tensor, config: SearchConfig) -> tuple[Naive, Naive]:
    """Both passes by the naive search, in float64, without cache or batch."""
    limit = max_length(config, len(source) - 1)
    first = naive_run(model.first, source, limit, config.model_copy(update={"direction": "r2l", "nbest": 1}))
    precise = model.double()
    said = torch.tensor([[R2L.tag, *first.found.best[R2L].tokens]])

    def distributions(steps: Sequence[TraceStep]) -> list[list[list[float]]]:
        with torch.inference_mode():
            rows = precise.replay(memory_of(precise, source[None], said), Lattice(*lattice(steps)))
        return rows[:, -len(steps[-1].tokens[0]) :].tolist()  # type: ignore[no-any-return]

    return first, naive_over(distributions, limit, config)


CONFIGS = [
    settings(direction="l2r", beam=4, nbest=4, max_length_offset=4),
    settings(direction="l2r", beam=3, nbest=1, max_length=3, length_penalty=0.0),
    settings(direction="l2r", beam=1, max_length_factor=2.0, max_length_offset=0, early_stop=False),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"beam {config.beam}")
@families
def test_search_finds_what_the_naive_one_finds(family: Family, config: SearchConfig) -> None:
    changed = 0
    for seed in range(6):
        model, sources = two_pass(family, seed), toy_sources(seed, 3)
        found = searched(model, sources, config)
        with torch.inference_mode():
            silent = searched(two_pass(family, seed, interaction=False), sources, config)
        for source, one, other in zip(sources, found, silent, strict=True):
            first, second = naive_both(two_pass(family, seed), source, config)
            assert set(one.best) == {L2R, R2L} and {h.direction for h in one.hypotheses} == {L2R}
            said = difference(Found([], {R2L: one.best[R2L]}), Found([], {R2L: first.found.best[R2L]}))
            assert_same(said, lambda run=first: run)
            if one.best[R2L].tokens == first.found.best[R2L].tokens:
                own = Found(one.hypotheses, {L2R: one.best[L2R]}, one.trace)
                said = difference(own, second.found) or trace_difference(own, second.found, config)
                assert_same(said, lambda run=second: run)
            changed += one.hypotheses[0].tokens != other.hypotheses[0].tokens
    assert changed > 3, "what the first pass says must matter"


@pytest.mark.parametrize("greedy", [False, True])
@families
def test_a_result_does_not_depend_on_its_batch(family: Family, greedy: bool) -> None:
    """Neither pass: sentences alone, all together, turned round, and few at a time."""
    config = settings(direction="l2r", beam=4, nbest=2, greedy=greedy, max_length_offset=4)
    for seed in range(6):
        model, sources = two_pass(family, seed), toy_sources(seed, 6)
        alone = [searched(model, [source], config)[0] for source in sources]
        small = config.model_copy(update={"batch_sentences": 2})
        for found in (
            searched(model, sources, config),
            searched(model, sources[::-1], config)[::-1],
            searched(model, sources, small),
        ):
            for source, a, b in zip(sources, found, alone, strict=True):
                said = difference(a, b)
                if greedy:
                    assert said == ""
                else:
                    assert_same(said, lambda s=source, seed=seed: closer(naive_both(two_pass(family, seed), s, config)))


def closer(runs: tuple[Naive, Naive]) -> Naive:
    return min(runs, key=lambda run: run.closest)


@families
def test_the_first_pass_says_its_best_hypothesis_and_an_empty_one_is_its_tag(family: Family) -> None:
    """It is the r2l model's own search; where nothing but an end mark wins, its tag is read."""
    config = settings(direction="l2r", beam=4, nbest=3, max_length=4)
    empty = 0
    for seed in range(6):
        model, sources = two_pass(family, seed), toy_sources(seed, 6)
        if seed == 5:
            with torch.no_grad():
                model.output_weight[END] *= 4  # which wins by a wide margin wherever it is likely at all
        ids = [source[:-1].tolist() for source in sources]
        alone = dict(decode(model.first, ids, (R2L,), config.model_copy(update={"nbest": 1}), CPU))
        for i, one in enumerate(searched(model, sources, config)):
            assert difference(Found([], {R2L: one.best[R2L]}), Found([], {R2L: alone[i].best[R2L]})) == ""
            empty += not one.best[R2L].tokens
        said = [alone[i].best[R2L].tokens for i in range(len(ids))]
        assert decoded_futures(model, ids, R2L, config, CPU) == said
    assert empty


@families
def test_forced_scores_are_those_that_search_gave(family: Family) -> None:
    """Under what the first pass has said, all of it, however short the target."""
    config = settings(direction="l2r", beam=4, nbest=4, max_length_offset=4)
    compared = longer = 0
    for seed in range(4):
        model, sources = two_pass(family, seed), toy_sources(seed, 4)
        for source, one in zip(sources, searched(model, sources, config), strict=True):
            said = one.best[R2L].tokens
            for hypothesis in (h for h in one.hypotheses if not h.cut_off):
                (forced,) = force(model, [source[:-1].tolist()], [hypothesis.tokens], L2R, [said], CPU)
                assert forced == pytest.approx(hypothesis.token_scores, abs=1e-5)
                compared, longer = compared + 1, longer + (len(said) > len(hypothesis.tokens) + 1)
    assert compared > 10 and longer


@families
def test_forced_beginnings_are_kept(family: Family) -> None:
    config = settings(direction="l2r", beam=4, nbest=2, max_length=4)
    for seed in range(3):
        model, sources = two_pass(family, seed), [source[:-1].tolist() for source in toy_sources(seed, 2)]
        free = dict(decode(model, sources, (L2R,), config, CPU))
        forced = dict(decode(model, sources, (L2R,), config, CPU, {L2R: [[5, 7], []]}))
        assert all(h.tokens[:2] == [5, 7] for h in forced[0].hypotheses)
        assert difference(forced[1], free[1]) == ""
        assert difference(Found([], {R2L: forced[0].best[R2L]}), Found([], {R2L: free[0].best[R2L]})) == ""
