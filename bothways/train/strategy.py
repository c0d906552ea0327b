"""Named stages over train and decode: a strategy is one command that goes on where it stopped.

Training and decoding come in as callables; what a stage has finished is written down in `manifest.json`.

    two-pass      1  l2r, r2l  train both one-directional models (or take runs that are there)
                  2  decoded   decode the training sources with both
                  3  final     train with interaction, on the triples
    fine-tuning   1  first     train without interaction, on gold text in both directions (or take a run)
                  2  decoded   decode a share of the training sources with it
                  3  final     go on from its weights with interaction, on the triples
    online        1  first     as above
                  2  decoded   decode what the next updates will read: with `first`, later with an average of the run
                  3  final     go on with interaction, on these triples; then 2 and 3 again, until all updates are done
    asynchronous  1  r2l       train an r2l model (or take a run)
                  2  decoded   decode the training sources with it
                  3  final     it is the first pass now: train it on, and with it the l2r decoder that reads it

With `folds`, each part of the sources is decoded by models that were not trained on it.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bothways.config import Config, StrategyConfig, TrainConfig, changed
from bothways.data.corpus import Pair
from bothways.data.sampler import Sampler, folds_of, rows_of, share_of
from bothways.errors import ConfigError
from bothways.models.table import one_direction
from bothways.train.checkpoint import Checkpoints, write_json

Train = Callable[[Config, Path], None]  # a configuration without strategy, and the run's folder
Decode = Callable[[Sequence["Part"], Path], None]  # who decodes which rows, and the folder to write
Say = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """What one run decodes: some rows of a split, in one direction or in both."""

    run: Path
    rows: np.ndarray  # rising
    direction: str  # l2r, r2l or both
    checkpoint: str = "best"


@dataclass(frozen=True)
class Stage:
    """One part of a strategy."""

    name: str
    folder: Path
    work: Callable[[], None]  # resumes by itself when it is called again
    updates: int | None = None  # of a training stage


@dataclass(frozen=True)
class Plan:
    """A recipe, where its final run goes, and what a strategy works with."""

    config: Config
    output: Path
    pair: Pair  # the training pairs
    train: Train
    decode: Decode

    @property
    def strategy(self) -> StrategyConfig:
        """The recipe's own."""
        assert self.config.strategy is not None
        return self.config.strategy

    @property
    def share(self) -> float:
        """Of the training pairs, which is decoded and trained on at last."""
        part = 0.1 if self.strategy.name == "fine-tuning" else 1.0
        return self.strategy.share or part * self.config.train.share

    @property
    def updates(self) -> int:
        """Of the final run."""
        whole = self.config.train.updates
        begins_anew = self.strategy.name in ("two-pass", "asynchronous")  # with all weights, or those of a decoder
        return self.strategy.updates or (whole if begins_anew else -(-whole // 10))

    def training(self, name: str, folder: Path, config: Config) -> Stage:
        """A stage that trains a run."""
        return Stage(name, folder, lambda: self.train(config, folder), config.train.updates)

    def decoding(self, name: str, parts: Sequence[Part]) -> Stage:
        """A stage that decodes sources into a folder of its name."""
        folder = self.output / name
        return Stage(name, folder, lambda: self.decode(parts, folder))

    def decoders(
        self, name: str, recipe: Config, direction: str, given: str | None = None
    ) -> tuple[list[Stage], list[Part]]:
        """Who decodes what: one run, or one for every fold; and the stages that train those that are not there yet."""
        rows = share_of((self.pair.source.lengths, self.pair.target.lengths), self.share, self.config.train)
        if given:
            return [], [Part(Path(given), rows, direction)]
        folds = self.strategy.folds
        if folds == 1:
            return [self.training(name, self.output / name, recipe)], [Part(self.output / name, rows, direction)]
        fold = folds_of(len(self.pair), folds, recipe.train.seed)[rows]
        stages, parts = [], []
        for number in range(1, folds + 1):
            folder = self.output / f"{name}-{number}"
            apart = changed(recipe, train={"folds": folds, "without_fold": number})
            stages.append(self.training(folder.name, folder, apart))
            parts.append(Part(folder, rows[fold == number], direction))
        return stages, parts

    def final(self, decoded: str, start: Path | None) -> Config:
        """The recipe of the last stage: the triples, by default from these weights."""
        options = self.strategy.model_dump()
        train = {key: options[key] for key in ("learning_rate", "warmup", "batch_tokens") if options[key] is not None}
        origin = self.strategy.origin or (str(start) if start else "scratch")
        train |= {"updates": self.updates, "share": self.share, "start_from": None if origin == "scratch" else origin}
        return changed(self.config, strategy=None, decoded=str(self.output / decoded), train=train)


def two_pass(plan: Plan) -> list[Stage]:
    """See above; the final run is the output itself."""
    stages: list[Stage] = []
    parts: list[Part] = []
    for direction, given in (("l2r", plan.strategy.l2r), ("r2l", plan.strategy.r2l)):
        trained, decoding = plan.decoders(direction, one_direction(plan.config, direction), direction, given)
        stages, parts = [*stages, *trained], [*parts, *decoding]
    final = plan.training("final", plan.output, plan.final("decoded", None))
    return [*stages, plan.decoding("decoded", parts), final]


def fine_tuning(plan: Plan) -> list[Stage]:
    """See above; the final run is the output itself."""
    return _going_on(plan, "first", without_interaction(plan.config), "both", plan.strategy.first)


def asynchronous(plan: Plan) -> list[Stage]:
    """See above; the final run is the output itself."""
    return _going_on(plan, "r2l", one_direction(plan.config, "r2l"), "r2l", plan.strategy.r2l)


def _going_on(plan: Plan, name: str, recipe: Config, direction: str, given: str | None) -> list[Stage]:
    """One model (or one for every fold) decodes, and the run goes on from the one that has seen all."""
    first, stages = _first(plan, name, recipe, given)
    trained, parts = plan.decoders(name, recipe, direction, given)
    if plan.strategy.folds > 1:
        stages = [*stages, *trained]
    final = plan.training("final", plan.output, plan.final("decoded", first))
    return [*stages, plan.decoding("decoded", parts), final]


def online(plan: Plan) -> list[Stage]:
    """See above; the final run is the output itself, and its updates are counted over all rounds."""
    first, stages = _first(plan, "first", without_interaction(plan.config), plan.strategy.first)
    refresh, average = plan.strategy.refresh, plan.strategy.average
    for number, begin in enumerate(range(0, plan.updates, refresh), 1):
        name = f"decoded-{number}"
        recipe = plan.final(name, first)
        train = {"updates": min(begin + refresh, plan.updates), "save_every": refresh // average}
        recipe = changed(recipe, train={**train, "keep": max(average, recipe.train.keep)})

        def decode(folder: Path = plan.output / name, config: TrainConfig = recipe.train, begin: int = begin) -> None:
            rows = _read_by(plan.pair, config, begin, begin + refresh)
            if not begin:
                plan.decode([Part(first, rows, "both")], folder)
            else:
                Checkpoints(plan.output).average(average)
                plan.decode([Part(plan.output, rows, "both", "average")], folder)

        stages += [Stage(name, plan.output / name, decode), plan.training(f"final-{number}", plan.output, recipe)]
    return stages


def both_alone(plan: Plan) -> list[Stage]:
    """What the system `rerank` consists of where no runs are named: a model of each direction, on gold text."""
    return [plan.training(d, plan.output / d, one_direction(plan.config, d)) for d in ("l2r", "r2l")]


STRATEGIES = {"two-pass": two_pass, "fine-tuning": fine_tuning, "online": online, "asynchronous": asynchronous}


def without_interaction(config: Config) -> Config:
    """The recipe of a first stage: gold text in both directions, which do not see each other."""
    return changed(config, strategy=None, model={"interaction": False}, search={"rerank_future": "none"})


def _first(plan: Plan, name: str, recipe: Config, given: str | None) -> tuple[Path, list[Stage]]:
    """The run that the final one goes on from, and the stage that trains it unless it is there."""
    if given:
        return Path(given), []
    folder = plan.output / name
    return folder, [plan.training(name, folder, recipe)]


def _read_by(pair: Pair, config: TrainConfig, begin: int, end: int) -> np.ndarray:
    """The rows that updates `begin` to `end` (exclusive) will read, rising."""
    lengths = (pair.source.lengths, pair.target.lengths)
    sampler = Sampler(lengths, config.batch_tokens, config.max_length, config.seed, rows_of(lengths, config))
    return np.unique(np.concatenate([update.rows for update in islice(sampler.updates(begin), end - begin)]))


def run_stages(plan: Plan, about: dict[str, Any], say: Say, is_main: bool = True) -> None:
    """Do what is not yet done, in order; the main process keeps the manifest. The final run may be asked to go on."""
    stages = STRATEGIES[plan.strategy.name](plan) if plan.config.strategy else both_alone(plan)
    plan.output.mkdir(parents=True, exist_ok=True)
    manifest = plan.output / "manifest.json"
    done = json.loads(manifest.read_text(encoding="utf-8"))["stages"] if manifest.exists() else {}
    for number, stage in enumerate(stages, 1):
        label = f"stage {number}/{len(stages)} {stage.name}"
        before = done.get(stage.name)
        if before is not None and before["data"]["fingerprint"] != about["data"]["fingerprint"]:
            raise ConfigError(
                f"{plan.output}: stage {stage.name} was done with other prepared data (fingerprint "
                f"{before['data']['fingerprint']}) than {about['data']['folder']} ({about['data']['fingerprint']}); "
                "give another --output"
            )
        if before is not None and before["updates"] == stage.updates:
            say(f"{label}: done before, in {before['seconds']:.0f} s")
            continue
        if before is not None and stage.folder != plan.output:
            raise ConfigError(
                f"{plan.output}: stage {stage.name} is done with {before['updates']} updates, on which the stages "
                f"after it stand, but is now asked for {stage.updates}; give another --output"
            )
        say(f"{label}: {stage.folder}")
        began = time.monotonic()
        stage.work()
        seconds = round(time.monotonic() - began, 1)
        done[stage.name] = {"folder": str(stage.folder), "updates": stage.updates, "seconds": seconds, **about}
        if is_main:
            write_json(manifest, {"format": "bothways manifest 1", "recipe": plan.config.model_dump(), "stages": done})
