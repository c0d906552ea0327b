"""Weights and progress to disk and back, so that nothing but the last intact state is ever read.

    run/checkpoints/000500/model.safetensors       weights, each shared one once
                           optimizer.safetensors   Adam's averages (not in an averaged checkpoint)
                           progress.json           update, patience, best value, ...
                           checksums.json          SHA-256 of the three; written last
    run/checkpoints/best.json                      which one validated best

A checkpoint is written under a temporary name, synced, and renamed. No pickle is written or read.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from bothways.errors import CheckpointError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Snapshot:
    """All that going on exactly needs; order and dropout follow from the seed and the update's number."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    progress: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run: Path, keep: int = 5, say: Say = lambda _: None) -> None:
        self.folder, self.keep, self.say = run / "checkpoints", keep, say

    def updates(self) -> list[int]:
        """Those of training, oldest first."""
        return sorted(int(path.name) for path in self.folder.glob("[0-9]*") if path.name.isdigit())

    def is_empty(self) -> bool:
        """Whether there is no checkpoint of training, not even a damaged one."""
        return not self.updates()

    def save(self, snapshot: Snapshot, name: str | None = None) -> Path:
        """Write a checkpoint, by default under the number of its update, and drop the oldest beyond `keep`."""
        target = self.folder / (name or f"{snapshot.progress['update']:06d}")
        temporary = self.folder / f".{target.name}.tmp"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            save_file(snapshot.weights, temporary / "model.safetensors")
            if snapshot.optimizer:
                save_file(snapshot.optimizer, temporary / "optimizer.safetensors")
            write_json(temporary / "progress.json", snapshot.progress)
            write_json(temporary / "checksums.json", {p.name: _sha256(p) for p in sorted(temporary.iterdir())})
            for path in temporary.iterdir():
                _sync(path)
            _sync(temporary)
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
            _sync(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(_cannot_write(target, error)) from None
        self._drop_old()
        return target

    def load(self, name: str) -> Snapshot:
        """Read one checkpoint and verify its checksums."""
        folder = self.folder / name
        if not folder.is_dir():
            known = ", ".join([p.name for p in sorted(self.folder.glob("[0-9a-z]*")) if p.is_dir()]) or "none"
            raise CheckpointError(f"{folder}: no such checkpoint; there are: {known}")
        try:
            checksums = json.loads((folder / "checksums.json").read_text(encoding="utf-8"))
            if not isinstance(checksums, dict) or not {"model.safetensors", "progress.json"} <= checksums.keys():
                raise CheckpointError(f"{folder / 'checksums.json'}: is damaged (it does not name all files)")
            damaged = [file for file, value in checksums.items() if _sha256(folder / file) != value]
            if damaged:
                raise CheckpointError(f"{folder / damaged[0]}: is damaged (its checksum differs)")
            weights = load_file(folder / "model.safetensors")
            has_optimizer = "optimizer.safetensors" in checksums
            optimizer = load_file(folder / "optimizer.safetensors") if has_optimizer else {}
            return Snapshot(weights, optimizer, json.loads((folder / "progress.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: is damaged ({' '.join(str(error).split())})") from None

    def newest(self) -> Snapshot | None:
        """The newest intact checkpoint of training, none if there are none; says which newer ones are damaged."""
        updates = self.updates()
        for place, update in reversed(list(enumerate(updates))):
            try:
                return self.load(f"{update:06d}")
            except CheckpointError as error:
                if place == 0:
                    raise CheckpointError(
                        f"{error}, and no checkpoint before it is intact; remove {self.folder} to begin anew"
                    ) from None
                self.say(f"{error}; going back to the checkpoint before it")
        return None

    def mark_best(self, update: int, metric: str, value: float) -> None:
        """Remember which checkpoint validated best."""
        write_json(self.folder / "best.json", {"update": update, "metric": metric, "value": value})

    def best(self) -> int | None:
        """The update of the best checkpoint, if one was marked and is there."""
        try:
            update = int(json.loads((self.folder / "best.json").read_text(encoding="utf-8"))["update"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return update if (self.folder / f"{update:06d}").is_dir() else None

    def resolve(self, name: str) -> Snapshot:
        """`best` (the newest where nothing was validated), `last`, `average`, or an update's number."""
        if name not in ("best", "last"):
            return self.load(f"{int(name):06d}" if name.isdigit() else name)
        best = self.best() if name == "best" else None
        if best is not None:
            try:
                return self.load(f"{best:06d}")
            except CheckpointError as error:
                self.say(f"{error}; taking the newest intact one instead")
        newest = self.newest()
        if newest is None:
            raise CheckpointError(f"{self.folder}: holds no intact checkpoint; train the run first")
        return newest

    def average(self, last: int) -> Snapshot:
        """The mean of the newest `last` checkpoints' weights, accumulated in float64; stored as `average`."""
        updates = self.updates()[-last:]
        if last < 1 or len(updates) < last:
            raise CheckpointError(
                f"{self.folder}: --last must be from 1 to the number of checkpoints kept "
                f"({len(self.updates())}), got {last}"
            )
        total: dict[str, Tensor] = {}
        for update in updates:
            for key, value in self.load(f"{update:06d}").weights.items():
                total[key] = total[key] + value.double() if key in total else value.double()
        weights = {key: (value / last).float() for key, value in total.items()}
        snapshot = Snapshot(weights, {}, {"update": updates[-1], "averaged": updates})
        self.save(snapshot, "average")
        return snapshot

    def _drop_old(self) -> None:
        best = self.best()
        for update in self.updates()[: -self.keep]:
            if update != best:
                shutil.rmtree(self.folder / f"{update:06d}", ignore_errors=True)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once, whole, on the CPU (of a sharded model: on every process)."""
    return {name: _whole(p.detach()).cpu().contiguous() for name, p in model.named_parameters()}


def load_weights(model: nn.Module, weights: dict[str, Tensor], where: str, may_lack: Iterable[str] = ()) -> list[str]:
    """Put weights into a model; returns those of `may_lack` that keep their fresh values. Anything else must fit."""
    parameters = dict(model.named_parameters())
    lacking = [name for name in parameters if name not in weights]
    wrong = [name for name in lacking if name not in set(may_lack)] + [
        name for name in weights if name not in parameters
    ]
    wrong += [name for name in parameters if name in weights and weights[name].shape != parameters[name].shape]
    if wrong:
        listed = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise CheckpointError(f"{where}: its weights do not fit this model's shape or vocabulary: {listed}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name in weights:
                parameter.copy_(_like(weights[name], parameter))
    return lacking


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Adam's averages under their parameters' names."""
    return {
        f"{key}/{name}": _whole(value).cpu().clone()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_state`."""
    keys = sorted({key.partition("/")[0] for key in state})
    for name, parameter in model.named_parameters():
        if f"{keys[0]}/{name}" in state:
            optimizer.state[parameter] = {
                key: _like(state[f"{key}/{name}"], parameter)
                if key != "step"
                else state[f"{key}/{name}"].to(parameter.device)
                for key in keys
            }


def write_json(path: Path, value: Any) -> None:
    """Atomically, as `write_text` does."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Atomically, so that a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    temporary.rename(path)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cannot_write(path: Path, error: Exception) -> str:
    text = " ".join(str(error).split())
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text:
        return f"{path}: cannot be written, no space left on device; free some space and run the same command again"
    return f"{path}: cannot be written ({text})"
