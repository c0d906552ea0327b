"""Runs and a split of prepared data in, its decoded text out, as training reads it (data/batch.py, `Decoded`).

    folder/rows.npy                                rows of the split that were decoded, rising
           l2r.ids, l2r.offsets, l2r.usable.npy    their texts, in reading order; the same for r2l
           meta.json                               split, data, directions, and who decoded with which settings
           shards-DIGEST/                          while it is being made: what is finished, by whichever process

A shard that is finished is not decoded again. Processes take turns at the shards, and one of them joins all in order.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState

from bothways.config import SearchConfig, changed
from bothways.data.corpus import Prepared, Texts, TextsWriter, writing
from bothways.errors import ConfigError, DataError
from bothways.run import Run
from bothways.tokens import DIRECTIONS, Direction
from bothways.train.checkpoint import write_json
from bothways.train.strategy import Part
from bothways.translator import LONGEST_SOURCE, Translator, decode

FORMAT = "bothways decoded 1"
SHARD = 4_096  # sources decoded at a time
GPU_BATCH = 1_024  # sentences that a GPU decodes together here, at least
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A split to be decoded, and where to."""

    prepared: Prepared
    split: str  # `train`, or the name of a validation or test set
    search: SearchConfig  # its direction is each part's own
    output: Path
    device: str | None
    precision: str = "float32"

    @property
    def sources(self) -> Texts:
        """The ids of the split's sources."""
        if self.split == "train":
            return self.prepared.train.source
        sets = self.prepared.valid | self.prepared.test
        if self.split not in sets:
            raise ConfigError(f"--split: must be one of {', '.join(['train', *sets])}, got {self.split!r}")
        return sets[self.split].pair.source


def decode_split(
    run: str | Path,
    split: str,
    output: str | Path,
    data: str | Path | None = None,
    *,
    checkpoint: str = "best",
    device: str | None = None,
    precision: str = "float32",
    say: Say = lambda _: None,
    **search_options: Any,
) -> None:
    """Decode all sources of a split of the run's prepared data (or of `data`) with one run."""
    config = changed(Run.open(run).config, search=search_options)
    job = Job(Prepared.open(data or config.data), split, config.search, Path(output), device, precision)
    rows = np.arange(len(job.sources))
    decode_parts(
        job, [Part(Path(run), rows, config.search.direction or config.model.direction or "both", checkpoint)], say
    )


def decode_parts(job: Job, parts: Sequence[Part], say: Say) -> None:
    """Decode every part; together they must cover the same rows in each of their directions."""
    state = PartialState(cpu=job.device == "cpu")
    batches = [(part, begin) for part in parts for begin in range(0, len(part.rows), SHARD)]
    with writing(job.output):
        translators = _Translators(job, say)
        shards = job.output / f"shards-{_identity(job, parts, translators)}"
        shards.mkdir(parents=True, exist_ok=True)
        paths = [shards / f"{number:05d}.npz" for number in range(len(batches))]
        progress = _Progress(job, paths, [min(SHARD, len(part.rows) - begin) for part, begin in batches], say)
        for number, (part, begin) in enumerate(batches):
            if number % state.num_processes == state.process_index and not paths[number].exists():
                _decode_shard(job, translators.of(part), part.rows[begin : begin + SHARD], paths[number])
                progress.report()
        state.wait_for_everyone()
        if state.is_main_process:
            _join(job, [part for part, _ in batches], paths, translators)
            for folder in job.output.glob("shards-*"):
                shutil.rmtree(folder)
    state.wait_for_everyone()


class _Translators:
    """One at a time is held; which weights each of them has is remembered."""

    def __init__(self, job: Job, say: Say) -> None:
        self.job, self.say = job, say
        self.key: tuple[Path, str, str] | None = None
        self.abouts: dict[tuple[Path, str, str], dict[str, Any]] = {}

    def of(self, part: Part) -> Translator:
        """The part's run, ready to decode its direction."""
        key = (part.run, part.checkpoint, part.direction)
        if key != self.key:
            options = {**self.job.search.model_dump(), "direction": part.direction}
            if self.job.device != "cpu":
                options["batch_sentences"] = max(GPU_BATCH, self.job.search.batch_sentences)
            self.held = Translator.open(
                part.run,
                checkpoint=part.checkpoint,
                device=self.job.device,
                precision=self.job.precision,
                say=self.say,
                **options,
            )
            if self.held.run.source_vocabulary != self.job.prepared.source_vocabulary:
                raise DataError(
                    f"{part.run}: has another vocabulary than {self.job.prepared.folder}; a split is decoded by runs "
                    "that were trained on the same prepared data"
                )
            self.key = key
            self.abouts[key] = self._about(part)
        return self.held

    def about(self, part: Part) -> dict[str, Any]:
        """What meta.json says of a decoder."""
        key = (part.run, part.checkpoint, part.direction)
        if key not in self.abouts:
            self.of(part)
        return self.abouts[key]

    def _about(self, part: Part) -> dict[str, Any]:
        weights = hashlib.sha256()
        for parameter in self.held.model.parameters():
            weights.update(parameter.detach().float().cpu().numpy().tobytes())
        made_by = {"system": self.held.run.config.system, "weights": weights.hexdigest()}
        search = self.held.config.model_dump(exclude={"batch_sentences"})
        return {"run": str(part.run), "checkpoint": part.checkpoint, **made_by, "search": search}


class _Progress:
    """How many sources are decoded, over all processes, and how long the rest will take."""

    def __init__(self, job: Job, paths: Sequence[Path], sizes: Sequence[int], say: Say) -> None:
        self.paths, self.sizes, self.say, self.what = paths, sizes, say, job.split
        self.began, self.before = time.monotonic(), self._done()
        if self.before:
            say(f"{self.before:,} of {sum(sizes):,} sources of {job.split} were decoded before")

    def report(self) -> None:
        """One line."""
        done, total = self._done(), sum(self.sizes)
        speed = (done - self.before) / max(1e-9, time.monotonic() - self.began)
        left = timedelta(seconds=round((total - done) / max(speed, 1e-9)))
        self.say(f"decoded {done:,} of {total:,} sources of {self.what}, {speed:,.0f} per second, {left} left")

    def _done(self) -> int:
        return sum(size for path, size in zip(self.paths, self.sizes, strict=True) if path.exists())


def _identity(job: Job, parts: Sequence[Part], translators: _Translators) -> str:
    """The same for the same decoded text: a digest of systems (runs can make two), weights, settings and rows."""
    settings = [FORMAT, job.prepared.fingerprint, job.split, job.precision, SHARD]
    digest = hashlib.sha256(json.dumps(settings).encode())
    for part in parts:
        about = {name: value for name, value in translators.about(part).items() if name not in ("run", "checkpoint")}
        digest.update(json.dumps(about).encode())
        digest.update(part.rows.tobytes())
    return digest.hexdigest()[:16]


def _decode_shard(job: Job, translator: Translator, rows: np.ndarray, path: Path) -> None:
    """The best hypothesis of each direction; what is too long to be a source is left empty."""
    directions = translator.directions
    sources = [job.sources[int(row)].tolist() for row in rows]
    fitting = [i for i, source in enumerate(sources) if 0 < len(source) <= LONGEST_SOURCE]
    texts: dict[Direction, list[list[int]]] = {d: [[]] * len(rows) for d in directions}
    usable = {d: np.zeros(len(rows), dtype=bool) for d in directions}
    ids = [sources[i] for i in fitting]
    # Without a name of its own the iterator ends with the loop, and its workers with it, even if Ctrl-C ends the loop.
    for place, one in decode(translator.model, ids, directions, translator.config, translator.device):
        for direction in [d for d in directions if d in one.best]:
            hypothesis = one.best[direction]
            texts[direction][fitting[place]] = hypothesis.reading_order
            usable[direction][fitting[place]] = bool(hypothesis.tokens) and not hypothesis.cut_off
    arrays: dict[str, Any] = {"rows": rows}
    for d in directions:
        arrays[f"{d.label}_usable"] = usable[d]
        arrays[f"{d.label}_lengths"] = np.array([len(ids) for ids in texts[d]], dtype=np.int64)
        arrays[f"{d.label}_ids"] = np.array([i for ids in texts[d] for i in ids], dtype=np.int64)
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **arrays)
    temporary.rename(path)


def _join(job: Job, parts: Sequence[Part], paths: Sequence[Path], translators: _Translators) -> None:
    """All shards of a direction in the order of their rows; parts may interleave."""
    held = [d for d in DIRECTIONS["both"] if any(d in DIRECTIONS[part.direction] for part in parts)]
    rows: np.ndarray | None = None
    for d in held:
        mine = [path for part, path in zip(parts, paths, strict=True) if d in DIRECTIONS[part.direction]]
        found, usable, lengths, ids = _read_shards(mine, d)
        bounds, order = np.concatenate([[0], np.cumsum(lengths)]), np.argsort(found, kind="stable")
        assert rows is None or (rows == found[order]).all(), "every direction must be decoded for the same rows"
        rows = found[order]
        with TextsWriter(job.output, d.label, job.prepared.target_vocabulary.size) as writer:
            for begin in range(0, len(order), SHARD):
                writer.append([ids[bounds[i] : bounds[i + 1]].tolist() for i in order[begin : begin + SHARD]])
        np.save(job.output / f"{d.label}.usable.npy", usable[order])
    assert rows is not None
    np.save(job.output / "rows.npy", rows)
    decoders = list({json.dumps(translators.about(part)): translators.about(part) for part in parts}.values())
    about = {"format": FORMAT, "split": job.split, "data": job.prepared.fingerprint, "sources": len(rows)}
    write_json(job.output / "meta.json", {**about, "directions": [d.label for d in held], "decoders": decoders})


def _read_shards(paths: Sequence[Path], d: Direction) -> tuple[np.ndarray, ...]:
    """Rows, usable, lengths and ids of all shards, one after the other."""
    found: list[list[np.ndarray]] = [[], [], [], []]
    for path in paths:
        with np.load(path) as arrays:
            for some, name in zip(
                found, ("rows", *(f"{d.label}_{x}" for x in ("usable", "lengths", "ids"))), strict=True
            ):
                some.append(arrays[name])
    return tuple(np.concatenate(some) for some in found)
