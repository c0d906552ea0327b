"""Models as `models.interface` describes them: stepping is teacher forcing, and which parameters a system has."""

from typing import Any

import pytest
import torch
from toy import FAMILIES, Family, decode, difference, pad, same_weights, settings, streams, toy_model, toy_sources

from bothways.config import parse
from bothways.errors import ConfigError
from bothways.models.interface import Seq2Seq
from bothways.models.table import SYSTEMS, build, one_direction, resolve
from bothways.tokens import FIRST_PREDICTED, PAD, TAG_L2R, TAG_R2L
from bothways.train.strategy import without_interaction

FORMS = [(family, meeting) for family in FAMILIES.values() for meeting in family.meetings]
forms = pytest.mark.parametrize("family, meeting", FORMS, ids=lambda x: x.both if isinstance(x, Family) else str(x))
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)

LENGTHS = [[(4, 4), (2, 5), (5, 0), (0, 3)], [(1, 1), (5, 2), (3, 4), (0, 0)]]


def stepwise(model: Seq2Seq, source: torch.Tensor, inputs: torch.Tensor, interaction: bool) -> torch.Tensor:
    """[B, D, T, V]: the same streams, a token at a time, with one hypothesis each."""
    B, D, T = inputs.shape
    with torch.inference_mode():
        state, out = model.start(model.encode(source), D, 1), []
        partners, weights = torch.zeros(B, D, 1, 1, dtype=torch.long), torch.ones(B, D, 1, 1)
        for t in range(T):
            met = (partners, weights) if interaction else ()
            following, state = model.step(inputs[..., t, None], state, *met)
            out.append(following.log_probs().squeeze(2))
    return torch.stack(out, dim=2)


@forms
def test_stepping_is_teacher_forcing(family: Family, meeting: dict[str, Any]) -> None:
    """Both directions, streams of different length: what has ended consumes padding, and is read to its last token."""
    for seed in range(4):
        shape = family.shapes[seed % len(family.shapes)]
        model = toy_model(family.both, seed=seed, **{**shape, **meeting})
        source, inputs = pad(toy_sources(seed, 4), seed % 2), streams(seed, LENGTHS[seed % 2])
        with torch.inference_mode():
            expected = model(source, inputs)
        real = inputs != PAD
        assert (~real).any()
        torch.testing.assert_close(stepwise(model, source, inputs, True)[real], expected[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize("directions", [[0], [1], [0, 1]], ids=["l2r", "r2l", "both"])
@forms
def test_stepping_without_partners_reads_no_future(
    family: Family, meeting: dict[str, Any], directions: list[int]
) -> None:
    """One direction of a model with interaction, or both while no partners are named, is the model without it."""
    for seed in range(3):
        model = toy_model(family.both, seed=seed, **meeting)
        apart = same_weights(model, family.apart, **meeting)
        source, inputs = pad(toy_sources(seed, 4)), streams(seed, LENGTHS[seed % 2])[:, directions]
        real = inputs != PAD
        with torch.inference_mode():
            expected = apart(source, inputs)
            torch.testing.assert_close(stepwise(model, source, inputs, False)[real], expected[real], atol=1e-5, rtol=0)
            torch.testing.assert_close(stepwise(apart, source, inputs, False)[real], expected[real], atol=1e-5, rtol=0)
            torch.testing.assert_close(stepwise(apart, source, inputs, True)[real], expected[real], atol=1e-5, rtol=0)
            if len(directions) == 1:
                torch.testing.assert_close(model(source, inputs)[real], expected[real], atol=1e-5, rtol=0)


@forms
def test_weights_of_zero_read_no_future(family: Family, meeting: dict[str, Any]) -> None:
    """Which is how search says that the other half beam has died."""
    model = toy_model(family.both, seed=1, **meeting)
    apart = same_weights(model, family.apart, **meeting)
    source, inputs = pad(toy_sources(1, 4)), streams(1, [(4, 4)] * 4)
    for P in (1, 2):
        with torch.inference_mode():
            state, expected = model.start(model.encode(source), 2, 2), apart(source, inputs)
            for t in range(inputs.size(-1)):
                tokens = inputs[..., t, None].expand(-1, -1, 2)
                following, state = model.step(
                    tokens, state, torch.zeros(4, 2, 2, P, dtype=torch.long), torch.zeros(4, 2, 2, P)
                )
                for k in range(2):
                    torch.testing.assert_close(following.log_probs()[:, :, k], expected[:, :, t], atol=1e-5, rtol=0)


@forms
def test_several_rows_share_a_source(family: Family, meeting: dict[str, Any]) -> None:
    """R rows over B sources are R rows over their sources repeated."""
    for per_source in (2, 3):
        model = toy_model(family.both, seed=per_source, **meeting)
        source = pad(toy_sources(per_source, 2), 1)
        rows = [((i * 2) % 5, (i * 3) % 4) for i in range(2 * per_source)]
        inputs = streams(per_source, rows)
        with torch.inference_mode():
            found = model(source, inputs)
            expected = model(source.repeat_interleave(per_source, 0), inputs)
        real = inputs != PAD
        torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)
        assert (found[0] - found[per_source])[real[0]].abs().nan_to_num(0).max() > 1e-3, "sources must matter"


@forms
def test_what_lies_ahead_is_not_seen(family: Family, meeting: dict[str, Any]) -> None:
    """Position i sees inputs 0..i of both streams: another token at j changes both from j on, and nothing before."""
    model = toy_model(family.both, seed=3, **meeting)
    source, inputs = pad(toy_sources(3, 1)), streams(3, [(5, 5)])
    with torch.inference_mode():
        before = model(source, inputs)[..., FIRST_PREDICTED:]
        for d in range(2):
            for j in range(1, 6):
                changed = inputs.clone()
                changed[0, d, j] = 4 + (inputs[0, d, j] - 3) % 5
                moved = (model(source, changed)[..., FIRST_PREDICTED:] - before)[0].abs().amax(-1)  # [D, T]
                reached = torch.tensor([j, j + family.lag(meeting)])[[d, 1 - d]]  # from where it is read, per direction
                for stream, first in zip(moved, reached.tolist(), strict=True):
                    assert (stream[:first] < 1e-6).all()
                    assert (stream[first:] > 1e-6).all()


@forms
def test_padding_of_source_and_target_is_not_seen(family: Family, meeting: dict[str, Any]) -> None:
    model = toy_model(family.both, seed=4, **meeting)
    sources, inputs = toy_sources(4, 3), streams(4, [(3, 1), (4, 4), (0, 2)])
    wider = torch.cat([inputs, inputs.new_full((3, 2, 2), PAD)], dim=-1)
    with torch.inference_mode():
        expected = model(pad(sources), inputs)
        torch.testing.assert_close(model(pad(sources, 4), wider)[..., : inputs.size(-1), :], expected)
        alone = model(sources[2][None], inputs[2:, :, :3])
    real = inputs[2, :, :3] != PAD
    torch.testing.assert_close(alone[0][real], expected[2, :, :3][real])


@pytest.mark.parametrize("system", [name for name, system in SYSTEMS.items() if not system.of_runs])
def test_tags_and_padding_are_never_predicted(system: str) -> None:
    """They are masked before the softmax: what is left sums to 1, in training and in steps."""
    model = toy_model(system, seed=5)
    source, inputs = pad(toy_sources(5, 2)), streams(5, [(2, 2), (1, 2)])
    with torch.inference_mode():
        step, _ = model.step(inputs[..., :1], model.start(model.encode(source), 2, 1))
        for log_probs in (model(source, inputs), step.log_probs()):
            assert (log_probs[..., :FIRST_PREDICTED] == -torch.inf).all()
            torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(log_probs.shape[:-1]))
        assert model.half().log_probs(torch.ones(1, model.output_weight.size(1)).half()).dtype is torch.float32


def test_padding_has_no_embedding() -> None:
    model = build(resolve(parse({"system": "bift", "data": "-", "model": FAMILIES["transformer"].shape})), 9, 9)
    assert (model.output_weight[PAD] == 0).all()


# -- parameters --------------------------------------------------------------------------------------------------------


def names(model: Seq2Seq) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("shape", FAMILIES["transformer"].shapes, ids=str)
@pytest.mark.parametrize("fusion", ["tanh", "linear"])
def test_bift_has_exactly_the_transformers_parameters(fusion: str, shape: dict[str, Any]) -> None:
    """And one more per decoder layer if λ is learned."""
    plain = toy_model("transformer-l2r", **shape)
    fixed = toy_model("bift", **shape, fusion=fusion)
    learned = toy_model("bift", **shape, fusion=fusion, future_weight_learned=True)
    assert names(fixed) == names(plain) == names(toy_model("transformer-r2l", **shape))
    assert fixed.parameter_count() == plain.parameter_count()
    assert fixed.interaction_parameters() == set()
    layers = shape.get("decoder_layers", 2)
    assert learned.parameter_count() == plain.parameter_count() + layers
    assert names(learned).keys() - names(plain).keys() == learned.interaction_parameters()
    assert [names(learned)[name] for name in learned.interaction_parameters()] == [torch.Size([])] * layers


def test_a_gate_adds_its_projections() -> None:
    plain, gate = toy_model("transformer-l2r", decoder_layers=3), toy_model("bift", decoder_layers=3, fusion="gate")
    assert names(gate).keys() - names(plain).keys() == gate.interaction_parameters()
    d = 8 // 2
    assert gate.parameter_count() - plain.parameter_count() == 3 * 2 * (2 * d * 2 * d + 2 * d)


@pytest.mark.parametrize("shape", FAMILIES["rnn"].shapes, ids=str)
def test_bi_rnmt_adds_an_attention_and_a_block(shape: dict[str, Any]) -> None:
    """W, U and v of the second attention, and W_c's third block; whatever the range and however many layers."""
    plain, E = toy_model("rnmt-l2r", **shape), 8
    assert names(plain) == names(toy_model("rnmt-r2l", **shape)) == names(toy_model("rnmt-no-interaction", **shape))
    for meeting in FAMILIES["rnn"].meetings:
        both = toy_model("bi-rnmt", **shape, **meeting)
        assert names(both).keys() - names(plain).keys() == both.interaction_parameters()
        assert both.parameter_count() - plain.parameter_count() == 3 * E * E + E


@pytest.mark.parametrize("shape", FAMILIES["rnn"].shapes, ids=str)
def test_abd_rnmt_adds_a_decoder_an_attention_and_a_block(shape: dict[str, Any]) -> None:
    """Embeddings, output layer and encoder are there once."""
    plain, model, E = toy_model("rnmt-l2r", **shape), toy_model("abd-rnmt", **shape), 8
    decoder = {name for name in names(plain) if not name.split(".")[0].startswith(("encoder", "join"))}
    decoder -= {name for name in decoder if "embedding" in name or name.startswith("output.")}
    assert names(model).keys() == {f"first.{name}" for name in names(plain)} | decoder | model.interaction_parameters()
    assert sum(model.get_parameter(name).numel() for name in model.interaction_parameters()) == 3 * E * E + E


@families
def test_without_interaction_there_are_none_of_its_parameters(family: Family) -> None:
    for meeting in family.meetings:
        apart, off = toy_model(family.apart, **meeting), toy_model(family.both, interaction=False, **meeting)
        assert names(off) == names(apart)
        assert apart.interaction_parameters() == off.interaction_parameters() == set()


def test_lambda_starts_at_its_setting() -> None:
    model_options = {**FAMILIES["transformer"].shape, "future_weight": 0.25, "future_weight_learned": True}
    model = build(resolve(parse({"system": "bift", "data": "-", "model": model_options})), 9, 9)
    assert [model.get_parameter(name).item() for name in model.interaction_parameters()] == [0.25, 0.25]


@forms
def test_what_the_interaction_adds_learns(family: Family, meeting: dict[str, Any]) -> None:
    """Whatever the interaction adds gets a gradient."""
    model = toy_model(family.both, seed=6, **meeting)
    source, inputs = pad(toy_sources(6, 1)), streams(6, [(3, 3)])
    model(source, inputs)[0, 0, :, FIRST_PREDICTED].sum().backward()
    for name in model.interaction_parameters():
        gradient = model.get_parameter(name).grad
        assert gradient is not None and gradient.abs().max() > 0


# -- interaction off ---------------------------------------------------------------------------------------------------


@forms
def test_interaction_off_is_the_model_without_interaction(family: Family, meeting: dict[str, Any]) -> None:
    """The same weights, teacher-forced and searched; and the two directions of it are two models."""
    for seed in range(3):
        model = toy_model(family.both, seed=seed, **meeting)
        off = same_weights(model, family.both, interaction=False, **meeting)
        apart = same_weights(model, family.apart, **meeting)
        sources, inputs = toy_sources(seed, 4), streams(seed, LENGTHS[seed % 2])
        with torch.inference_mode():
            expected = apart(pad(sources), inputs)
            assert torch.equal(off(pad(sources), inputs), expected)
            for d, system in enumerate((family.l2r, family.r2l)):
                single = same_weights(model, system)(pad(sources), inputs[:, d : d + 1])
                real = inputs[:, d] != PAD
                torch.testing.assert_close(single[:, 0][real], expected[:, d][real], atol=1e-5, rtol=0)
        config = settings(nbest=4)
        for a, b in zip(*(decode(m, sources, 5, config) for m in (off, apart)), strict=True):
            assert difference(a, b) == ""


@pytest.mark.parametrize("fusion", ["tanh", "linear"])
def test_lambda_of_zero_is_interaction_off(fusion: str) -> None:
    for seed in range(3):
        model = toy_model("bift", seed=seed, fusion=fusion, future_weight=0.0)
        apart = same_weights(model, "no-interaction")
        sources, inputs = toy_sources(seed, 4), streams(seed, LENGTHS[seed % 2])
        real = inputs != PAD
        with torch.inference_mode():
            expected = apart(pad(sources), inputs)
            torch.testing.assert_close(model(pad(sources), inputs)[real], expected[real], atol=1e-5, rtol=0)
        config = settings(nbest=4)
        for a, b in zip(*(decode(m, sources, 5, config) for m in (model, apart)), strict=True):
            assert difference(a, b) == ""


def test_streams_differ_by_their_tag_only() -> None:
    """Without interaction a stream does not know which index of the axis of directions it has."""
    model = toy_model("no-interaction", seed=7)
    source, inputs = pad(toy_sources(7, 2)), streams(7, [(3, 3), (2, 3)])
    with torch.inference_mode():
        torch.testing.assert_close(model(source, inputs.flip(1)).flip(1), model(source, inputs))
    assert inputs[:, :, 0].tolist() == [[TAG_L2R, TAG_R2L]] * 2


# -- the table of systems ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "system, options, message",
    [
        ("birt", {}, r"system: must be one of transformer-l2r, .*bift, .*bi-rnmt, .*, got 'birt'"),
        ("transformer-l2r", {"direction": "r2l"}, r"model\.direction: system transformer-l2r is l2r, got 'r2l'"),
        ("no-interaction", {"interaction": True}, r"model\.interaction: system no-interaction .*, got on; `bift` has"),
        ("rnmt-l2r", {"interaction": True}, r"model\.interaction: system rnmt-l2r has none, got on; `bi-rnmt` has"),
    ],
)
def test_a_system_that_cannot_be(system: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(parse({"system": system, "data": "-", "model": options}))


def test_a_direction_that_a_system_has_not() -> None:
    message = r"search\.direction: system transformer-r2l decodes r2l only, got 'both'"
    with pytest.raises(ConfigError, match=message):
        resolve(parse({"system": "transformer-r2l", "data": "-", "search": {"direction": "both"}}))


def test_shared_embeddings_need_a_joint_vocabulary() -> None:
    config = resolve(parse({"system": "bift", "data": "-", "model": FAMILIES["transformer"].shape}))
    with pytest.raises(ConfigError, match=r"`all` needs a joint vocabulary, .* have 9 and 11 tokens"):
        build(config, 9, 11)


def test_log_probs_are_the_same_with_and_without_gradients() -> None:
    model = toy_model("bift")
    hidden = torch.randn(2, 2, 3, model.config.width)
    expected = model.log_probs(hidden)
    assert expected.requires_grad
    assert (expected[..., :FIRST_PREDICTED] == -torch.inf).all()
    with torch.inference_mode():
        torch.testing.assert_close(model.log_probs(hidden), expected.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("search", [{"rerank": "self"}, {"rerank": "self", "rerank_future": "decoded"}])
def test_stages_rescore_as_they_can(search: dict[str, Any]) -> None:
    """What a recipe asks of its last run is not asked of one direction, nor of a run that reads no future."""
    config = resolve(parse({"system": "bift", "data": "-", "search": search, "strategy": {"name": "two-pass"}}))
    assert config.search.rerank == "self"
    for direction in ("l2r", "r2l"):
        stage = one_direction(config, direction)
        assert (stage.search.direction, stage.search.rerank, stage.search.rerank_future) == (direction, "none", "none")
    first = without_interaction(config)
    assert (first.search.rerank, first.search.rerank_future) == ("self", "none")
