"""A run on disk: its configuration, its vocabularies, its checkpoints. Everything that decoding needs is in the folder.

run/config.yaml                 every option, resolved
    source.vocabulary.json      copies, so that the run outlives the prepared data
    target.vocabulary.json
    data.json                   fingerprint of the prepared data
    checkpoints/                see train/checkpoint.py
    log.jsonl, tensorboard/     what training reported
    manifest.json, first/, ...  the stages before it, where a strategy trained it

A run of the systems `rerank` and `ensemble` has no checkpoints: `runs:` of its configuration names those that it
consists of, from its own folder if they lie in it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from bothways import config as configuration
from bothways.config import Config
from bothways.data.corpus import Prepared, writing
from bothways.errors import CheckpointError, ConfigError, VocabularyError
from bothways.models.ensemble import Ensemble, Panel
from bothways.models.interface import Seq2Seq, TwoPass
from bothways.models.table import build, system_of
from bothways.text.vocabulary import Vocabulary
from bothways.tokens import DIRECTIONS, R2L, Direction
from bothways.train.checkpoint import Checkpoints, load_weights, write_json, write_text

# What may change when a run goes on: how long, how often it speaks, how it decodes; not what an update computes.
MAY_CHANGE = {
    "train": {
        "updates", "accumulation", "record", "compile", "shard", "validate_every", "validate_sentences", "metric",
        "patience", "save_every", "keep", "log_every", "max_skipped",
    },
    "search": set(configuration.SearchConfig.model_fields),
    "strategy": {"updates"},  # how long the last stage goes on
}  # fmt: skip

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One trained, or half-trained, system."""

    folder: Path
    config: Config  # resolved
    source_vocabulary: Vocabulary
    target_vocabulary: Vocabulary

    @property
    def directions(self) -> tuple[Direction, ...]:
        """What the model can decode."""
        return DIRECTIONS[self.config.model.direction or "both"]

    @property
    def members(self) -> list["Run"]:
        """The runs that it consists of, if it does."""
        return [Run.open(self.folder / path) for path in self.config.runs or ()]

    @classmethod
    def create(cls, folder: Path, config: Config, prepared: Prepared) -> Self:
        """Begin a run, or go on with the one that is there if it is the same."""
        if (folder / "config.yaml").exists():
            run = cls.open(folder)
            run.must_go_on_as(config, prepared)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            for side in ("source", "target"):
                text = (prepared.folder / f"{side}.vocabulary.json").read_text(encoding="utf-8")
                with writing(folder / f"{side}.vocabulary.json"):
                    write_text(folder / f"{side}.vocabulary.json", text)
            write_json(folder / "data.json", {"fingerprint": prepared.fingerprint})
        write_text(folder / "config.yaml", configuration.dump(config))
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Read a run's configuration and vocabularies."""
        folder = Path(folder)
        if not (folder / "config.yaml").is_file():
            raise CheckpointError(f"{folder}: is not a run (it has no config.yaml); `bothways train` makes one")
        config = configuration.load(folder / "config.yaml")
        vocabularies = (Vocabulary.load(folder / f"{side}.vocabulary.json") for side in ("source", "target"))
        return cls(folder, config, *vocabularies)

    def must_go_on_as(self, config: Config, prepared: Prepared) -> None:
        """Refuse to mix two experiments in one folder."""
        must_agree(self.folder, self.config, config)
        known = json.loads((self.folder / "data.json").read_text(encoding="utf-8"))["fingerprint"]
        if known != prepared.fingerprint:
            raise VocabularyError(
                f"{self.folder}: was started with other prepared data (fingerprint {known}) than {prepared.folder} "
                f"({prepared.fingerprint}); give another --output"
            )

    def fresh_model(self) -> Seq2Seq:
        """The model with new weights, the same for the same seed."""
        torch.manual_seed(self.config.train.seed)
        return build(self.config, self.source_vocabulary.size, self.target_vocabulary.size)

    def model(self, checkpoint: str = "best", say: Say = lambda _: None) -> Seq2Seq | Panel:
        """The trained model in evaluation mode: `best`, `last`, `average` or an update's number, of every member."""
        if self.config.runs:
            must_fit(self.config.system, self.members)
            members = [run.model(checkpoint, say) for run in self.members]
            models = [model for model in members if isinstance(model, Seq2Seq)]
            together = self.config.system == "ensemble"
            return Ensemble(models).eval() if together else Panel(models, [m.directions for m in self.members]).eval()
        snapshot = Checkpoints(self.folder, say=say).resolve(checkpoint)
        model = self.fresh_model()
        load_weights(model, snapshot.weights, f"{self.folder}/checkpoints")
        return model.eval()


def must_fit(system: str, members: Sequence[Run]) -> None:
    """Refuse runs that cannot decode the same source, or not together."""
    first = members[0]
    for run in members:
        if run.config.system in ("rerank", system):
            raise ConfigError(f"runs: {run.folder} has system {run.config.system}; name the runs that it consists of")
        if (run.source_vocabulary, run.target_vocabulary) != (first.source_vocabulary, first.target_vocabulary):
            raise VocabularyError(f"runs: {run.folder} has another vocabulary than {first.folder}; they must share it")
        if system == "ensemble" and system_of(run.config).has_two_passes:
            raise ConfigError(
                f"runs: {run.folder} decodes in two passes ({run.config.system}) and cannot be part of an "
                "ensemble; system rerank takes it"
            )
        if system == "ensemble" and run.directions != first.directions:
            has = [" and ".join(d.label for d in one.directions) for one in (first, run)]
            raise ConfigError(
                f"runs: an ensemble's must have the same directions, but {first.folder} has {has[0]} and {run.folder} "
                f"{has[1]}; system rerank takes both"
            )


def device_of(name: str | None) -> str:
    """The device of this name; by default a GPU if there is one."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    count = torch.cuda.device_count()
    known = ["cpu", *(["cuda", *(f"cuda:{i}" for i in range(count))] if count else [])]
    if name not in known:
        found = "" if count else " (torch finds no GPU)"
        raise ConfigError(f"--device: must be one of {', '.join(known)} on this machine{found}, got {name!r}")
    return name


def must_be_free_for_a_run(folder: Path) -> None:
    """Refuse a place that holds something else, before anything is written there."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; --output must be a folder")
    if (folder / "meta.json").exists():
        raise ConfigError(f"{folder}: holds data, not a run; give another --output")


def start_from(model: Seq2Seq, run: Path, vocabularies: tuple[Vocabulary, Vocabulary], say: Say) -> None:
    """Begin with another run's best weights; what only interaction needs may be missing there.

    A model with two passes can begin with an r2l run as its first: then all of the second is new.
    """
    other = Run.open(run)
    if (other.source_vocabulary, other.target_vocabulary) != vocabularies:
        raise VocabularyError(f"{run}: has another vocabulary than this run's data; prepare both with the same one")
    weights = Checkpoints(run, say=say).resolve("best").weights
    if isinstance(model, TwoPass) and not system_of(other.config).has_two_passes:
        if R2L not in other.directions:
            raise ConfigError(
                f"train.start_from: must be an r2l run, or one with two passes, for its first pass; {run} is a "
                f"{other.config.system} run"
            )
        load_weights(model.first, weights, str(run))
        say(f"starting from {run} as the first pass; the second is new")
        return
    fresh = load_weights(model, weights, str(run), model.interaction_parameters())
    if fresh:
        model.begin_interaction()
    say(f"starting from {run}" + (f"; new here: {', '.join(fresh)}" if fresh else ""))


def must_agree(folder: Path, old: Config, new: Config) -> None:
    """Refuse options that change what was begun in a folder."""
    before, now = _flat(old), _flat(new)
    own = {str(folder / stage) for stage in ("first", "r2l")}
    if now["train.start_from"] in own:  # a strategy's own stage, wherever the folder was moved
        before["train.start_from"] = now["train.start_from"]
    differing = [key for key in {**before, **now} if now.get(key) != before.get(key) and not _may_change(key)]
    if differing:
        key = differing[0]
        raise ConfigError(
            f"{folder}: was started with {key} = {before.get(key)!r}, but is now asked for {now.get(key)!r}"
            + (f" (and {len(differing) - 1} more options differ)" if len(differing) > 1 else "")
            + "; give another --output, or the old value to resume"
        )


def _flat(config: Config) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.model_dump().items():
        if isinstance(value, dict):
            flat.update({f"{key}.{inner}": x for inner, x in value.items()})
        else:
            flat[key] = value
    return flat


def _may_change(key: str) -> bool:
    section, _, option = key.partition(".")
    return key in ("data", "decoded") or option in MAY_CHANGE.get(section, ())
