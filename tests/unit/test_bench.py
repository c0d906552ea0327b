"""The benchmark: complete rows, a readable table, and no comparison of unlike work. Speed itself is not tested."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bothways import bench
from bothways.bench import Contender, Row, run, table
from bothways.errors import ConfigError
from bothways.tokens import R2L

ROW = Row("bothways", "transformer-l2r", "tiny", "cpu", "float32", 16, 4, 1234.5, 0.031)


def silent(_: str) -> None: ...


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_our_rows_are_complete(precision: str) -> None:
    rows = run("tiny", "cpu", [1, 3], [], precision, 1, silent)
    assert [(row.system, row.batch) for row in rows] == [(s, b) for b in (1, 3) for s in ("transformer-l2r", "bift")]
    for row in rows:
        assert (row.peer, row.shape, row.device, row.dtype, row.beam) == ("bothways", "tiny", "cpu", precision, 4)
        assert row.sentences_per_second > 0
        assert row.spread == 0  # one repeat


def test_any_of_our_systems_can_be_named() -> None:
    """Of two passes, both write their 30 tokens, however large the model; the first named is the base of the ratios."""
    names = ["abd-transformer", "transformer-r2l", "abd-rnmt"]
    rows = run("tiny", "cpu", [2], [], "float32", 1, silent, names)
    assert [row.system for row in rows] == names
    assert table(rows).splitlines()[1].split()[-1] == "1.00"
    ours = bench._ours("abd-transformer", "tiny", torch.device("cpu"), torch.float32)
    said: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        real = bench.first_pass

        def watched(*arguments: Any) -> Any:
            memory, found = real(*arguments)
            said.extend(len(one.best[R2L].tokens) for one in found)
            return memory, found

        patched.setattr(bench, "first_pass", watched)
        assert ours.decode(bench._sources(3)) == [30] * 3
    assert said == [29] * 3  # and one more, which stands where an end mark would have to


def test_rerank_does_the_same_work_twice_and_rescores() -> None:
    """Two models, 30 tokens out of each, the end mark among them; each judges what only the other has found."""
    place, sources = torch.device("cpu"), bench._sources(2)
    one, two = (bench._ours(system, "tiny", place, torch.float32) for system in ("transformer-l2r", "rerank"))
    assert two.parameters == 2 * one.parameters
    assert two.decode(sources) == one.decode(sources) == [30, 30]


def test_peers_stand_beside_ours() -> None:
    pytest.importorskip("transformers")
    said: list[str] = []
    rows = run("tiny", "cpu", [2], ["transformers"], "float32", 2, said.append)
    assert [(row.peer, row.system) for row in rows][-1] == ("transformers", "MarianMT")
    assert said == ["batch 2: warmed up", "batch 2: measured 1 of 2", "batch 2: measured 2 of 2"]


def test_table_shows_speed_and_ratio() -> None:
    lines = table([ROW, replace(ROW, peer="transformers", system="MarianMT", sentences_per_second=617.25)]).splitlines()
    assert lines[1].split() == "bothways transformer-l2r tiny cpu float32 16 4 1,234.50 3% 1.00".split()
    assert lines[2].split() == "transformers MarianMT tiny cpu float32 16 4 617.25 3% 0.50".split()
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_sources_have_25_tokens_on_average(batch: int) -> None:
    lengths = (bench._sources(batch) != bench.PAD).sum(-1) - 1  # less the end mark
    assert lengths.float().mean().item() == pytest.approx(25, abs=0.5)
    assert torch.equal(bench._sources(batch), bench._sources(batch))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"shape": "huge"}, "shape: must be one of tiny, small, base, big, got 'huge'"),
        ({"precision": "int4"}, "precision: must be one of float32, bfloat16, got 'int4'"),
        ({"peers": ["fairseq9"]}, "against: must be any of .*transformers.*, got 'fairseq9'"),
        ({"batches": [16, 0]}, r"batch and repeats: must be at least 1, got \[16, 0\] and 1"),
        ({"systems": []}, "system: must be any of transformer-l2r, .*, got ''"),
        ({"systems": ["birt"]}, "system: must be any of transformer-l2r, .*, got 'birt'"),
        ({"device": "abacus"}, "device: must be cpu, or cuda on a machine with a GPU, got 'abacus'"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: dict[str, object], message: str) -> None:
    good = {"shape": "tiny", "device": "cpu", "batches": [1], "peers": [], "precision": "float32", "repeats": 1}
    with pytest.raises(ConfigError, match=message):
        run(**{**good, **arguments}, say=silent)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "parameters, tokens, message",
    [
        (lambda ours: 2 * ours, 30, "lazy model does not do the same work: it has .* parameters, transformer-l2r has"),
        (lambda ours: ours, 7, "lazy model does not do the same work: it generated 7 to 7 tokens .* instead of 30"),
    ],
)
def test_unlike_work_is_refused(monkeypatch, parameters, tokens: int, message: str) -> None:  # type: ignore[no-untyped-def]
    def lazy(config, device, dtype) -> Contender:  # type: ignore[no-untyped-def]
        ours = bench._ours("transformer-l2r", "tiny", device, dtype).parameters
        return Contender("lazy", "model", parameters(ours), lambda sources: [tokens] * len(sources))

    monkeypatch.setitem(bench.PEERS, "lazy", lazy)
    with pytest.raises(ConfigError, match=message):
        run("tiny", "cpu", [1], ["lazy"], "float32", 1, silent)
