"""Rescoring: whatever is chosen is what forced scores, written out plainly, choose; and no batch changes it."""

from pathlib import Path
from typing import Any

import pytest
from corpus import SOURCES, command, translator_of, write_lines
from torch import Tensor

from bothways import rescoring
from bothways.data.corpus import Prepared
from bothways.errors import BothwaysError
from bothways.models.interface import Memory
from bothways.search.hypothesis import length_norm
from bothways.tokens import L2R, R2L, Direction
from bothways.translator import Translation, Translator

CLOSE = 1e-5
ENDING = 0.35
RESCORED: dict[str, Any] = {"beam": 6, "nbest": 6, "max_length": 12, "rerank": "self"}
BOTH = ["no-interaction", "bift"]


def plainly(translator: Translator, source: str, weight: float, future: str, plain: Translation) -> dict[str, float]:
    """Each text of an n-best list -> its score, from forced scores one by one."""
    alpha, scores = translator.config.length_penalty, {}
    for text in dict.fromkeys(one.text for one in plain.hypotheses):
        (l2r,), (r2l,) = (translator.score([source], [text], d, future) for d in (L2R, R2L))
        norm = float(length_norm(len(l2r.token_scores), alpha))
        scores[text] = ((1 - weight) * sum(l2r.token_scores) + weight * sum(r2l.token_scores)) / norm
    return scores


@pytest.mark.parametrize(
    "system, future, options",
    [
        ("no-interaction", "none", {}),
        ("bift", "none", {"length_penalty": 0.0}),
        ("bift", "none", {"rerank_weight": 0.2, "length_penalty": 1.3}),
        ("bift", "decoded", {}),
        ("bift", "decoded", {"rerank_weight": 0.9, "pairing": "best"}),
        ("bift", "decoded", {"greedy": True, "nbest": 2}),
    ],
)
def test_self_reranking_is_a_weighted_sum_of_forced_scores(
    prepared: Prepared, tmp_path: Path, system: str, future: str, options: dict[str, Any]
) -> None:
    options = {"beam": 6, "nbest": 6, "max_length": 12, "length_penalty": 1.0, **options}
    plain = translator_of(prepared, tmp_path / "run", system, 3, ENDING, **options)
    reranking = {"rerank": "self", "rerank_future": future}
    translator = translator_of(prepared, tmp_path / "run", system, 3, ENDING, **reranking, **options)
    reordered = 0
    for source, before, after in zip(SOURCES, plain.translate(SOURCES), translator.translate(SOURCES), strict=True):
        expected = plainly(plain, source, translator.config.rerank_weight, future, before)
        order = sorted(expected, key=lambda text: -expected[text])
        assert [one.text for one in after.hypotheses] == order
        assert [one.score for one in after.hypotheses] == pytest.approx([expected[text] for text in order], abs=CLOSE)
        first = {one.text: one for one in reversed(before.hypotheses)}
        for one in after.hypotheses:  # otherwise as its search left it, of two that found it the better one's
            assert (one.direction, one.cut_off, one.tokens) == (
                first[one.text].direction,
                first[one.text].cut_off,
                first[one.text].tokens,
            )
            assert one.token_scores == pytest.approx(first[one.text].token_scores, abs=CLOSE)
        assert after.best[after.direction] == after.hypotheses[0]
        for direction in ("l2r", "r2l"):  # the best text that it has found, whoever else has
            mine = [text for text in order if text in {h.text for h in before.hypotheses if h.direction == direction}]
            if mine:
                assert after.best[direction].text == mine[0] and after.best[direction].direction == direction
                assert after.best[direction].score == pytest.approx(expected[mine[0]], abs=CLOSE)
        assert set(after.best) == {"l2r", "r2l"}
        reordered += order != list(expected)
    assert reordered or translator.config.greedy  # else this test would not notice if nothing were rescored


@pytest.mark.parametrize("system, future", [("no-interaction", "none"), ("bift", "none"), ("bift", "decoded")])
def test_a_rescored_sentence_does_not_depend_on_its_batch(
    prepared: Prepared, tmp_path: Path, system: str, future: str
) -> None:
    options: dict[str, Any] = {"rerank": "self", "rerank_future": future, "beam": 6, "nbest": 6}
    together = translator_of(prepared, tmp_path / "run", system, 3, ENDING, **options).translate(SOURCES)
    alone = translator_of(prepared, tmp_path / "run", system, 3, ENDING, batch_sentences=1, **options).translate(
        SOURCES
    )
    for a, b in zip(together, alone, strict=True):
        assert [(one.text, one.direction) for one in a.hypotheses] == [
            (one.text, one.direction) for one in b.hypotheses
        ]
        assert [one.score for one in a.hypotheses] == pytest.approx([one.score for one in b.hypotheses], abs=CLOSE)


@pytest.mark.parametrize("future", ["none", "decoded"])
def test_the_winner_is_of_all_that_the_beam_holds(prepared: Prepared, tmp_path: Path, future: str) -> None:
    """Not only of as many as are handed out, and not of fewer because the search could have stopped."""
    options = {"rerank": "self", "rerank_future": future, "beam": 6, "max_length": 12}
    many = translator_of(prepared, tmp_path / "run", "bift", 3, ENDING, **options, nbest=6, early_stop=False)
    one = translator_of(prepared, tmp_path / "run", "bift", 3, ENDING, **options, nbest=1)
    for a, b in zip(many.translate(SOURCES), one.translate(SOURCES), strict=True):
        assert len(b.hypotheses) == 1
        assert (b.text, b.direction) == (a.text, a.direction)
        assert b.score == pytest.approx(a.score, abs=CLOSE)


def test_forced_beginnings_are_kept(prepared: Prepared, tmp_path: Path) -> None:
    translator = translator_of(prepared, tmp_path / "run", "bift", 3, ENDING, rerank="self")
    prefixes = ["a b", "", "c c", "", "d", "h g f"]
    found = translator.translate(SOURCES, prefixes)
    for prefix, one in zip(prefixes, found, strict=True):
        assert all(h.text.startswith(prefix) for h in one.hypotheses)
    free = translator.translate(SOURCES)
    assert [found[i].text for i in (1, 3)] == [free[i].text for i in (1, 3)]


def test_what_cannot_be_rescored_is_said(prepared: Prepared, tmp_path: Path) -> None:
    with pytest.raises(BothwaysError, match="rerank: `self` needs both directions to decode, got direction l2r"):
        translator_of(prepared, tmp_path / "l2r", "transformer-l2r", rerank="self")
    with pytest.raises(BothwaysError, match="rerank: `self` needs both directions to decode, got direction r2l"):
        translator_of(prepared, tmp_path / "bift", "bift", rerank="self", direction="r2l")
    with pytest.raises(BothwaysError, match="is a no-interaction run, which reads no future; accepted: none"):
        translator_of(prepared, tmp_path / "apart", "no-interaction", rerank="self", rerank_future="decoded")


def test_the_command_line_rescores(prepared: Prepared, tmp_path: Path) -> None:
    options = {"beam": 6, "nbest": 6, "max_length": 12, "rerank": "self", "rerank_future": "decoded"}
    expected = translator_of(prepared, tmp_path / "run", "bift", 3, ENDING, **options).translate(SOURCES)
    sources = write_lines(tmp_path / "sources", SOURCES)
    words = ["--beam", "6", "--nbest", "6", "--search.max_length=12", "--rerank", "self", "--future", "decoded"]
    found = command("decode", tmp_path / "run", "--input", sources, "--device", "cpu", "--quiet", *words)
    lines = [f"{i} ||| {h.text} ||| {h.score:.6f}" for i, one in enumerate(expected) for h in one.hypotheses]
    assert found.stderr == "" and found.stdout.splitlines() == lines


def test_nothing_is_computed_twice(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source is encoded once for search and rescoring; what a search without futures has said is not asked again."""
    translator = translator_of(prepared, tmp_path / "run", "no-interaction", 3, ENDING, beam=6, nbest=6, max_length=12)
    plain = translator.translate(SOURCES)
    judging = translator_of(prepared, tmp_path / "run", "no-interaction", 3, ENDING, **RESCORED)
    encoded: list[int] = []
    forced: list[tuple[Direction, int]] = []
    encode, force_rows = judging.model.encode, rescoring.force_rows  # type: ignore[union-attr]

    def count_encoded(source: Tensor) -> Memory:
        encoded.append(len(source))
        return encode(source)

    def count_forced(*arguments: Any) -> list[list[list[float]]]:
        forced.append((arguments[3], sum(map(len, arguments[2]))))
        return force_rows(*arguments)

    monkeypatch.setattr(judging.model, "encode", count_encoded)
    monkeypatch.setattr(rescoring, "force_rows", count_forced)
    judging.translate(SOURCES)
    assert encoded == [len(SOURCES)]
    expected = {
        d: sum(
            len({h.text for h in one.hypotheses}) - len({h.text for h in one.hypotheses if h.direction == d.label})
            for one in plain
            if not one.hypotheses[0].cut_off
        )
        for d in (L2R, R2L)
    }
    assert dict(forced) == expected and 0 < sum(expected.values()) < 2 * sum(len(one.hypotheses) for one in plain)
