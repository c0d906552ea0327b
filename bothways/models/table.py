"""Every system by name, in plain sight."""

from dataclasses import dataclass
from typing import Literal

from bothways.config import Config, ModelConfig, changed
from bothways.errors import ConfigError
from bothways.models.asynchronous import AsynchronousRNN, AsynchronousTransformer
from bothways.models.interface import Seq2Seq, TwoPass
from bothways.models.rnn import RNN
from bothways.models.transformer import Transformer


@dataclass(frozen=True)
class System:
    """A model class with its directions."""

    model: type[Seq2Seq]
    direction: Literal["l2r", "r2l", "both"]
    interaction: bool
    meaning: str
    of_runs: bool = False  # it consists of other runs, and has no weights of its own

    @property
    def has_two_passes(self) -> bool:
        """Whether an r2l decoder speaks first."""
        return issubclass(self.model, TwoPass)


SYSTEMS = {
    "transformer-l2r": System(Transformer, "l2r", False, "Transformer, left to right"),
    "transformer-r2l": System(Transformer, "r2l", False, "Transformer, right to left"),
    "no-interaction": System(
        Transformer, "both", False, "one Transformer for both directions, which do not see each other"
    ),
    "bift": System(Transformer, "both", True, "one Transformer for both directions, each reading the other's words"),
    "abd-transformer": System(
        AsynchronousTransformer, "l2r", True, "Transformer, left to right, reading what an r2l decoder has said first"
    ),
    "rnmt-l2r": System(RNN, "l2r", False, "LSTM with attention, left to right"),
    "rnmt-r2l": System(RNN, "r2l", False, "LSTM with attention, right to left"),
    "rnmt-no-interaction": System(RNN, "both", False, "one LSTM for both directions, which do not see each other"),
    "bi-rnmt": System(RNN, "both", True, "one LSTM for both directions, each reading the other's states"),
    "abd-rnmt": System(
        AsynchronousRNN, "l2r", True, "LSTM with attention, left to right, reading what an r2l decoder has said first"
    ),
    "rerank": System(
        Transformer,
        "both",
        False,
        "an l2r and an r2l run, or any: they rescore what all have found",
        of_runs=True,
    ),
    "ensemble": System(
        Transformer,
        "both",
        False,
        "runs that search as one: the mean of their log-probabilities",
        of_runs=True,
    ),
}


OF_RUNS = [name for name, system in SYSTEMS.items() if system.of_runs]


def system_of(config: Config) -> System:
    """The system that a configuration names."""
    if config.system not in SYSTEMS:
        raise ConfigError(f"system: must be one of {', '.join(SYSTEMS)}, got {config.system!r}")
    return SYSTEMS[config.system]


def resolve(config: Config) -> Config:
    """Fill in what the system decides: direction, interaction, and with them the search's direction."""
    system = system_of(config)
    model = config.model
    if system.of_runs:
        return _resolved_of_runs(config)
    if config.runs is not None:
        raise ConfigError(f"runs: belongs to the systems {' and '.join(OF_RUNS)}, but system is {config.system}")
    if model.direction not in (None, system.direction):
        raise ConfigError(f"model.direction: system {config.system} is {system.direction}, got {model.direction!r}")
    if model.interaction and not system.interaction:
        able = next(name for name, s in SYSTEMS.items() if s.model is system.model and s.interaction)
        raise ConfigError(f"model.interaction: system {config.system} has none, got on; `{able}` has")
    interaction = system.interaction if model.interaction is None else model.interaction
    direction = config.search.direction or system.direction
    if system.direction != "both" and direction != system.direction:
        raise ConfigError(
            f"search.direction: system {config.system} decodes {system.direction} only, got {direction!r}"
        )
    return changed(
        config, model={"direction": system.direction, "interaction": interaction}, search={"direction": direction}
    )


def _resolved_of_runs(config: Config) -> Config:
    """Directions and interaction are the runs' own: they are filled in when these are known, whatever stood there."""
    if config.system == "ensemble" and config.runs is None:
        raise ConfigError("runs: is required for system ensemble: two or more trained runs, for instance [one/, two/]")
    if config.system == "rerank" and config.search.rerank == "self":
        raise ConfigError("search.rerank: the runs of a rerank run rescore in any case; `self` is for a single model")
    return changed(config, model={"direction": None, "interaction": None})


def one_direction(config: Config, direction: str) -> Config:
    """The same recipe for the system that differs in decoding one direction only."""
    family = system_of(config).model
    family = family.first_model if issubclass(family, TwoPass) else family
    name = next(
        name for name, s in SYSTEMS.items() if s.model is family and s.direction == direction and not s.interaction
    )
    unset = {"direction": None, "interaction": None}
    search = {"direction": None, "rerank": "none", "rerank_future": "none"}
    return resolve(changed(config, system=name, strategy=None, runs=None, model=unset, search=search))


def build(config: Config, source_size: int, target_size: int) -> Seq2Seq:
    """A model with fresh weights, for a resolved configuration."""
    return system_of(config).model(_model_config(config), source_size, target_size)


def _model_config(config: Config) -> ModelConfig:
    assert config.model.direction is not None, "resolve the configuration first"
    return config.model
