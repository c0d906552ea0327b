"""Checkpoints: whole or not there, never trusted blindly, and never a pickle."""

import errno
import json
import os
import pickletools
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from bothways.errors import CheckpointError
from bothways.train import checkpoint as module
from bothways.train.checkpoint import (
    Checkpoints,
    Snapshot,
    load_optimizer_state,
    load_weights,
    optimizer_state,
    weights_of,
)

FILES = ["model.safetensors", "optimizer.safetensors", "progress.json", "checksums.json"]


def snapshot(update: int, width: int = 3) -> Snapshot:
    draw = torch.Generator().manual_seed(update)
    tensors = {name: torch.randn(2, width, generator=draw) for name in ("a", "b")}
    return Snapshot(tensors, {"exp_avg/a": torch.randn(2, width, generator=draw)}, {"update": update})


def store(folder: Path, *updates: int, keep: int = 5) -> tuple[Checkpoints, list[str]]:
    said: list[str] = []
    checkpoints = Checkpoints(folder, keep, said.append)
    for update in updates:
        checkpoints.save(snapshot(update))
    return checkpoints, said


def assert_is(found: Snapshot | None, update: int) -> None:
    assert found is not None and found.progress == {"update": update}
    expected = snapshot(update)
    for a, b in ((found.weights, expected.weights), (found.optimizer, expected.optimizer)):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    checkpoints, said = store(tmp_path, 5, 10)
    assert_is(checkpoints.newest(), 10)
    assert_is(checkpoints.load("000005"), 5)
    assert_is(checkpoints.resolve("5"), 5)
    assert_is(checkpoints.resolve("last"), 10)
    assert_is(checkpoints.resolve("best"), 10)  # nothing was validated
    checkpoints.mark_best(5, "loss", 1.0)
    assert_is(checkpoints.resolve("best"), 5)
    assert names(tmp_path) == ["000005", "000010", "best.json"] and not said


def test_updates_are_ordered_as_numbers(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path, 999_999, 1_000_000, keep=1)
    assert checkpoints.updates() == [1_000_000]
    assert_is(checkpoints.newest(), 1_000_000)


def test_nothing_is_a_pickle(tmp_path: Path) -> None:
    store(tmp_path, 5)
    folder = tmp_path / "checkpoints" / "000005"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    for path in folder.iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        else:
            with safe_open(path, "pt") as file:
                assert list(file.keys())
        with pytest.raises(ValueError):
            list(pickletools.genops(path.read_bytes()))
    package = Path(module.__file__).parents[1]
    for source in package.rglob("*.py"):
        text = source.read_text(encoding="utf-8")
        assert not any(word in text for word in ("torch.load(", "torch.save(", "import pickle", "allow_pickle")), source


@pytest.mark.parametrize("call", ["save_file", "_sha256", "_sync", "write_json"])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_while_writing_leaves_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, failure: BaseException
) -> None:
    checkpoints, _ = store(tmp_path, 1, 2, keep=2)
    real, calls = getattr(module, call), []

    def fails(*arguments: object) -> object:
        calls.append(call)
        if len(calls) == 2:  # in the middle: the first file is there already
            raise failure
        return real(*arguments)

    monkeypatch.setattr(module, call, fails)
    expected = CheckpointError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        checkpoints.save(snapshot(3))
    if isinstance(failure, OSError):
        assert str(caught.value) == (
            f"{tmp_path}/checkpoints/000003: cannot be written, no space left on device; "
            "free some space and run the same command again"
        )
        assert names(tmp_path) == ["000001", "000002"]  # no temporary folder stays behind
    monkeypatch.setattr(module, call, real)
    assert checkpoints.updates() == [1, 2]  # what was not finished is not read ...
    assert_is(checkpoints.newest(), 2)
    checkpoints.save(snapshot(3))  # ... and is in nobody's way
    assert_is(checkpoints.newest(), 3)
    assert names(tmp_path) == ["000002", "000003"]


def test_other_failures_to_write_are_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"checkpoints/000001: cannot be written \(.*Not a directory.*\)"):
        store(tmp_path, 1)


def test_a_checkpoint_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, rename = module._sync, Path.rename

    def noted_sync(path: Path) -> None:
        done.append(path.name)
        sync(path)

    def noted_rename(path: Path, target: Path) -> Path:
        done.append(f"rename {path.name}")
        return rename(path, target)

    monkeypatch.setattr(module, "_sync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    store(tmp_path, 1)
    at = done.index("rename .000001.tmp")
    assert {*FILES, ".000001.tmp"} <= set(done[:at]) and done[at + 1 :] == ["checkpoints"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def garble(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 0x55  # the last weight: a file of the right size and form
    path.write_bytes(bytes(raw))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def no_names(path: Path) -> None:
    path.write_text("{}\n" if path.name == "checksums.json" else "[]\n", encoding="utf-8")


@pytest.mark.parametrize("harm", [truncate, garble, empty, os.remove, no_names])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_newest_checkpoint_is_detected_and_said(tmp_path: Path, file: str, harm: object) -> None:
    checkpoints, said = store(tmp_path, 1, 2)
    harm(tmp_path / "checkpoints" / "000002" / file)  # type: ignore[operator]
    assert_is(checkpoints.newest(), 1)
    assert len(said) == 1
    assert said[0].startswith(f"{tmp_path}/checkpoints/000002") and "is damaged" in said[0]
    assert said[0].endswith("; going back to the checkpoint before it") and "\n" not in said[0]
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoints.load("000002")


def test_a_damaged_best_checkpoint_is_said_and_the_newest_taken(tmp_path: Path) -> None:
    checkpoints, said = store(tmp_path, 1, 2, 3)
    checkpoints.mark_best(2, "loss", 1.0)
    garble(tmp_path / "checkpoints" / "000002" / "model.safetensors")
    assert_is(checkpoints.resolve("best"), 3)
    assert said == [
        f"{tmp_path}/checkpoints/000002/model.safetensors: is damaged (its checksum differs); "
        "taking the newest intact one instead"
    ]


def test_only_damaged_checkpoints_are_an_error(tmp_path: Path) -> None:
    """Going on from fresh weights instead would hide the loss of a run."""
    checkpoints, said = store(tmp_path, 1, 2)
    for name in ("000001", "000002"):
        truncate(tmp_path / "checkpoints" / name / "model.safetensors")
    for read in (checkpoints.newest, lambda: checkpoints.resolve("best"), lambda: checkpoints.resolve("last")):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert str(caught.value) == (
            f"{tmp_path}/checkpoints/000001/model.safetensors: is damaged (its checksum differs), and no checkpoint "
            f"before it is intact; remove {tmp_path}/checkpoints to begin anew"
        )
    assert len(said) == 3 and "000002" in said[0]


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    assert checkpoints.newest() is None and checkpoints.is_empty()
    (tmp_path / "checkpoints" / ".000001.tmp").mkdir(parents=True)  # killed while writing the first one
    assert checkpoints.newest() is None and checkpoints.is_empty()
    with pytest.raises(CheckpointError, match="holds no intact checkpoint; train the run first"):
        checkpoints.resolve("best")
    with pytest.raises(CheckpointError, match="no such checkpoint; there are: none"):
        checkpoints.resolve("average")


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path, 1, 2)
    checkpoints.average(2)
    with pytest.raises(CheckpointError, match="000007: no such checkpoint; there are: 000001, 000002, average"):
        checkpoints.resolve("7")


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path, 1, 2, keep=2)
    checkpoints.mark_best(2, "bleu", 30.0)
    for update in (3, 4, 5):
        checkpoints.save(snapshot(update))
    assert checkpoints.updates() == [2, 4, 5] and checkpoints.best() == 2
    checkpoints.mark_best(5, "bleu", 31.0)
    checkpoints.save(snapshot(6))
    assert checkpoints.updates() == [5, 6]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"update": "x"}', "{}", '{"update": 9}'])
def test_an_unreadable_mark_of_the_best_is_none(tmp_path: Path, text: str) -> None:
    checkpoints, _ = store(tmp_path, 1)
    (tmp_path / "checkpoints" / "best.json").write_text(text, encoding="utf-8")
    assert checkpoints.best() is None
    assert_is(checkpoints.resolve("best"), 1)


@pytest.mark.parametrize("last", [1, 2, 3])
def test_the_average_is_the_mean(tmp_path: Path, last: int) -> None:
    checkpoints, _ = store(tmp_path, 1, 2, 3)
    averaged = checkpoints.average(last)
    among = [snapshot(update) for update in (1, 2, 3)[-last:]]
    for found in (averaged, checkpoints.resolve("average")):
        assert found.progress["averaged"] == [1, 2, 3][-last:] and not found.optimizer
        for name in ("a", "b"):
            mean = torch.stack([s.weights[name].double() for s in among]).mean(0).float()
            torch.testing.assert_close(found.weights[name], mean, rtol=0, atol=1e-7)
    assert_is(checkpoints.newest(), 3)  # an average is not a state of training


@pytest.mark.parametrize("last", [0, -1, 4])
def test_an_average_of_more_than_there_are_is_an_error(tmp_path: Path, last: int) -> None:
    checkpoints, _ = store(tmp_path, 1, 2, 3)
    with pytest.raises(CheckpointError, match=rf"--last must be from 1 to .* \(3\), got {last}"):
        checkpoints.average(last)


def test_a_damaged_checkpoint_is_not_averaged(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path, 1, 2)
    garble(tmp_path / "checkpoints" / "000001" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"000001/model\.safetensors: is damaged"):
        checkpoints.average(2)


class Net(nn.Module):
    """Two layers that share a matrix."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight


def test_weights_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    weights = weights_of(Net(4))
    assert sorted(weights) == ["first.bias", "first.weight", "second.bias"]  # each shared one once
    with pytest.raises(CheckpointError) as caught:
        load_weights(Net(5), weights, "run")
    assert str(caught.value) == (
        "run: its weights do not fit this model's shape or vocabulary: first.weight, first.bias, second.bias"
    )
    lacking = {name: value for name, value in weights.items() if name != "first.bias"} | {"third": torch.zeros(1)}
    before = weights_of(Net())
    model = Net()
    load_weights(model, before, "run")
    with pytest.raises(CheckpointError, match=r"first\.bias, third$"):
        load_weights(model, lacking, "run")
    assert all(torch.equal(a, b) for a, b in zip(weights_of(model).values(), before.values(), strict=True))
    with pytest.raises(CheckpointError, match=r"third$"):
        load_weights(Net(), lacking, "run", may_lack=["first.bias"])
    del lacking["third"]
    assert load_weights(Net(), lacking, "run", may_lack=["first.bias"]) == ["first.bias"]
    with pytest.raises(CheckpointError, match=r"and 95 more$"):
        load_weights(Net(), weights | {f"x{i}": torch.zeros(1) for i in range(100)}, "run")


def trained(model: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for i in range(steps):
        optimizer.zero_grad()
        x = torch.full((2, 4), 0.1 * (i + 1))
        model.second(model.first(x)).square().sum().backward()
        optimizer.step()


def adam(model: Net) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01, fused=True)


def test_the_optimizer_goes_on_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = adam(model)
    trained(model, optimizer, 3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(Snapshot(weights_of(model), optimizer_state(model, optimizer), {"update": 3}))
    trained(model, optimizer, 2)

    other = Net()
    resumed = adam(other)
    found = checkpoints.load("000003")
    assert sorted({key.partition("/")[0] for key in found.optimizer}) == ["exp_avg", "exp_avg_sq", "step"]
    load_weights(other, found.weights, "run")
    load_optimizer_state(other, resumed, found.optimizer)
    trained(other, resumed, 2)
    expected, state = weights_of(model), optimizer_state(model, optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(other).items())
    assert all(torch.equal(value, state[name]) for name, value in optimizer_state(other, resumed).items())
    assert all(value.item() == 5 for name, value in state.items() if name.startswith("step/"))
