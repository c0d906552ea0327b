"""Every system by name, in plain sight."""

from dataclasses import dataclass
from typing import Literal

from bothways.config import Config, ModelConfig, changed
from bothways.errors import ConfigError
from bothways.models.interface import Seq2Seq
from bothways.models.rnn import RNN
from bothways.models.transformer import Transformer


@dataclass(frozen=True)
class System:
    """A model class with its directions."""

    model: type[Transformer] | type[RNN]
    direction: Literal["l2r", "r2l", "both"]
    interaction: bool
    meaning: str


SYSTEMS = {
    "transformer-l2r": System(Transformer, "l2r", False, "Transformer, left to right"),
    "transformer-r2l": System(Transformer, "r2l", False, "Transformer, right to left"),
    "no-interaction": System(
        Transformer, "both", False, "one Transformer for both directions, which do not see each other"
    ),
    "bift": System(Transformer, "both", True, "one Transformer for both directions, each reading the other's words"),
    "rnmt-l2r": System(RNN, "l2r", False, "LSTM with attention, left to right"),
    "rnmt-r2l": System(RNN, "r2l", False, "LSTM with attention, right to left"),
    "rnmt-no-interaction": System(RNN, "both", False, "one LSTM for both directions, which do not see each other"),
    "bi-rnmt": System(RNN, "both", True, "one LSTM for both directions, each reading the other's states"),
}


def system_of(config: Config) -> System:
    """The system that a configuration names."""
    if config.system not in SYSTEMS:
        raise ConfigError(f"system: must be one of {', '.join(SYSTEMS)}, got {config.system!r}")
    return SYSTEMS[config.system]


def resolve(config: Config) -> Config:
    """Fill in what the system decides: direction, interaction, and with them the search's direction."""
    system = system_of(config)
    model = config.model
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


def one_direction(config: Config, direction: str) -> Config:
    """The same recipe for the system that differs in decoding one direction only."""
    family = system_of(config).model
    name = next(
        name for name, s in SYSTEMS.items() if s.model is family and s.direction == direction and not s.interaction
    )
    unset = {"direction": None, "interaction": None}
    return resolve(changed(config, system=name, strategy=None, model=unset, search={"direction": None}))


def build(config: Config, source_size: int, target_size: int) -> Seq2Seq:
    """A model with fresh weights, for a resolved configuration."""
    return system_of(config).model(_model_config(config), source_size, target_size)


def _model_config(config: Config) -> ModelConfig:
    assert config.model.direction is not None, "resolve the configuration first"
    return config.model
