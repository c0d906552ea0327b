"""The leak test: no stream with a loss can see the word it is to predict, through the batches that training reads.

Position i of a stream predicts its gold token i (i = 0 .. n, where token n is the end mark) and reads inputs 0 .. i of
both streams: the tags, and tokens 0 .. i - 1. Token i of l2r is token n - 1 - i of r2l. With gold text on both sides
position i would therefore read its own token i as soon as n - 1 - i <= i - 1, that is 2i >= n. BI-RNMT's printed range
reads one token of the partner less, so there it is 2i >= n + 1.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy import FAMILIES, Family

from bothways.config import parse
from bothways.data.batch import AsynchronousBuilder, Batch, Builder, Decoded, PairBuilder, TripleBuilder
from bothways.data.corpus import Pair, Texts
from bothways.models.interface import Seq2Seq
from bothways.models.table import build, resolve
from bothways.tokens import END, L2R, PAD, R2L, TAG_R2L, Direction, turn
from bothways.train.loss import Objective

V = 19
LENGTHS = [5, 8, 1, 4, 2]
CLOSE = 1e-6
FORMS = [(family, meeting) for family in FAMILIES.values() for meeting in family.meetings]
forms = pytest.mark.parametrize("family, meeting", FORMS, ids=lambda x: x.both if isinstance(x, Family) else str(x))


def texts(rows: list[list[int]]) -> Texts:
    """Texts in memory."""
    return Texts(
        np.array([i for row in rows for i in row], dtype=np.int64), np.cumsum([0, *(len(row) for row in rows)])
    )


@dataclass(frozen=True)
class Corpus:
    """Sources and gold targets, and what a model has decoded from the sources (longer, shorter, empty, cut off)."""

    source: list[list[int]]
    gold: list[list[int]]
    decoded: tuple[list[list[int]], list[list[int]]]
    usable: np.ndarray

    def triples(self, pseudo_loss: float = 0.0) -> TripleBuilder:
        some = {d: texts(self.decoded[d]) for d in (L2R, R2L)}
        usable = {d: self.usable[:, d] for d in (L2R, R2L)}
        decoded = Decoded(Path("decoded"), np.arange(len(self.gold)), some, usable)
        return TripleBuilder(self.pair(), decoded, pseudo_loss, 100)

    def asynchronous(self, decoded: list[list[int]] | None = None) -> AsynchronousBuilder:
        """For a model with two passes; the text that l2r reads can be given."""
        everything = np.ones(len(self.gold), dtype=bool)
        said = Decoded(
            Path("decoded"), np.arange(len(self.gold)), {R2L: texts(decoded or self.decoded[R2L])}, {R2L: everything}
        )
        return AsynchronousBuilder(self.pair(), said, 0.0, 100)

    def pair(self) -> Pair:
        return Pair(texts(self.source), texts(self.gold))

    def with_gold(self, sentence: int, place: int) -> "Corpus":
        """Another token at one place of one gold target, in reading order."""
        gold = [list(row) for row in self.gold]
        gold[sentence][place] = END + 1 + (gold[sentence][place] - END) % (V - END - 1)
        assert gold[sentence][place] != self.gold[sentence][place]
        return replace(self, gold=gold)


def corpus(seed: int) -> Corpus:
    draw = np.random.default_rng(seed)

    def some(lengths: list[int]) -> list[list[int]]:
        return [draw.integers(END + 1, V, n).tolist() for n in lengths]

    usable = np.array([[True, True], [True, False], [True, True], [False, True], [False, False]])
    return Corpus(some([4, 6, 1, 3, 2]), some(LENGTHS), (some([7, 8, 1, 0, 0]), some([3, 11, 4, 6, 0])), usable)


def model_of(family: Family, seed: int, system: str = "", **options: Any) -> Seq2Seq:
    """A model in training, whose futures matter."""
    torch.manual_seed(seed)
    options = {**family.shape, "decoder_layers": 3, "width": 16, "dropout": 0.0, **options}
    model = build(resolve(parse({"system": system or family.both, "data": "-", "model": options})), V, V)
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():  # biases and the like away from zero, so that nothing hides behind them
        for parameter in model.parameters():
            if id(parameter) not in matrices:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.train()  # as in training; there is no dropout


def distributions(model: Seq2Seq, batch: Batch) -> Tensor:
    """What every position predicts, [R, D, T, V]."""
    with torch.no_grad():
        return model(batch.source, batch.inputs).exp()


def streams_with_loss(batch: Batch) -> list[tuple[int, Direction]]:
    """Rows and directions that bear a loss, read off the batch itself."""
    found = np.zeros(batch.inputs.shape[:2], dtype=bool)
    places = np.unravel_index(batch.positions.numpy(), tuple(batch.inputs.shape))
    found[places[0], places[1]] = True
    return [(int(r), Direction(int(d))) for r, d in np.argwhere(found)]


def changes(before: Tensor, after: Tensor) -> bool:
    return not torch.allclose(before, after, rtol=0, atol=CLOSE)


def built(builder: Builder) -> Batch:
    return builder.build(np.arange(len(LENGTHS)), 16, len(LENGTHS), False)


@pytest.mark.parametrize("pseudo_loss", [0.0, 1.0])
@pytest.mark.parametrize("shape", range(2))
@forms
def test_a_prediction_does_not_depend_on_the_word_predicted(
    family: Family, meeting: dict[str, Any], shape: int, pseudo_loss: float
) -> None:
    model, texts = model_of(family, 1, **family.shapes[shape], **meeting), corpus(1)
    batch = built(texts.triples(pseudo_loss))
    before = distributions(model, batch)
    checked, read = 0, 0
    for sentence, n in enumerate(LENGTHS):
        for direction in (L2R, R2L):
            row = 2 * sentence + int(direction)  # the triple whose stream of this direction is gold
            for i in range(n):
                place = i if direction is L2R else n - 1 - i
                changed = built(texts.with_gold(sentence, place).triples(pseudo_loss))
                assert changed.inputs[row, 1 - direction].equal(batch.inputs[row, 1 - direction])  # decoded: held
                after = distributions(model, changed)
                assert not changes(before[row, direction, : i + 1], after[row, direction, : i + 1])
                # The test can fail: from the next position on the word is read.
                read += changes(before[row, direction, i + 1 : n + 1], after[row, direction, i + 1 : n + 1])
                checked += 1
    assert checked == 2 * sum(LENGTHS) and read == checked


@forms
def test_gold_in_both_streams_leaks_exactly_from_the_middle_on(family: Family, meeting: dict[str, Any]) -> None:
    """The batch of pairs in both directions, which no builder hands to a model with interaction."""
    texts = corpus(2)
    batch = built(PairBuilder(texts.pair(), (L2R, R2L)))
    leaking, apart = model_of(family, 2, **meeting), model_of(family, 2, **meeting, interaction=False)
    for model, expected in ((leaking, lambda i, n: 2 * i >= n + family.lag(meeting)), (apart, lambda i, n: False)):
        before = distributions(model, batch)
        for sentence, n in enumerate(LENGTHS):
            for direction in (L2R, R2L):
                for i in range(n):
                    place = i if direction is L2R else n - 1 - i
                    after = distributions(
                        model, built(PairBuilder(texts.with_gold(sentence, place).pair(), (L2R, R2L)))
                    )
                    leaks = changes(before[sentence, direction, i], after[sentence, direction, i])
                    assert leaks == expected(i, n), f"sentence {sentence}, n {n}, {direction.label}, index {i}"


# -- two passes --------------------------------------------------------------------------------------------------------

GOLD_STREAMS = {0: L2R, 2: R2L}  # of a row for two passes


asynchronous = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.asynchronous)


def two_passes(family: Family, seed: int, **options: Any) -> Seq2Seq:
    return model_of(family, seed, family.asynchronous, **options)


def leaks_of_two_passes(model: Seq2Seq, texts: Corpus, copied: bool = False) -> set[tuple[int, int, int]]:
    """Sentence, stream and index of every gold word that its own prediction depends on; `copied`: r2l said gold."""

    def batch_of(some: Corpus) -> Batch:
        return built(some.asynchronous(some.gold if copied else None))

    before, found, read = distributions(model, batch_of(texts)), set(), 0
    for sentence, n in enumerate(LENGTHS):
        for stream, direction in GOLD_STREAMS.items():
            for i in range(n):
                changed = batch_of(texts.with_gold(sentence, i if direction is L2R else n - 1 - i))
                after = distributions(model, changed)
                if changes(before[sentence, stream, : i + 1], after[sentence, stream, : i + 1]):
                    found.add((sentence, stream, i))
                read += changes(before[sentence, stream, i + 1 : n + 1], after[sentence, stream, i + 1 : n + 1])
    assert read == 2 * sum(LENGTHS)  # the test can fail: from the next position on the word is read
    return found


@pytest.mark.parametrize("shape", range(2))
@asynchronous
def test_two_passes_do_not_leak(family: Family, shape: int) -> None:
    assert leaks_of_two_passes(two_passes(family, 7, **family.shapes[shape]), corpus(7)) == set()


@asynchronous
def test_gold_as_the_first_pass_leaks_every_word(family: Family) -> None:
    """All of it is read from the first position on; without interaction it is read by nobody."""
    found = leaks_of_two_passes(two_passes(family, 8), corpus(8), copied=True)
    assert found == {(sentence, 0, i) for sentence, n in enumerate(LENGTHS) for i in range(n)}
    assert leaks_of_two_passes(two_passes(family, 8, interaction=False), corpus(8), copied=True) == set()


def test_only_gold_streams_of_two_passes_bear_a_loss() -> None:
    batch = built(corpus(9).asynchronous())
    places = np.unravel_index(batch.positions.numpy(), tuple(batch.inputs.shape))
    assert set(places[1].tolist()) == set(GOLD_STREAMS)


# -- triples -----------------------------------------------------------------------------------------------------------


@forms
def test_a_decoded_side_that_is_longer_is_read_no_further_than_the_gold_side_goes(
    family: Family, meeting: dict[str, Any]
) -> None:
    """What a longer decoded text holds beyond the gold text is read by nobody; a shorter one leaves tag and tokens."""
    model, texts = model_of(family, 3, **meeting), corpus(3)
    for length in (0, 2, 5, 12):
        rows = ([*texts.decoded[0]], [*texts.decoded[1]])
        rows[1][0] = list(range(5, 5 + length))
        some = replace(texts, decoded=rows)
        batch = built(some.triples())
        read = [TAG_R2L, *rows[1][0][::-1]][: batch.inputs.size(-1)]
        assert batch.inputs[0, R2L, : len(read)].tolist() == read
        assert (batch.inputs[0, R2L, len(read) :] == PAD).all()
        alone = some.triples().build(np.array([0]), 16, 1, False)
        seen = distributions(model, alone)[0, L2R]
        torch.testing.assert_close(distributions(model, batch)[0, L2R, : seen.size(0)], seen, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("pseudo_loss", [0.0, 0.25, 1.0])
def test_streams_and_weights_of_the_triples(pseudo_loss: float) -> None:
    texts = corpus(4)
    batch = built(texts.triples(pseudo_loss))
    T = batch.inputs.size(-1)
    assert batch.inputs.shape == (2 * len(LENGTHS), 2, T)
    expected = {}
    for sentence in range(len(LENGTHS)):
        for gold_direction in (L2R, R2L):
            for d in (L2R, R2L):
                row, is_gold = 2 * sentence + int(gold_direction), d is gold_direction
                tokens = turn(texts.gold[sentence] if is_gold else texts.decoded[d][sentence], d)
                inputs = [d.tag, *tokens]
                assert batch.inputs[row, d].tolist() == (inputs + [PAD] * T)[:T]
                weight = 1.0 if is_gold else pseudo_loss * bool(texts.usable[sentence, d])
                if weight:
                    places = [(row, int(d), i) for i in range(len(tokens) + 1)]
                    expected |= {p: (t, weight) for p, t in zip(places, [*tokens, END], strict=True)}
    places = np.unravel_index(batch.positions.numpy(), tuple(batch.inputs.shape))
    found = dict(
        zip(
            zip(*(axis.tolist() for axis in places), strict=True),
            zip(batch.labels.tolist(), batch.weights.tolist(), strict=True),
            strict=True,
        )
    )
    assert found == expected
    assert batch.loss_tokens == texts.triples(pseudo_loss).loss_tokens(np.arange(len(LENGTHS)))


def test_only_the_gold_stream_of_a_triple_bears_a_loss() -> None:
    assert streams_with_loss(built(corpus(5).triples())) == [(row, Direction(row % 2)) for row in range(10)]


@forms
def test_the_loss_itself_has_no_gradient_across_the_streams_from_a_word_to_its_prediction(
    family: Family, meeting: dict[str, Any]
) -> None:
    """The same by gradients, through Objective and all layers: the loss of position i reaches inputs 0 .. i only."""
    model, texts = model_of(family, 6, **meeting), corpus(6)
    batch = built(texts.triples())
    objective = Objective(model, smoothing=0.1)
    captured: list[Tensor] = []

    def hold(module: torch.nn.Module, arguments: object, output: Tensor) -> None:
        output.retain_grad()
        captured.append(output)

    handle = model.target_embedding.register_forward_hook(hold)
    R, D, T = batch.inputs.shape
    for row, direction in [(0, L2R), (3, R2L), (6, L2R)]:
        for i in range(LENGTHS[row // 2] + 1):
            captured.clear()
            chosen = batch.positions == (row * D + int(direction)) * T + i
            assert chosen.sum() == 1
            loss, _ = objective(replace(batch, weights=batch.weights * chosen))
            loss.backward()
            embedded = [x for x in captured if x.shape[:3] == (R, D, T)][-1]
            assert embedded.grad is not None
            reached = embedded.grad.abs().sum(-1) > 0
            assert reached[row, direction, : i + 1].all() and not reached[row, :, i + 1 :].any()
            others = torch.arange(R) != row
            assert not reached[others].any()
            partner = batch.inputs[row, 1 - direction, : i + 1] != PAD
            partner[i + 1 - family.lag(meeting) :] = False
            assert reached[row, 1 - direction, : i + 1].equal(partner)
    handle.remove()
