"""Kernels of a search step against the PyTorch formulas; without a GPU, in Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor
from toy import decode, difference, settings, toy_model, toy_sources

from bothways.nn.attention import attend, join_heads, partner, split_heads
from bothways.nn.layers import Embedding, sinusoids
from bothways.search.beam import Beam, Plan
from bothways.search.hypothesis import partners_of
from bothways.search.recorded import Recorder, changed
from bothways.stepwise import Distribution, largest
from bothways.tokens import DIRECTIONS, END, PAD

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize("step", [0, 1, 16, 40])
@pytest.mark.parametrize(
    "D, K, d, fusion",
    [
        (1, 3, 8, "none"),
        (2, 2, 4, "none"),
        (2, 2, 4, "tanh"),
        (2, 1, 16, "linear"),
        (2, 9, 6, "tanh"),
        (2, 3, 6, "apart"),
    ],
)
def test_chains_are_attention_under_a_mask(step: int, D: int, K: int, d: int, fusion: str) -> None:
    """Ancestors, partners, hypotheses that consumed nothing and halves without a future, all at random."""
    from bothways.kernels.chains import attend_along

    torch.manual_seed(step + D)
    B, H, room = 2, 2, 64
    qkv, keys, values = random(B, D, K, 3 * H * d), random(B, D, H, room, K, d), random(B, D, H, room, K, d)
    slots = torch.arange(K, device=DEVICE)
    ancestors = torch.randint(-1, K, (B, D, K, room), device=DEVICE)
    ancestors[..., 0] = slots
    newest = slots.expand(B, D, K).clone()
    newest[0, 0, -1] = -1 if step else K - 1
    ancestors[..., step] = newest
    partners = torch.randint(K, (B, D, K), device=DEVICE)
    shares = torch.randint(2, (B, D, K), device=DEVICE).float()

    q, k, v = split_heads(qkv, 3, H)
    expected_keys, expected_values = keys.clone(), values.clone()
    expected_keys[:, :, :, step], expected_values[:, :, :, step] = k, v
    all_keys, all_values = (x[:, :, :, : step + 1].flatten(3, 4) for x in (expected_keys, expected_values))
    own = (ancestors[..., : step + 1, None] == slots).flatten(3)
    past = join_heads(attend(q, all_keys, all_values, own[:, :, None]))
    theirs = partner(own).gather(2, partners[..., None].expand_as(own))
    future = join_heads(attend(q, partner(all_keys), partner(all_values), theirs[:, :, None]))
    f = {"none": 0 * future, "apart": 0 * future, "linear": future, "tanh": torch.tanh(future)}[fusion]

    given = () if fusion == "none" else (partners, shares, fusion, torch.tensor(0.7, device=DEVICE))
    found = attend_along(qkv, keys, values, ancestors.short(), torch.tensor(step, device=DEVICE), *given)
    torch.testing.assert_close(found[0], past + torch.where((shares > 0)[..., None], 0.7 * f, 0))
    assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)
    if fusion == "apart":
        reads = (shares > 0)[..., None]
        torch.testing.assert_close(torch.where(reads, found[1], 0), torch.where(reads, future, 0))
    elif fusion == "tanh":
        again = attend_along(
            qkv, keys, values, ancestors.short(), torch.tensor(step, device=DEVICE), partners, shares, "tanh", 0.7
        )
        assert torch.equal(again[0], found[0])


@pytest.mark.parametrize("K", [1, 3, 4])
@pytest.mark.parametrize("steps", [0, 5, 40])
def test_slots_get_their_origins_ancestors(K: int, steps: int) -> None:
    from bothways.kernels.chains import descend

    generator = torch.Generator().manual_seed(K)
    ancestors = torch.randint(-1, K, (2, 2, K, 64), generator=generator, dtype=torch.int16).to(DEVICE)
    origins = torch.randint(K, (2, 2, K), generator=generator).to(DEVICE)
    expected = ancestors.clone()
    expected[..., :steps] = ancestors.gather(2, origins[..., None].expand(-1, -1, -1, 64))[..., :steps]
    descend(ancestors, origins, torch.tensor(steps, device=DEVICE))
    assert torch.equal(ancestors, expected)


@pytest.mark.parametrize("pairing", ["rank", "best"])
def test_partners_are_paired(pairing: str) -> None:
    from bothways.kernels.beam import pair

    scores = torch.tensor([[[-1.0, -2.0, -3.0], [-0.5, -1.5, -torch.inf]], [[0.0, -torch.inf, -torch.inf]] * 2])
    scores = torch.cat([scores, torch.full((1, 2, 3), -torch.inf)]).double().to(DEVICE)
    scores[2, 1, 0] = -4.0
    for found, expected in zip(pair(scores, pairing == "rank"), partners_of(scores, pairing), strict=True):
        assert torch.equal(found.double(), expected.double())


@pytest.mark.parametrize("R", [1, 4, 16, 20])
@pytest.mark.parametrize("S, d", [(1, 4), (31, 64), (32, 20), (70, 8)])
def test_few_queries_of_a_source(R: int, S: int, d: int) -> None:
    from bothways.kernels.sources import attend_to_source

    torch.manual_seed(S)
    B, H = 3, 2
    q, keys, values = random(B, R, H * d), random(B, H, S, d), random(B, H, S, d)
    lengths = torch.tensor([S, 1, max(1, S // 2)], device=DEVICE)
    mask = (torch.arange(S, device=DEVICE) < lengths[:, None])[:, None, None]
    expected = join_heads(attend(split_heads(q, 1, H)[0], keys, values, mask))
    torch.testing.assert_close(attend_to_source(q, keys, values, mask), expected)


@pytest.mark.parametrize("words", [9, 128, 1000, 9000])
@pytest.mark.parametrize("distinct", [10**6, 20, 1], ids=lambda n: f"{n} values")
@pytest.mark.parametrize("count, first", [(1, 3), (4, 4), (8, 3)])
def test_candidates_are_the_largest_of_the_softmax(words: int, distinct: int, count: int, first: int) -> None:
    """Of equal ones the first: a stable sort says which."""
    from bothways.kernels.candidates import largest_normalized

    generator = torch.Generator().manual_seed(words)
    logits = (torch.randint(distinct, (2, 1, 3, words), generator=generator) / distinct * 10).to(DEVICE)
    logits[0, 0, 1, words // 2 + 1 :] = -torch.inf
    masked = logits.clone()
    masked[..., :first] = -torch.inf
    expected, order = torch.log_softmax(masked, -1).sort(dim=-1, descending=True, stable=True)
    values, tokens = largest_normalized(logits, first, count)
    torch.testing.assert_close(values, expected[..., :count])
    possible = values > -torch.inf
    assert torch.equal(tokens[possible], order[..., :count][possible])
    torch.testing.assert_close(values, largest(torch.log_softmax(masked, -1), count)[0])


@pytest.mark.parametrize("words, distinct", [(40, 10**6), (40, 3), (5, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {"beam": 4, "nbest": 2},
        {"beam": 4, "direction": "l2r", "length_penalty": 1.0},
        {"beam": 2, "nbest": 2, "length_penalty": 0.0},
        {"beam": 4, "early_stop": False},
        {"greedy": True},
    ],
    ids=str,
)
def test_bookkeeping_is_what_the_rules_say(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], distinct: int, words: int
) -> None:
    """Step after step, every number of a beam: ties, sentences that finish, directions that may not win."""
    config = settings(**options)
    plan, limits = Plan.of(config, DIRECTIONS[config.direction or "both"]), torch.tensor([1, 3, 5, 5])
    beams = [changed(Beam.start(plan, limits, None, False), lambda x: x.to(DEVICE)) for _ in range(2)]
    for beam in beams:
        beam.may_win[2, 0] = beam.may_win.size(1) == 1
    generator = torch.Generator().manual_seed(words)
    for step in range(6):
        chances = torch.randint(distinct, (*beams[0].tokens.shape, words), generator=generator) / distinct * 5
        chances[..., END] += step / 2
        found = []
        for beam, by_kernels in zip(beams, (False, True), strict=True):
            monkeypatch.setattr("bothways.kernels.usable", lambda _, by_kernels=by_kernels: by_kernels)
            following = Distribution(torch.log_softmax(chances, -1).float().to(DEVICE), is_normalized=True)
            found.append(torch.where(beam.scores > -torch.inf, beam.advance(following), 0))
        expected, beam = beams
        live = expected.scores > -torch.inf
        assert torch.equal(torch.where(live, found[0], 0), torch.where(live, found[1], 0))
        assert torch.equal(beam.tokens, expected.tokens) and torch.equal(beam.scores, expected.scores)
        assert torch.equal(beam.active, expected.active) and torch.equal(beam.last_step, expected.last_step)
        torch.testing.assert_close(beam.done, expected.done, rtol=1e-14, atol=0)
        complete = expected.done > -torch.inf
        for name in ("done_step", "done_slot", "done_log_prob"):
            assert torch.equal(getattr(beam, name)[complete], getattr(expected, name)[complete])
        for mine, theirs in zip(beam.chosen, expected.chosen, strict=True):
            assert torch.equal(mine[:, step][live], theirs[:, step][live])


@pytest.mark.parametrize("E, step", [(8, 0), (8, 7), (512, 1000)])
def test_a_step_begins_with_embeddings_and_slots(E: int, step: int) -> None:
    from bothways.kernels.embedding import embed_step

    torch.manual_seed(step)
    embedding = Embedding(20, E).to(DEVICE)
    tokens = torch.randint(20, (2, 2, 3), device=DEVICE)
    tokens[0, 1, 2] = PAD
    ancestors = torch.full((2, 2, 3, 1024), 7, dtype=torch.int16, device=DEVICE)
    found = embed_step(tokens, embedding.weight.detach(), torch.tensor(step, device=DEVICE), ancestors, PAD)
    expected = embedding(tokens) + sinusoids(torch.tensor(step, device=DEVICE), E, torch.float32)
    torch.testing.assert_close(found, expected.detach(), atol=1e-6, rtol=1e-6)
    slots = torch.arange(3, dtype=torch.int16, device=DEVICE).expand(2, 2, 3)
    assert torch.equal(ancestors[..., step], torch.where(tokens == PAD, -1, slots))
    ancestors[..., step] = 7
    assert (ancestors == 7).all()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the models of this test are on the CPU")
@pytest.mark.parametrize(
    "system, options, pairing",
    [
        ("transformer-l2r", {}, "rank"),
        ("bift", {}, "rank"),
        ("bift", {"fusion": "gate"}, "best"),
        ("bift", {"future_weight_learned": True}, "mix"),
        ("abd-transformer", {}, "rank"),
        ("rnmt-l2r", {}, "rank"),
        ("bi-rnmt", {}, "rank"),
        ("bi-rnmt", {"future_span": "current"}, "best"),
        ("bi-rnmt", {}, "mix"),
        ("abd-rnmt", {}, "rank"),
    ],
)
def test_search_with_kernels_finds_the_same(
    monkeypatch: pytest.MonkeyPatch, system: str, options: dict[str, Any], pairing: str
) -> None:
    model, sources = toy_model(system, seed=3, vocabulary=12, **options), toy_sources(3, 2, vocabulary=12)
    config = settings(beam=4, nbest=2, pairing=pairing, direction="both" if system in ("bift", "bi-rnmt") else "l2r")
    expected = decode(model, sources, 4, config)
    monkeypatch.setattr("bothways.kernels.usable", lambda _: True)
    recorded = decode(model, sources, 4, config, recorder=Recorder(lambda compute, _: compute))
    for some in (recorded, *([] if pairing == "rank" else [decode(model, sources, 4, config)])):
        assert [difference(a, b) for a, b in zip(some, expected, strict=True)] == ["", ""]
