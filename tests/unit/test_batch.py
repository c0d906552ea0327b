"""Batches by hand: what stands where, what bears a loss, and that filling up and splitting change nothing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bothways.config import ModelConfig
from bothways.data.batch import AsynchronousBuilder, Batch, Builder, Decoded, PairBuilder, TripleBuilder
from bothways.data.corpus import Pair, Texts
from bothways.errors import DataError
from bothways.models.asynchronous import AsynchronousTransformer
from bothways.models.transformer import Transformer
from bothways.tokens import END, L2R, PAD, R2L, TAG_L2R, TAG_R2L
from bothways.train.loss import Objective

SOURCE = [[5, 6, 7], [8], [9, 10]]
TARGET = [[11, 12], [13, 14, 15], [16]]


def texts(rows: list[list[int]]) -> Texts:
    return Texts(
        np.array([i for row in rows for i in row], dtype=np.int64), np.cumsum([0, *(len(row) for row in rows)])
    )


def pair() -> Pair:
    return Pair(texts(SOURCE), texts(TARGET))


def triples(pseudo_loss: float = 0.0, max_length: int = 10) -> TripleBuilder:
    """Rows 0 and 2 of the corpus are decoded; the l2r text of row 0 is empty, the r2l text of row 2 too long."""
    return TripleBuilder(pair(), decoded(), pseudo_loss, max_length)


def decoded() -> Decoded:
    some = {L2R: texts([[], [17]]), R2L: texts([[12, 11], [6, 7, 8, 9]])}
    usable = {L2R: np.array([False, True]), R2L: np.array([True, True])}
    return Decoded(Path("decoded"), np.array([0, 2]), some, usable)


def asynchronous(pseudo_loss: float = 0.0, max_length: int = 10) -> AsynchronousBuilder:
    return AsynchronousBuilder(pair(), decoded(), pseudo_loss, max_length)


def built(builder: Builder, rows: list[int], size: int = 0, width: int = 8) -> Batch:
    return builder.build(np.array(rows), width, size or len(rows), bool(size))


def losses(batch: Batch) -> dict[tuple[int, ...], tuple[int, float]]:
    """Row, direction and position of every token with a loss -> the token, its weight."""
    places = np.unravel_index(batch.positions.numpy(), tuple(batch.inputs.shape))
    keys = [tuple(map(int, place)) for place in zip(*places, strict=True)]
    found = [
        (key, (label, weight))
        for key, label, weight in zip(keys, batch.labels.tolist(), batch.weights.tolist(), strict=True)
        if weight
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.parametrize(
    "directions, inputs",
    [
        ((L2R,), [[[TAG_L2R, 11, 12, PAD]], [[TAG_L2R, 13, 14, 15]], [[TAG_L2R, 16, PAD, PAD]]]),
        ((R2L,), [[[TAG_R2L, 12, 11, PAD]], [[TAG_R2L, 15, 14, 13]], [[TAG_R2L, 16, PAD, PAD]]]),
        (
            (L2R, R2L),
            [
                [[TAG_L2R, 11, 12, PAD], [TAG_R2L, 12, 11, PAD]],
                [[TAG_L2R, 13, 14, 15], [TAG_R2L, 15, 14, 13]],
                [[TAG_L2R, 16, PAD, PAD], [TAG_R2L, 16, PAD, PAD]],
            ],
        ),
    ],
)
def test_pairs(directions: tuple, inputs: list) -> None:
    batch = built(PairBuilder(pair(), directions), [0, 1, 2])
    assert batch.source.tolist() == [[5, 6, 7, END], [8, END, PAD, PAD], [9, 10, END, PAD]]
    assert batch.inputs.tolist() == inputs
    expected = {}
    for row, target in enumerate(TARGET):
        for d, direction in enumerate(directions):
            tokens = [*(target if direction is L2R else target[::-1]), END]
            expected |= {(row, d, i): (token, 1.0) for i, token in enumerate(tokens)}
    assert losses(batch) == expected
    assert batch.loss_tokens == len(expected) == PairBuilder(pair(), directions).loss_tokens(np.arange(3))


def test_triples() -> None:
    batch = built(triples(), [2, 0])
    assert batch.source.tolist() == [[9, 10, END, PAD], [5, 6, 7, END]]
    # As wide as the longest gold text: a longer decoded text is cut, in its own order of generation.
    assert batch.inputs.tolist() == [
        [[TAG_L2R, 16, PAD], [TAG_R2L, 9, 8]],
        [[TAG_L2R, 17, PAD], [TAG_R2L, 16, PAD]],
        [[TAG_L2R, 11, 12], [TAG_R2L, 11, 12]],
        [[TAG_L2R, PAD, PAD], [TAG_R2L, 12, 11]],
    ]
    assert losses(batch) == {
        (0, 0, 0): (16, 1), (0, 0, 1): (END, 1),
        (1, 1, 0): (16, 1), (1, 1, 1): (END, 1),
        (2, 0, 0): (11, 1), (2, 0, 1): (12, 1), (2, 0, 2): (END, 1),
        (3, 1, 0): (12, 1), (3, 1, 1): (11, 1), (3, 1, 2): (END, 1),
    }  # fmt: skip


@pytest.mark.parametrize("max_length, long_one_counts", [(10, True), (3, False)])
def test_triples_with_a_loss_on_decoded_text(max_length: int, long_one_counts: bool) -> None:
    """Usable decoded texts count to their end; empty, cut-off and too long ones never do."""
    builder = triples(0.5, max_length)
    batch = built(builder, [2, 0])
    found = {key: value for key, value in losses(batch).items() if value[1] != 1}
    long_one = {(0, 1, i): (token, 0.5) for i, token in enumerate([9, 8, 7, 6, END])} if long_one_counts else {}
    assert found == long_one | {(1, 0, 0): (17, 0.5), (1, 0, 1): (END, 0.5)} | {
        (2, 1, i): (token, 0.5) for i, token in enumerate([11, 12, END])
    }
    assert batch.loss_tokens == builder.loss_tokens(np.array([2, 0]))
    assert sum(builder.loss_tokens(np.array([i])) for i in (0, 2)) == batch.loss_tokens


def test_gold_and_decoded_text_both_as_targets() -> None:
    """The control for distillation: no stream reads another, and unusable text bears no loss."""
    builder = PairBuilder(pair(), (R2L,), None, decoded(), 0.5, 10)
    batch = built(builder, [2, 0])
    assert batch.inputs.tolist() == [
        [[TAG_R2L, 16, PAD, PAD, PAD]],
        [[TAG_R2L, 9, 8, 7, 6]],
        [[TAG_R2L, 12, 11, PAD, PAD]],
        [[TAG_R2L, 11, 12, PAD, PAD]],
    ]
    gold = {(0, 0, i): (token, 1) for i, token in enumerate([16, END])}
    gold |= {(2, 0, i): (token, 1) for i, token in enumerate([12, 11, END])}
    pseudo = {(1, 0, i): (token, 0.5) for i, token in enumerate([9, 8, 7, 6, END])}
    pseudo |= {(3, 0, i): (token, 0.5) for i, token in enumerate([11, 12, END])}
    assert losses(batch) == gold | pseudo
    assert batch.loss_tokens == builder.loss_tokens(np.array([2, 0])) == 5 + 0.5 * 8
    both = PairBuilder(pair(), (L2R, R2L), None, decoded(), 1.0, 10)
    assert not any(row == 3 and d == 0 for row, d, _ in losses(built(both, [2, 0])))  # that one is empty


def test_two_passes_read_all_that_was_decoded() -> None:
    """l2r gold with a loss, r2l decoded without, r2l gold with a loss; as wide as the longest of them."""
    batch = built(asynchronous(), [2, 0])
    assert batch.inputs.tolist() == [
        [[TAG_L2R, 16, PAD, PAD, PAD], [TAG_R2L, 9, 8, 7, 6], [TAG_R2L, 16, PAD, PAD, PAD]],
        [[TAG_L2R, 11, 12, PAD, PAD], [TAG_R2L, 11, 12, PAD, PAD], [TAG_R2L, 12, 11, PAD, PAD]],
    ]
    gold = {(0, 0, i): (token, 1) for i, token in enumerate([16, END])}
    gold |= {(0, 2, i): (token, 1) for i, token in enumerate([16, END])}
    gold |= {(1, 0, i): (token, 1) for i, token in enumerate([11, 12, END])}
    gold |= {(1, 2, i): (token, 1) for i, token in enumerate([12, 11, END])}
    assert losses(batch) == gold
    assert batch.loss_tokens == asynchronous().loss_tokens(np.array([2, 0])) == 10
    learned = built(asynchronous(0.5), [2, 0])
    pseudo = {(0, 1, i): (token, 0.5) for i, token in enumerate([9, 8, 7, 6, END])}
    pseudo |= {(1, 1, i): (token, 0.5) for i, token in enumerate([11, 12, END])}
    assert losses(learned) == gold | pseudo
    assert learned.loss_tokens == asynchronous(0.5).loss_tokens(np.array([2, 0])) == 14


def test_two_passes_read_a_decoded_text_up_to_the_longest_that_is_trained_on() -> None:
    batch = built(asynchronous(0.5, max_length=3), [2])
    assert batch.inputs.tolist() == [[[TAG_L2R, 16, PAD, PAD], [TAG_R2L, 9, 8, 7], [TAG_R2L, 16, PAD, PAD]]]
    assert {d for _, d, _ in losses(batch)} == {0, 2}


def test_rows_that_can_be_trained_on() -> None:
    """By default what was decoded; or a share, of which a part that is not read need not be decoded."""
    assert triples().rows.tolist() == [0, 2]
    assert PairBuilder(pair(), (L2R,)).rows.tolist() == [0, 1, 2]
    some = TripleBuilder(pair(), decoded(), 0.0, 10, np.arange(3))
    assert some.rows.tolist() == [0, 1, 2]
    with pytest.raises(DataError, match="decoded: holds no decoded text of training pair 2; decode all pairs that are"):
        built(some, [0, 1])


BUILDERS = {
    "l2r": lambda: PairBuilder(pair(), (L2R,)),
    "both": lambda: PairBuilder(pair(), (L2R, R2L)),
    "triples": lambda: triples(),
    "pseudo": lambda: triples(0.5),
    "distilled": lambda: PairBuilder(pair(), (L2R,), None, decoded(), 0.5, 10),
    "two passes": lambda: asynchronous(),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_inputs_hold_no_end_mark_and_nothing_after_it(name: str) -> None:
    for size in (0, 4):
        batch = built(BUILDERS[name](), [0, 2], size)
        assert not (batch.inputs == END).any()
        tokens = batch.inputs != PAD
        assert (tokens[..., 1:] <= tokens[..., :-1]).all() and tokens[..., 0].all()  # padding comes last
        tags = (batch.inputs == TAG_L2R) | (batch.inputs == TAG_R2L)
        assert tags[..., 0].all() and not tags[..., 1:].any()
        assert not ((batch.labels == PAD) | (batch.labels == TAG_L2R) | (batch.labels == TAG_R2L)).any()
        assert ((batch.source == END).sum(1) == 1).all()


@pytest.mark.parametrize("name", BUILDERS)
def test_filled_up_batches_have_a_fixed_shape(name: str) -> None:
    builder = BUILDERS[name]()
    shapes = {tuple(tuple(x.shape) for x in vars(built(builder, rows, 4)).values()) for rows in ([0], [2], [0, 2])}
    (shape,) = shapes
    places = {"l2r": 1, "pseudo": 4}.get(name, 2)  # streams that may bear a loss, a source
    assert shape[0] == (4, 8) and shape[2] == shape[3] == shape[4] == (places * 4 * 8,)


def gradients(batch: Batch, interaction: bool) -> tuple[float, float, list[Tensor]]:
    torch.manual_seed(0)
    options = {"encoder_layers": 1, "decoder_layers": 2, "width": 16, "heads": 2, "feed_forward": 32, "dropout": 0.0}
    config = ModelConfig.model_validate({**options, "direction": "both", "interaction": interaction})
    family = AsynchronousTransformer if batch.inputs.size(1) == 3 else Transformer
    objective = Objective(family(config, 20, 20).double(), smoothing=0.1)
    loss, likelihood = objective(batch)
    loss.backward()
    return loss.item(), likelihood.item(), [p.grad for p in objective.parameters() if p.grad is not None]


def assert_same(found: tuple, expected: tuple) -> None:
    assert found[:2] == pytest.approx(expected[:2], rel=1e-10)
    assert len(found[2]) == len(expected[2])
    for a, b in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", BUILDERS)
def test_filled_up_batches_have_the_same_loss_and_gradients(name: str) -> None:
    interaction = name in ("triples", "pseudo", "two passes")
    exact, filled = (built(BUILDERS[name](), [0, 2], size) for size in (0, 5))
    assert filled.loss_tokens == exact.loss_tokens
    assert_same(gradients(filled, interaction), gradients(exact, interaction))


@pytest.mark.parametrize("size", [0, 5])
@pytest.mark.parametrize("name", BUILDERS)
def test_halves_add_up_to_the_whole(name: str, size: int) -> None:
    interaction = name in ("triples", "pseudo", "two passes")
    batch = built(BUILDERS[name](), [2, 0], size)
    halves = batch.halves()
    assert [len(half.source) for half in halves] == [len(batch.source) // 2, -(-len(batch.source) // 2)]
    assert sum(half.loss_tokens for half in halves) == batch.loss_tokens
    parts = [gradients(half, interaction) for half in halves]
    summed = (parts[0][0] + parts[1][0], parts[0][1] + parts[1][1], [sum(g) for g in zip(*(p[2] for p in parts))])  # noqa: B905
    assert_same(summed, gradients(batch, interaction))


def test_a_part_without_weights_has_no_loss_and_no_gradient() -> None:
    """What a process computes that got no pair of an update."""
    batch = built(triples(), [0])
    loss, likelihood, grads = gradients(replace(batch, weights=torch.zeros_like(batch.weights)), True)
    assert loss == likelihood == 0 and all((grad == 0).all() for grad in grads)
