"""Named stages over train and decode: a strategy is one command that goes on where it stopped.

Training and decoding come in as callables; what a stage has finished is written down in `stages.json`.

    fine-tuning   1  first    train without interaction, on gold text in both directions (or take a run that is there)
                  2  decoded  decode a share of the training sources with it
                  3  final    go on from its weights with interaction, on the triples
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bothways.config import Config, changed
from bothways.errors import ConfigError
from bothways.train.checkpoint import write_json

Train = Callable[[Config, Path], None]  # a configuration without strategy, and the run's folder
Decode = Callable[[Config, Path, Path], None]  # the recipe, the run that decodes, the folder to write
Say = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """One part of a strategy."""

    name: str
    folder: Path
    work: Callable[[], None]  # resumes by itself when it is called again
    updates: int | None = None  # of a training stage


def fine_tuning(config: Config, output: Path, train: Train, decode: Decode) -> list[Stage]:
    """The stages of the fine-tuning strategy; the final run is `output` itself."""
    assert config.strategy is not None
    given = config.strategy.first
    first, decoded = Path(given) if given else output / "first", output / "decoded"
    stages = [
        Stage("decoded", decoded, lambda: decode(config, first, decoded)),
        Stage(
            "final", output, lambda: train(with_interaction(config, first, decoded), output), config.strategy.updates
        ),
    ]
    if given:
        return stages
    return [Stage("first", first, lambda: train(without_interaction(config), first), config.train.updates), *stages]


def without_interaction(config: Config) -> Config:
    """The recipe's first stage: gold text in both directions, which do not see each other."""
    return changed(config, strategy=None, model={"interaction": False})


def with_interaction(config: Config, start: Path, decoded: Path) -> Config:
    """The recipe's last stage: the triples, from the first stage's weights."""
    assert config.strategy is not None
    options = config.strategy.model_dump()
    train = {name: options[name] for name in ("learning_rate", "warmup", "batch_tokens") if options[name] is not None}
    train |= {"updates": options["updates"], "start_from": str(start)}
    return changed(config, strategy=None, decoded=str(decoded), train=train)


def run_stages(stages: Sequence[Stage], output: Path, say: Say, is_main: bool = True) -> None:
    """Do what is not yet done, in order; the main process keeps a record. The last stage may be asked to go on."""
    output.mkdir(parents=True, exist_ok=True)
    record = output / "stages.json"
    done: dict[str, dict[str, float]] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    for number, stage in enumerate(stages, 1):
        label = f"stage {number}/{len(stages)} {stage.name}"
        before = done.get(stage.name)
        if before is not None and before.get("updates", stage.updates) == stage.updates:
            say(f"{label}: done before, in {before['seconds']:.0f} s")
            continue
        if before is not None and number < len(stages):
            raise ConfigError(
                f"{output}: stage {stage.name} is done with {before['updates']} updates, on which the stages after it "
                f"stand, but is now asked for {stage.updates}; give another --output"
            )
        say(f"{label}: {stage.folder}")
        began = time.monotonic()
        stage.work()
        done[stage.name] = {"seconds": round(time.monotonic() - began, 1)}
        if stage.updates is not None:
            done[stage.name]["updates"] = stage.updates
        if is_main:
            write_json(record, done)
