"""Recorded steps find what steps one by one find. Without a GPU a recording is the step itself, over its places."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from toy import FAMILIES, Family, decode, difference, pad, settings, toy_model, toy_sources

from bothways import translator
from bothways.models.ensemble import Ensemble, Panel
from bothways.models.interface import Seq2Seq
from bothways.search import recorded
from bothways.search.beam import Beam, search
from bothways.search.hypothesis import Found
from bothways.search.recorded import Recorder, changed
from bothways.tokens import DIRECTIONS

FORMS = [(family, meeting) for family in FAMILIES.values() for meeting in family.meetings]
forms = pytest.mark.parametrize("family, meeting", FORMS, ids=lambda x: x.both if isinstance(x, Family) else str(x))
CPU = torch.device("cpu")


def itself(compute: Callable[[], None], _: Any) -> Callable[[], None]:
    """In the place of a CUDA graph, once warmed up as one is."""
    compute()
    return compute


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Seq2Seq, Recorder]]:
    """Every search is recorded; sizes are small, so that the tests outgrow them."""
    made: dict[Seq2Seq, Recorder] = {}

    def recorder_of(model: Seq2Seq, _: torch.device) -> Recorder:
        return made.setdefault(model, Recorder(itself))

    monkeypatch.setattr(translator, "recorder_of", recorder_of)
    monkeypatch.setattr(recorded, "ROOM", 4)
    monkeypatch.setattr(recorded, "FEW_ROWS", 2)
    monkeypatch.setattr("bothways.search.beam.steps_between_looks", lambda _: 3)
    yield made


def found(model: Seq2Seq | Panel, count: int, batch: int, seed: int = 5, **options: Any) -> list[Found]:
    """What the pipeline finds, by place."""
    sources = [source[:-1].tolist() for source in toy_sources(seed, count, longest=9)]
    config = settings(**{"max_length": 11, "batch_sentences": batch, **options})
    directions = DIRECTIONS[config.direction or "both"]
    with torch.inference_mode():
        results = dict(translator.decode(model, sources, directions, config, CPU))
    return [results[i] for i in range(count)]


@forms
@pytest.mark.parametrize("pairing", ["rank", "best", "mix"])
def test_recorded_steps_find_the_same(
    family: Family, meeting: dict[str, Any], pairing: str, recorders: dict[Seq2Seq, Recorder]
) -> None:
    """Batches of several sizes, sentences that finish early, more steps than there is room for at first."""
    model = toy_model(family.both, seed=2, **meeting)
    recorded_ones = found(model, 11, 6, pairing=pairing)
    assert recorders[model].recordings
    again = found(model, 11, 6, pairing=pairing)
    for i, source in enumerate(toy_sources(5, 11, longest=9)):
        plain = decode(model, [source], 11, settings(pairing=pairing))[0]
        assert difference(recorded_ones[i], plain) == "" == difference(recorded_ones[i], again[i])


@pytest.mark.parametrize(
    "system, options",
    [
        ("transformer-l2r", {"direction": "l2r", "greedy": True}),
        ("bift", {"greedy": True}),
        ("bift", {"rerank": "self", "nbest": 3}),
        ("bift", {"early_stop": False, "nbest": 4}),
        ("abd-transformer", {"direction": "l2r"}),
        ("abd-rnmt", {"direction": "l2r"}),
        ("no-interaction", {"beam": 6}),
        ("ensemble", {}),
        ("panel", {}),
    ],
    ids=str,
)
def test_whatever_is_searched_is_recorded(
    monkeypatch: pytest.MonkeyPatch, recorders: dict[Seq2Seq, Recorder], system: str, options: dict[str, Any]
) -> None:
    model: Seq2Seq | Panel
    if system == "ensemble":
        model = Ensemble([toy_model("bift", seed=1), toy_model("bi-rnmt", seed=2)])
    elif system == "panel":
        model = Panel([toy_model("transformer-l2r"), toy_model("rnmt-r2l")], [DIRECTIONS["l2r"], DIRECTIONS["r2l"]])
    else:
        model = toy_model(system, seed=3)
    expected = found(model, 7, 4, **options)
    assert recorders
    monkeypatch.setattr(translator, "recorder_of", lambda *_: None)
    for a, b in zip(expected, found(model, 7, 4, **options), strict=True):
        assert difference(a, b) == ""


@pytest.mark.parametrize("all_complete", [False, True])
def test_what_is_forced_and_all_that_is_complete(recorders: dict[Seq2Seq, Recorder], all_complete: bool) -> None:
    model, sources = toy_model("bift", seed=4), toy_sources(4, 3)
    state = model.start(model.encode(pad(sources)), 2, 2)
    forced = torch.tensor([[[5, 6], [0, 0]], [[0, 0], [7, 0]], [[0, 0], [0, 0]]])
    limits, config = torch.tensor([6, 5, 7]), settings(beam=4, nbest=2)
    results = []
    with torch.inference_mode():
        for recorder in (None, Recorder(itself)):
            state = model.start(model.encode(pad(sources)), 2, 2)
            given = model.step, state, limits, DIRECTIONS["both"], config, forced
            results.append(search(*given, all_complete=all_complete, recorder=recorder))
    assert [difference(a, b) for a, b in zip(*results, strict=True)] == ["", "", ""]


def test_a_source_that_comes_again_is_encoded_by_a_recording(recorders: dict[Seq2Seq, Recorder]) -> None:
    model = toy_model("bift", seed=1)
    first = found(model, 3, 1)
    (seen, *_) = recorders[model].computations.values()
    assert seen is None
    second = found(model, 3, 1)
    assert all(one is not None for one in recorders[model].computations.values())
    third = found(model, 3, 1)
    for a, b, c in zip(first, second, third, strict=True):
        assert difference(a, b) == "" == difference(a, c)


def test_recordings_follow_weights_that_change_in_place(recorders: dict[Seq2Seq, Recorder]) -> None:
    model, other = toy_model("bift", seed=1), toy_model("bift", seed=2)
    before = found(model, 3, 3)
    recordings = list(recorders[model].recordings)
    model.load_state_dict(other.state_dict())
    after, expected = found(model, 3, 3), found(other, 3, 3)
    assert list(recorders[model].recordings) == recordings
    assert [difference(a, b) for a, b in zip(after, expected, strict=True)] == ["", "", ""]
    assert [difference(a, b) for a, b in zip(after, before, strict=True)] != ["", "", ""]


def test_the_oldest_recordings_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, recorders: dict[Seq2Seq, Recorder]
) -> None:
    monkeypatch.setattr(recorded, "MOST_RECORDINGS", 2)
    model = toy_model("bift", seed=1)
    several = [found(model, 5, batch) for batch in (1, 3, 5, 1)]
    assert len(recorders[model].recordings) == 2
    for some in several:
        assert [difference(a, b) for a, b in zip(some, several[0], strict=True)] == [""] * 5


def test_when_memory_is_short_recordings_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only if there are none is the batch halved."""
    model, sizes = toy_model("bift", seed=1), []
    expected, start = found(model, 4, 4), model.start

    def start_once(memory: Any, directions: int, hypotheses: int) -> Any:
        sizes.append(len(memory.mask))
        if "recorder" in model.__dict__ or len(sizes) < 3:
            raise torch.OutOfMemoryError("CUDA")
        return start(memory, directions, hypotheses)

    monkeypatch.setattr(model, "start", start_once)
    model.__dict__["recorder"] = Recorder(itself)
    assert [difference(a, b) for a, b in zip(found(model, 4, 4), expected, strict=True)] == [""] * 4
    assert sizes == [4, 4, 2, 2]


def test_few_sentences_stay_together_until_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch, recorders: dict[Seq2Seq, Recorder]
) -> None:
    model, kept = toy_model("bift", seed=1), []
    expected = found(model, 6, 6)
    monkeypatch.setattr(recorded, "FEW_ROWS", 6)
    keep = Beam.keep
    monkeypatch.setattr(Beam, "keep", lambda *given: kept.append(int(given[0].clock.step)) or keep(*given))
    monkeypatch.setattr("bothways.search.beam.steps_between_looks", lambda _: 1)
    assert [difference(a, b) for a, b in zip(found(model, 6, 6), expected, strict=True)] == [""] * 6
    assert set(kept) <= {4, 8}


@pytest.mark.parametrize("count, size", [(1, 1), (7, 7), (9, 10), (17, 20), (64, 64), (65, 80), (1000, 1024)])
def test_sizes_are_few(count: int, size: int) -> None:
    assert Recorder(itself).size(count) == size


def test_every_tensor_is_found_and_nothing_else_changes() -> None:
    model = toy_model("bift")
    state = model.start(model.encode(pad(toy_sources(1, 2))), 2, 3)
    doubled = changed(state, lambda x: torch.cat([x.flatten(), x.flatten()]))
    assert doubled.clock.taken == 0 and type(doubled) is type(state)  # type: ignore[attr-defined]
    assert doubled.ancestors.dim() == 1 and state.ancestors.dim() == 4  # type: ignore[attr-defined]


def test_recordings_outlive_training_but_not_a_move() -> None:
    """Training changes weights in place, and validates again and again; what is moved or cast lies elsewhere."""
    model, gpu = toy_model(), torch.device("cuda")
    recorder = translator.recorder_of(model, gpu)
    assert recorder is not None and translator.recorder_of(model, CPU) is None
    assert copy.deepcopy(model).__dict__["recorder"] is not recorder
    assert translator.recorder_of(model.train(), gpu) is None  # dropout
    assert translator.recorder_of(model.eval(), gpu) is recorder
    assert translator.recorder_of(model.double(), gpu) is not recorder
