"""Forced scores: what a model gives a text it is told to say, in one direction, under a stated future."""

from itertools import product
from pathlib import Path

import pytest
import torch
from corpus import SOURCES, translator_of
from torch import Tensor
from toy import FAMILIES, family_of

from bothways.data.corpus import Prepared
from bothways.errors import BothwaysError
from bothways.models.interface import Memory
from bothways.search.hypothesis import length_norm
from bothways.tokens import DIRECTIONS, END, L2R, R2L, Direction, turn
from bothways.translator import Translator, decode, decoded_futures

CLOSE = 1e-5
FORCED = [(f.l2r, f.r2l, f.apart, f.both) for f in FAMILIES.values()]
SYSTEMS = [system for systems in FORCED for system in systems]
APART = [system for systems in FORCED for system in systems[:3]]
BOTH = [systems[3] for systems in FORCED]
TARGETS = ["b a d", "c c c c c", "h", "", "a b c d e f g h a", "g"]


def by_hand(
    translator: Translator, source: str, target: list[int], direction: Direction, future: list[int] | None
) -> list[float]:
    """One sentence, one position at a time, from the model's distributions. Texts in generation order."""
    run = translator.run
    sources = torch.tensor([[*run.source_vocabulary.encode(source), END]])
    scores = []
    for i, token in enumerate([*target, END]):
        own = [direction.tag, *target][: i + 1]
        streams = {direction: own}
        if future is not None:
            other = Direction(1 - direction)
            streams[other] = ([other.tag, *future] + [0] * len(own))[: len(own)]
        inputs = torch.tensor([[streams[d] for d in sorted(streams)]])
        with torch.no_grad():
            log_probs = translator.model(sources, inputs)
        scores.append(log_probs[0, sorted(streams).index(direction), i, token].item())
    return scores


def encoded(translator: Translator, texts: list[str], direction: Direction) -> list[list[int]]:
    return [turn(ids, direction) for ids in translator.run.target_vocabulary.encode_batch(texts)]


@pytest.mark.parametrize("system", SYSTEMS)
def test_without_a_future_it_is_the_sum_of_teacher_forced_log_probabilities(
    prepared: Prepared, tmp_path: Path, system: str
) -> None:
    translator = translator_of(prepared, tmp_path / "run", system, length_penalty=0.6)
    for direction in translator.directions:
        found = translator.score(SOURCES, TARGETS, direction)
        for source, target, one in zip(SOURCES, encoded(translator, TARGETS, direction), found, strict=True):
            expected = by_hand(translator, source, target, direction, None)
            generated = one.token_scores[:: 1 if direction is L2R else -1]
            assert generated == pytest.approx(expected, abs=CLOSE)
            norm = float(length_norm(len(target) + 1, 0.6))
            assert one.score == pytest.approx(sum(expected) / norm, abs=CLOSE)
            assert one.direction == direction.label and not one.cut_off
            assert one.tokens[-1 if direction is L2R else 0] == "</s>"
        assert [one.text for one in found] == TARGETS


@pytest.mark.parametrize("direction", [L2R, R2L])
@pytest.mark.parametrize("system", BOTH)
def test_under_a_given_future(prepared: Prepared, tmp_path: Path, system: str, direction: Direction) -> None:
    translator = translator_of(prepared, tmp_path / "run", system)
    futures = ["a", "b c d e f g h", "", "c", "d d d", "e f"]
    found = translator.score(SOURCES, TARGETS, direction, futures)
    others = encoded(translator, futures, Direction(1 - direction))
    plain = translator.score(SOURCES, TARGETS, direction)
    for i, target in enumerate(encoded(translator, TARGETS, direction)):
        expected = by_hand(translator, SOURCES[i], target, direction, others[i])
        assert found[i].token_scores[:: 1 if direction is L2R else -1] == pytest.approx(expected, abs=CLOSE)
        if len(target) >= family_of(system).lag({}):  # as the paper prints it, the first token has no future
            assert abs(found[i].score - plain[i].score) > 1e-4  # the future matters


@pytest.mark.parametrize("direction", [L2R, R2L])
@pytest.mark.parametrize("system", BOTH)
def test_the_decoded_future_is_the_other_directions_best(
    prepared: Prepared, tmp_path: Path, system: str, direction: Direction
) -> None:
    translator = translator_of(prepared, tmp_path / "run", system, seed=6, length_penalty=0.0)
    other = Direction(1 - direction)
    decoded = [one.best[other.label].text for one in translator.translate(SOURCES)]
    assert len(set(decoded)) > 1
    found = translator.score(SOURCES, TARGETS, direction, "decoded")
    expected = translator.score(SOURCES, TARGETS, direction, decoded)
    assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=CLOSE)
    own = [one.best[direction.label].text for one in translator.translate(SOURCES)]
    wrong = translator.score(SOURCES, TARGETS, direction, own)
    assert [one.score for one in found] != pytest.approx([one.score for one in wrong], abs=1e-3)


@pytest.mark.parametrize("system, future", [*product(SYSTEMS, ["none"]), *product(BOTH, ["decoded"])])
def test_a_score_does_not_depend_on_its_batch(prepared: Prepared, tmp_path: Path, system: str, future: str) -> None:
    translator = translator_of(prepared, tmp_path / "run", system, seed=3)
    for direction in translator.directions:
        together = translator.score(SOURCES, TARGETS, direction, future)
        order = [3, 0, 5, 1, 4, 2]
        other = translator.score([SOURCES[i] for i in order], [TARGETS[i] for i in order], direction, future)
        for place, i in enumerate(order):
            (alone,) = translator.score([SOURCES[i]], [TARGETS[i]], direction, future)
            for one in (alone, other[place]):
                assert one.tokens == together[i].tokens
                assert one.token_scores == pytest.approx(together[i].token_scores, abs=CLOSE)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.3])
@pytest.mark.parametrize("system", APART)
def test_forcing_what_search_found_gives_the_score_that_search_gave(
    prepared: Prepared, tmp_path: Path, system: str, length_penalty: float
) -> None:
    compared = 0
    for seed in (4, 9):
        translator = translator_of(prepared, tmp_path / f"{seed}", system, seed=seed, length_penalty=length_penalty)
        for source, result in zip(SOURCES, translator.translate(SOURCES), strict=True):
            for hypothesis in result.hypotheses:
                if hypothesis.cut_off:
                    continue
                direction = next(d for d in DIRECTIONS["both"] if d.label == hypothesis.direction)
                (forced,) = translator.score([source], [hypothesis.text], direction)
                assert forced.tokens == hypothesis.tokens
                assert forced.token_scores == pytest.approx(hypothesis.token_scores, abs=CLOSE)
                assert forced.score == pytest.approx(hypothesis.score, abs=CLOSE)
                compared += 1
    assert compared >= 5


def test_a_model_that_reads_no_future_says_so(prepared: Prepared, tmp_path: Path) -> None:
    translator = translator_of(prepared, tmp_path / "run", "no-interaction")
    for future in ("decoded", TARGETS):
        with pytest.raises(BothwaysError, match="is a no-interaction run, which reads no future; accepted: none"):
            translator.score(SOURCES, TARGETS, L2R, future)
    with pytest.raises(BothwaysError, match="the future must be none, decoded, or a list of texts, got 'gold'"):
        translator_of(prepared, tmp_path / "bift", "bift").score(SOURCES, TARGETS, L2R, "gold")
    with pytest.raises(BothwaysError, match="there are 6 sources but 5 targets"):
        translator.score(SOURCES, TARGETS[1:], L2R)
    with pytest.raises(BothwaysError, match="there are 6 sources but 7 futures"):
        translator.score(SOURCES, TARGETS, L2R, [*TARGETS, "a"])


def test_a_forced_neighbour_changes_no_sentence(prepared: Prepared, tmp_path: Path) -> None:
    """The maximum length is a sentence's own, however long the beginnings that its neighbours are given."""
    translator = translator_of(prepared, tmp_path / "run", "no-interaction", max_length=3, batch_sentences=64)
    alone = [translator.translate([source])[0].text for source in SOURCES]
    prefixes = ["" if i else "a b c d e f g h a b c d" for i in range(len(SOURCES))]
    together = [result.text for result in translator.translate(SOURCES, prefixes)]
    assert together[1:] == alone[1:]
    assert together[0].startswith(prefixes[0])


@pytest.mark.parametrize("system", BOTH)
def test_decoded_futures_are_the_best_complete_ones(prepared: Prepared, tmp_path: Path, system: str) -> None:
    """Also of a direction that loses: nothing of it is left out because the other won early."""
    stopped_early = 0
    for seed in (1, 18, 19, 20):
        translator = translator_of(prepared, tmp_path / f"run-{seed}", system, seed=seed, max_length=6, nbest=1)
        sources = [translator.run.source_vocabulary.encode(source) for source in SOURCES]
        early = dict(decode(translator.model, sources, (L2R, R2L), translator.config, translator.device))
        full = translator.config.model_copy(update={"early_stop": False})
        whole = dict(decode(translator.model, sources, (L2R, R2L), full, translator.device))
        for direction in (L2R, R2L):
            found = decoded_futures(translator.model, sources, direction, translator.config, translator.device)
            assert found == [whole[i].best[direction].tokens for i in range(len(sources))]
            stopped_early += found != [early[i].best[direction].tokens for i in range(len(sources))]
    assert stopped_early, "the test would be empty if stopping early never left anything out"


def test_an_empty_line_stays_empty_whatever_is_forced_on_it(prepared: Prepared, tmp_path: Path) -> None:
    """It is not decoded, and the others keep their own beginnings and endings."""
    translator = translator_of(prepared, tmp_path / "run", "no-interaction", max_length=3)
    lines, prefixes = ["a b", " ", "c", ""], ["d", "e", "f", ""]
    results = translator.translate(lines, prefixes, allow_empty=True)
    assert [result.source for result in results] == lines
    assert [bool(result.hypotheses) for result in results] == [True, False, True, False]
    assert [result.text for result in results] == [
        translator.translate(["a b"], ["d"])[0].text, "", translator.translate(["c"], ["f"])[0].text, ""
    ]  # fmt: skip
    assert results[0].text.startswith("d") and results[2].text.startswith("f")
    assert (results[1].tokens, results[1].token_scores) == ([], [])
    best = results[0].hypotheses[0]
    assert (results[0].tokens, results[0].token_scores) == (best.tokens, best.token_scores)


def test_a_direction_that_a_run_has_not_is_not_scored(prepared: Prepared, tmp_path: Path) -> None:
    translator = translator_of(prepared, tmp_path / "run", "transformer-l2r")
    with pytest.raises(BothwaysError, match="is a transformer-l2r run and scores l2r only, got r2l"):
        translator.score(["a b"], ["c"], R2L)


def test_one_text_alone_is_not_a_list(prepared: Prepared, tmp_path: Path) -> None:
    """Its letters would be translated one by one."""
    translator = translator_of(prepared, tmp_path / "run", "transformer-l2r")
    with pytest.raises(BothwaysError, match="translate takes a list of texts, got the text 'a b'; put it in brackets"):
        translator.translate("a b")


def test_when_memory_runs_out_a_batch_is_halved(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to one sentence, with the same results; a sentence that does not fit alone is said."""
    translator = translator_of(prepared, tmp_path / "run", "bift", rerank="self")
    expected = [one.text for one in translator.translate(SOURCES)]
    encode, most, sizes = translator.model.encode, 1, []  # type: ignore[union-attr]

    def refuse(source: Tensor) -> Memory:
        sizes.append(len(source))
        if len(source) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return encode(source)

    monkeypatch.setattr(translator.model, "encode", refuse)
    assert [one.text for one in translator.translate(SOURCES)] == expected
    assert sizes == [6, 3, 1, 2, 1, 1, 3, 1, 2, 1, 1]
    most = 0
    with pytest.raises(BothwaysError, match=r"out of memory with one sentence of 7 tokens; lower search\.beam"):
        translator.translate(SOURCES)
