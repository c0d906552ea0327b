"""The benchmark: complete rows, a readable table, and no comparison of unlike work. Speed itself is not tested."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bothways import bench, bench_training, translator
from bothways.bench import Row, run, table
from bothways.errors import ConfigError
from bothways.models.transformer import Transformer
from bothways.peers import PEERS, Contender, Work
from bothways.tokens import DIRECTIONS, R2L

ROW = Row("bothways", "transformer-l2r", "tiny", "cpu", "float32", 16, 4, 1234.5, 0.031)


def silent(_: str) -> None: ...


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_our_rows_are_complete(precision: str) -> None:
    rows = run("tiny", "cpu", [1, 3], [], [precision], 4, 1, silent)
    assert [(row.system, row.batch) for row in rows] == [(s, b) for b in (1, 3) for s in ("transformer-l2r", "bift")]
    for row in rows:
        assert (row.peer, row.shape, row.device, row.dtype, row.beam) == ("bothways", "tiny", "cpu", precision, 4)
        assert row.sentences_per_second > 0
        assert row.spread == 0  # one repeat


def work() -> Work:
    return Work("tiny", torch.device("cpu"), "float32", 4, 30, 36)


def test_any_of_our_systems_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two passes, both write their 30 tokens, however large the model; the first named is the base of the ratios."""
    names = ["abd-transformer", "transformer-r2l", "bi-rnmt", "abd-rnmt"]
    rows = run("tiny", "cpu", [2], [], ["float32"], 4, 1, silent, names)
    assert [row.system for row in rows] == names
    assert table(rows).splitlines()[1].split()[-1] == "1.00"
    ours, said, real = bench._ours("abd-transformer", work()), [], translator.first_pass

    def watched(*arguments: Any) -> Any:
        memory, found = real(*arguments)
        said.extend(len(one.best[R2L].tokens) for one in found)
        return memory, found

    monkeypatch.setattr(translator, "first_pass", watched)
    assert ours.decode(bench._sources(3), 3) == [30] * 3
    assert said == [29] * 3  # and one more, which stands where an end mark would have to


def test_rerank_does_the_same_work_twice_and_rescores(two_threads: None) -> None:
    """Two models, 30 tokens out of each, the end mark among them; each judges what only the other has found."""
    sources = bench._sources(4)
    one, two = (bench._ours(system, work()) for system in ("transformer-l2r", "rerank"))
    assert two.parameters == 2 * one.parameters
    assert two.decode(sources, 1) == one.decode(sources, 1) == [30] * 4


@pytest.mark.parametrize("beam", [1, 2])
def test_every_precision_and_beam_is_measured(beam: int) -> None:
    rows = run("tiny", "cpu", [2], [], ["float32", "bfloat16"], beam, 1, silent)
    assert [(row.dtype, row.beam) for row in rows] == [(t, beam) for t in ("float32", "bfloat16") for _ in range(2)]


@pytest.mark.parametrize(
    "peer, precision, systems, dtype",
    [
        ("transformers", "float32", {"MarianMT"}, "float32"),
        ("ctranslate2", "float32", {"Transformer 2x1", "Transformer 1x2"}, "float32"),
        ("ctranslate2", "bfloat16", {"Transformer 2x1", "Transformer 1x2"}, "int8"),
    ],
)
def test_peers_stand_beside_ours(two_threads: None, peer: str, precision: str, systems: set[str], dtype: str) -> None:
    pytest.importorskip(peer)
    said: list[str] = []
    rows = run("tiny", "cpu", [2], [peer], [precision], 4, 2, said.append)
    assert {(row.system, row.dtype) for row in rows if row.peer == peer} == {(system, dtype) for system in systems}
    assert said == ["batch 2: warmed up", "batch 2: measured 1 of 2", "batch 2: measured 2 of 2"]


def test_table_shows_speed_and_ratio() -> None:
    lines = table([ROW, replace(ROW, peer="transformers", system="MarianMT", sentences_per_second=617.25)]).splitlines()
    assert lines[1].split() == "bothways transformer-l2r tiny cpu float32 16 4 1,234.50 3% 1.00".split()
    assert lines[2].split() == "transformers MarianMT tiny cpu float32 16 4 617.25 3% 0.50".split()
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_sources_have_25_tokens_on_average(batch: int) -> None:
    lengths = [len(source) for source in bench._sources(batch)]
    assert sum(lengths) / len(lengths) == pytest.approx(25, abs=0.5)
    assert bench._sources(batch) == bench._sources(batch)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"shape": "huge"}, "shape: must be one of tiny, small, base, big, paper, got 'huge'"),
        ({"precisions": ["float32", "int4"]}, "precision: must be one of float32, bfloat16, int8, got 'int4'"),
        ({"peers": ["fairseq9"]}, "against: must be any of .*transformers.*, got 'fairseq9'"),
        ({"batches": [16, 0]}, r"batch and repeats: must be at least 1, got \[16, 0\] and 1"),
        ({"systems": []}, "system: must be any of transformer-l2r, .*, got ''"),
        ({"systems": ["birt"]}, "system: must be any of transformer-l2r, .*, got 'birt'"),
        ({"device": "abacus"}, "device: must be cpu, or cuda on a machine with a GPU, got 'abacus'"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: dict[str, object], message: str) -> None:
    good = {"shape": "tiny", "device": "cpu", "batches": [1], "peers": [], "precisions": ["float32"], "repeats": 1}
    with pytest.raises(ConfigError, match=message):
        run(**{**good, **arguments}, beam=4, say=silent)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "parameters, tokens, message",
    [
        (lambda ours: 2 * ours, 30, "lazy model does not do the same work: it has .* parameters, transformer-l2r has"),
        (lambda ours: ours, 7, "lazy model does not do the same work: it generated 7 to 7 tokens .* instead of 30"),
    ],
)
def test_unlike_work_is_refused(monkeypatch, parameters, tokens: int, message: str) -> None:  # type: ignore[no-untyped-def]
    def lazy(model: Transformer, work: Work) -> list[Contender]:
        ours = model.parameter_count()
        return [Contender("lazy", "model", "int1", parameters(ours), lambda sources, _: [tokens] * len(sources))]

    monkeypatch.setitem(PEERS, "lazy", lazy)
    with pytest.raises(ConfigError, match=message):
        run("tiny", "cpu", [1], ["lazy"], ["float32"], 4, 1, silent)


# -- training ----------------------------------------------------------------------------------------------------------


def test_training_rows_are_complete() -> None:
    rows = bench_training.run("tiny", "cpu", 64, "float32", 2, silent)
    assert [(row.system, row.batch_tokens, row.dtype) for row in rows] == [
        ("transformer-l2r", 64, "float32"),
        ("bift", 64, "float32"),
    ]
    for row in rows:
        assert row.target_tokens_per_second > 0 and row.spread >= 0 and row.memory_gib > 0
        assert 0 < row.share_of_peak < 1.5  # the cores are busy with other things as well
    assert len(bench_training.table(rows).splitlines()) == 3


def test_a_peer_trains_on_the_same_pairs() -> None:
    pytest.importorskip("transformers")
    ours, theirs = bench_training.run("tiny", "cpu", 64, "float32", 1, silent, ["transformer-l2r"], ["transformers"])
    assert (theirs.peer, theirs.system, theirs.batch_tokens) == ("transformers", "MarianMT", ours.batch_tokens)
    assert theirs.target_tokens_per_second > 0


def test_random_text_bears_the_losses_that_training_has() -> None:
    one = bench_training.RandomText(3, DIRECTIONS["l2r"], interaction=False)
    both = bench_training.RandomText(3, DIRECTIONS["both"], interaction=True)
    for text, rows in ((one, 3), (both, 6)):
        batch = text.build(text.rows, 32, 3, False)
        assert len(batch.inputs) == rows
        assert batch.loss_tokens == text.loss_tokens(text.rows)


def test_products_are_counted() -> None:
    """Forward and twice backward: 6 FLOP a weight and token, besides attention's scores."""
    model = bench.random_model("transformer-l2r", "tiny")
    text = bench_training.RandomText(5, DIRECTIONS["l2r"], interaction=False)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)
    products = 6 * 5 * 32 * (matrices + model.output_weight.numel())
    assert products < bench_training._flops(model, text) < 1.2 * products


def test_training_that_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch-tokens and repeats: must be at least 32 and 1, got 31 and 3"):
        bench_training.run("tiny", "cpu", 31, "float32", 3, silent)
    with pytest.raises(ConfigError, match=r"system: must be any of transformer-l2r, .* with --training, got 'rerank'"):
        bench_training.run("tiny", "cpu", 64, "float32", 3, silent, ["rerank"])
    with pytest.raises(ConfigError, match="against: with --training it must be transformers, got 'ctranslate2'"):
        bench_training.run("tiny", "cpu", 64, "float32", 3, silent, peers=["ctranslate2"])
    with pytest.raises(ConfigError, match="precision: int8 is for decoding; accepted for training: float32, bfloat16"):
        bench_training.run("tiny", "cpu", 64, "int8", 3, silent)
