"""Every option once: its meaning, its default and its check.

A YAML file and `--section.option=value` both arrive in `load`; what comes out is frozen,
complete, and saved with the run.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from bothways.errors import ConfigError

# What `model.preset` stands for, in either family of models; any of these can still be set beside it.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"encoder_layers": 2, "decoder_layers": 2, "width": 128, "heads": 4, "feed_forward": 512},
    "small": {"encoder_layers": 4, "decoder_layers": 4, "width": 256, "heads": 4, "feed_forward": 1024},
    "base": {"encoder_layers": 6, "decoder_layers": 6, "width": 512, "heads": 8, "feed_forward": 2048},
    "big": {"encoder_layers": 6, "decoder_layers": 6, "width": 1024, "heads": 16, "feed_forward": 4096},
}
RNN_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"encoder_layers": 1, "decoder_layers": 1, "width": 192, "dropout": 0.2},
    "small": {"encoder_layers": 2, "decoder_layers": 2, "width": 384, "dropout": 0.2},
    "paper": {"encoder_layers": 2, "decoder_layers": 2, "width": 1000, "dropout": 0.2},
}
# Options of one family only: in the other they must stay at their defaults.
TRANSFORMER_ONLY = ("heads", "feed_forward", "norm", "future_weight", "future_weight_learned", "fusion")
RNN_ONLY = ("future_span",)


class Section(BaseModel):
    """What all sections share: frozen, strict about types, and closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        serialize_by_alias=True,
    )


class ModelConfig(Section):
    """The shape of the model and how its directions meet."""

    preset: Literal["tiny", "small", "base", "big", "paper"] | None = None
    """Fills in the shape, by the tables below; each option can still be set beside it."""
    direction: Literal["l2r", "r2l", "both"] | None = None
    """Filled in by `system`; setting it to something else than the system's is an error."""
    interaction: bool | None = None
    """Whether each direction reads the other's words. Filled in by `system`; off: two decoders sharing weights."""
    encoder_layers: int = Field(6, ge=1)
    """Layers of the encoder."""
    decoder_layers: int = Field(6, ge=1)
    """Layers of the decoder."""
    width: int = Field(512, ge=2)
    """Width of embeddings and layers (E)."""
    heads: int = Field(8, ge=1)
    """Transformer: attention heads; they divide the width."""
    feed_forward: int = Field(2048, ge=1)
    """Transformer: inner width of the feed-forward sub-layers."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on embeddings and on what attention, feed-forward and LSTM layers return."""
    norm: Literal["post", "pre"] = "post"
    """Transformer: layer normalization after each residual sum (Vaswani et al.) or before each sub-layer."""
    share_embeddings: Literal["all", "target", "none"] = "all"
    """`all`: source, target and output are one matrix (needs a joint vocabulary); `target`: target and output are."""
    future_weight: float = 0.1
    """Transformer: λ of the paper, the weight of the future in `tanh` and `linear` fusion; if learned, at the start."""
    future_weight_learned: bool = False
    """Transformer: learn λ, one scalar per decoder layer."""
    fusion: Literal["tanh", "linear", "gate"] = "tanh"
    """Transformer: how past and future combine, per head and before the output projection."""
    future_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on what the future branch returns (0.3 is known to have been used)."""
    future_span: Literal["printed", "current"] = "printed"
    """LSTM: position i reads its partner's states before i, as the paper prints it, or up to i."""


class SearchConfig(Section):
    """The synchronous beam search, and what it hands out."""

    direction: Literal["l2r", "r2l", "both"] | None = None
    """Which directions decode; unset means all that the model has."""
    beam: int = Field(4, ge=1)
    """Hypotheses kept per sentence. Both directions share them, so with both it must be even."""
    greedy: bool = False
    """Keep only the best candidate of each direction; a direction stops at its first end mark. `beam` is not used."""
    nbest: int = Field(1, ge=1)
    """Complete hypotheses returned per sentence, at most `beam`."""
    length_penalty: float = Field(0.6, ge=0)
    """α of score = log p / ((5 + n) / 6)^α; 0 ranks by plain log-probability."""
    max_length: int | None = Field(None, ge=1)
    """Most tokens before the end mark; unset means `max_length_factor` x source + `max_length_offset`."""
    max_length_factor: float = Field(1.0, ge=0)
    """See `max_length`."""
    max_length_offset: int = Field(50, ge=0)
    """See `max_length`."""
    pairing: Literal["rank", "best", "mix"] = "rank"
    """Whose future a hypothesis reads: the same rank's, the best one's, or a weighted mix of that half."""
    early_stop: bool = True
    """Stop a sentence once no live hypothesis can still enter its n-best; off runs to the maximum length."""
    batch_sentences: int = Field(64, ge=1)
    """Sentences decoded together. It changes speed and memory, never a result."""
    rerank: Literal["none", "self"] = "none"
    """`self`: a model with both directions scores every complete hypothesis that `beam` holds in both of them, and puts
    them in order by the weighted sum."""
    rerank_future: Literal["none", "decoded"] = "none"
    """What a direction sees of the other side when it rescores: nothing, or the other's best complete hypothesis."""
    rerank_weight: float = Field(0.5, ge=0, le=1)
    """Rescoring: the weight of r2l, or of the second of two runs; the first has the rest. More runs weigh alike."""

    @model_validator(mode="after")
    def _check(self) -> "SearchConfig":
        if self.rerank == "self" and self.direction in ("l2r", "r2l"):
            raise ValueError(f"rerank: `self` needs both directions to decode, got direction {self.direction}")
        if not self.greedy and self.nbest > self.beam:
            raise ValueError(f"nbest: must be at most beam ({self.beam}), got {self.nbest}")
        if self.direction == "both" and not self.greedy and self.beam % 2:
            raise ValueError(f"beam: must be even when both directions decode (each takes half), got {self.beam}")
        return self


class TrainConfig(Section):
    """One stage of training."""

    updates: int = Field(100_000, ge=1)
    """Optimizer updates in all."""
    batch_tokens: int = Field(25_000, ge=1)
    """Padded tokens of the longer side per update, over all processes together."""
    accumulation: int = Field(1, ge=1)
    """Parts that a process splits its share of an update into."""
    max_length: int = Field(256, ge=2)
    """Training pairs with more tokens on a side than this are left out; how many is said."""
    learning_rate: float = Field(7e-4, gt=0)
    """Peak, reached at the end of warm-up; then it falls with the inverse square root of the update."""
    warmup: int = Field(4_000, ge=1)
    """Updates of linear warm-up."""
    adam_betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field([0.9, 0.998], min_length=2, max_length=2)
    """Decay rates of Adam's two averages."""
    adam_epsilon: float = Field(1e-9, gt=0)
    """Adam's term against division by zero."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """Probability mass spread over the vocabulary in the loss."""
    clip: float = Field(1.0, ge=0)
    """Largest norm of the gradient; 0 does not clip."""
    pseudo_loss: float = Field(0.0, ge=0)
    """Weight of the loss on decoded text; above 0 mixes in sequence-level distillation."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the matrix products; weights and optimizer stay float32."""
    record: bool = True
    """On one GPU, record the passes of every padded shape as CUDA graphs and replay them; elsewhere without effect."""
    compile: bool = False
    """Compile the model's layers with torch.compile: a minute or more at the start, which long runs win back."""
    shard: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: copy the model to each, or shard it over them."""
    start_from: str | None = None
    """Another run whose weights this one starts with."""
    seed: int = Field(1, ge=0, lt=2**63)
    """Seeds weights, order and dropout."""
    validate_every: int = Field(1_000, ge=1)
    """Updates between validations."""
    validate_sentences: int = Field(2_000, ge=1)
    """Sentences of the first validation set that are used, for the loss and for metrics of decoded text."""
    metric: str = "loss"
    """What chooses the best checkpoint and stops early: `loss`, or a metric of text such as `bleu` or `exact_match`."""
    patience: int = Field(0, ge=0)
    """Stop after this many validations without a better `metric`; 0 never does."""
    save_every: int = Field(1_000, ge=1)
    """Updates between checkpoints."""
    keep: int = Field(5, ge=1)
    """Newest checkpoints kept; the best one is kept besides."""
    log_every: int = Field(100, ge=1)
    """Updates between log lines."""
    share: float = Field(1.0, gt=0, le=1)
    """Share of the training pairs that is trained on, at random, by seed."""
    folds: int = Field(1, ge=1)
    """Parts that the training pairs are divided into, by seed, for `without_fold`."""
    without_fold: int | None = Field(None, ge=1)
    """Train on all pairs but this part (from 1 on); a strategy with `folds` sets it."""
    max_skipped: int = Field(20, ge=1)
    """Give up after this many skipped (non-finite) updates between two log lines, or in a row."""

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if self.without_fold is not None and not self.without_fold <= self.folds > 1:
            raise ValueError(f"without_fold: must be one of 2 or more folds ({self.folds}), got {self.without_fold}")
        return self


class StrategyConfig(Section):
    """How a model with interaction is trained, as stages."""

    name: Literal["two-pass", "fine-tuning", "online", "asynchronous"]
    """`two-pass`: an l2r and an r2l model decode the sources. `fine-tuning`: one model without interaction decodes a
    share of them and goes on with interaction. `online`: as it goes on, an average of itself decodes them anew.
    `asynchronous`, for abd-transformer and abd-rnmt: an r2l model decodes the sources and becomes the first pass."""
    l2r: str | None = None
    """Two-pass: an l2r run that is there already; unset trains one."""
    r2l: str | None = None
    """Two-pass and asynchronous: an r2l run that is there already; unset trains one."""
    first: str | None = None
    """Fine-tuning and online: a run without interaction that is there already; unset trains one."""
    origin: str | None = Field(None, alias="from")
    """Weights that the last stage starts with: `scratch` or a run; unset means `scratch` for two-pass, the r2l run for
    asynchronous, else `first`."""
    share: float | None = Field(None, gt=0, le=1)
    """Share of the training pairs that is decoded and trained on; unset means 0.1 for fine-tuning, else all."""
    folds: int = Field(1, ge=1)
    """Parts of the training pairs, each decoded by a model that was not trained on it; 1: one model decodes all."""
    updates: int | None = Field(None, ge=1)
    """Updates of the last stage; unset means `train.updates` for two-pass and asynchronous, else a tenth of it."""
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of the last stage; unset means `train.learning_rate`."""
    warmup: int | None = Field(None, ge=1)
    """Warm-up of the last stage; unset means `train.warmup`."""
    batch_tokens: int | None = Field(None, ge=1)
    """Batch of the last stage; unset means `train.batch_tokens`."""
    greedy: bool = True
    """Decode the training sources greedily (fast), or with `search`."""
    refresh: int = Field(200, ge=1)
    """Online: updates between two decodings; only what the next ones will read is decoded."""
    average: int = Field(5, ge=1)
    """Online: how many checkpoints, evenly spaced over the last `refresh` updates, are averaged to decode."""

    @model_validator(mode="after")
    def _check(self) -> "StrategyConfig":
        belongs = {
            "two-pass": ("l2r", "r2l", "folds"),
            "fine-tuning": ("first", "folds"),
            "online": ("first",),
            "asynchronous": ("r2l", "folds"),
        }
        for option in ("l2r", "r2l", "first", "folds"):
            value = getattr(self, option)
            if option not in belongs[self.name] and value != StrategyConfig.model_fields[option].default:
                raise ValueError(f"{option}: does not belong to {self.name}, got {value!r}")
        if self.folds > 1 and (self.l2r or self.r2l):
            raise ValueError(f"folds: takes models that it trains itself, not l2r or r2l, got {self.folds}")
        if self.refresh < self.average:
            raise ValueError(f"average: must be at most refresh ({self.refresh}), got {self.average}")
        return self


class Config(Section):
    """One run."""

    system: str
    """What to train, by name; `bothways systems` lists them."""
    data: str
    """Folder written by `bothways prepare`."""
    decoded: str | None = None
    """Folder of decoded training sources: the futures that training with interaction needs (a strategy fills it in), or
    for a system without interaction further targets, with the weight `train.pseudo_loss`."""
    model: ModelConfig = ModelConfig()
    """The model."""
    search: SearchConfig = SearchConfig()
    """Decoding, and decoding during validation."""
    train: TrainConfig = TrainConfig()
    """Training."""
    strategy: StrategyConfig | None = None
    """Stages before and after; unset trains once."""
    runs: list[str] | None = None
    """Systems `rerank` and `ensemble`: two or more trained runs that share a vocabulary. Unset, `rerank` first trains
    one from left to right and one from right to left."""

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.runs is not None and len(self.runs) < 2:
            raise ValueError(f"runs: must name two or more runs, got {self.runs}")
        model, is_rnn = self.model, _is_rnn(self.system)
        presets = presets_of(self.system)
        if model.preset not in (None, *presets):
            raise ValueError(
                f"model.preset: must be one of {', '.join(presets)} for {self.system}, got {model.preset!r}"
            )
        for option in TRANSFORMER_ONLY if is_rnn else RNN_ONLY:
            value = getattr(model, option)
            if value != ModelConfig.model_fields[option].default:
                raise ValueError(f"model.{option}: does not belong to {self.system}, got {value!r}")
        if not is_rnn and model.width % model.heads:
            raise ValueError(f"model.width: must be a multiple of heads ({model.heads}), got {model.width}")
        if not is_rnn and model.width % 2:
            raise ValueError(f"model.width: must be even (sinusoidal positions come in pairs), got {model.width}")
        return self


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "search": SearchConfig,
    "train": TrainConfig,
    "strategy": StrategyConfig,
}
KINDS = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text", list[str]: "list of text"}
REFERENCE_HEAD = """# Options

One YAML file describes a run, and `--section.option=value` on the command line overrides it. An unknown key, a wrong
type or an impossible value is an error that names the key. This page is written by
`python -m bothways.config > docs/options.md`."""


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as everyone expects."""


class _Dumper(yaml.SafeDumper):
    """YAML in which the text `1e-3` has quotes."""


for _either in (_Loader, _Dumper):
    _either.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def load(path: str | Path | None, overrides: Sequence[str] = (), **extra: Any) -> Config:
    """Read a YAML file, then `a.b=c` overrides (a leading -- is allowed); `extra` fills whole keys of the top level."""
    raw: dict[str, Any] = {}
    if path is not None:
        raw = _read(Path(path))
    for override in overrides:
        name, value = split_override(override)
        _assign(raw, name.split("."), value, override)
    return parse({**raw, **extra}, where=str(path) if path is not None else "the command line")


def parse(raw: Mapping[str, Any], where: str = "the configuration") -> Config:
    """Check a nested mapping and fill in presets and defaults."""
    raw = dict(raw)
    model = raw.get("model")
    presets = presets_of(str(raw.get("system")))
    if isinstance(model, Mapping) and model.get("preset") in presets:
        raw["model"] = {**presets[model["preset"]], **model}
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, where)) from None


def presets_of(system: str) -> dict[str, dict[str, Any]]:
    """The presets of a system's family."""
    return RNN_PRESETS if _is_rnn(system) else PRESETS


def _is_rnn(system: str) -> bool:
    """Whether a system is of the LSTM family; their names say it."""
    return "rnmt" in system


def split_override(override: str) -> tuple[str, Any]:
    """`--search.beam=8` -> ("search.beam", 8)."""
    name, equals, value = override.removeprefix("--").partition("=")
    if not equals or not name:
        raise ConfigError(
            f"override {override!r} must have the form --section.option=value, for instance --search.beam=4"
        )
    try:
        return name, yaml.load(value, _Loader)
    except yaml.YAMLError:
        raise ConfigError(f"the value of override {override!r} is not valid YAML; put it in quotes") from None


def changed(config: Config, **sections: Any) -> Config:
    """The same configuration with keys of its sections (or whole keys) replaced, checked anew."""
    raw = config.model_dump()
    for name, value in sections.items():
        merge = isinstance(value, Mapping) and isinstance(raw[name], Mapping)
        raw[name] = {**raw[name], **value} if merge else value
    return parse(raw)


def dump(config: Config) -> str:
    """YAML of every option, resolved."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def explain(error: ValidationError, where: str) -> str:
    """One line for each thing that is wrong: the key, the value, what is accepted."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        value = item["input"]
        if item["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key; accepted here: {', '.join(_accepted(item['loc']))}")
        elif item["type"] == "missing":
            lines.append(f"{key}: is required")
        elif item["type"] == "value_error":
            lines.append(f"{key}.{item['ctx']['error']!s}" if key else str(item["ctx"]["error"]))
        else:
            message = item["msg"].removeprefix("Input ").replace("should be", "must be", 1)
            lines.append(f"{key}: {message}, got {value!r}")
    return f"{where}: " + "; ".join(lines)


def reference() -> str:
    """docs/options.md: every option with what it accepts, its default and its meaning, from this file."""
    parts = [REFERENCE_HEAD]
    sections: dict[str, type[Section]] = {"": Config, **SECTIONS}
    for name, section in sections.items():
        title = f"`{name}`" if name else "The whole file"
        rows = [
            f"| `{name}{'.' if name else ''}{field.alias or key}` | {_accepts(field)} | {_default(field)} | "
            f"{' '.join((field.description or '').split())} |"
            for key, field in section.model_fields.items()
        ]
        text = "" if section is Config else f"{section.__doc__}\n\n"
        parts.append(
            f"## {title}\n\n{text}| Option | Accepts | Default | Meaning |\n|---|---|---|---|\n" + "\n".join(rows)
        )
    for family, presets in (("Transformers", PRESETS), ("LSTMs (`rnmt` in the system's name)", RNN_PRESETS)):
        head = "| Preset | " + " | ".join(f"`{key}`" for key in presets["tiny"]) + " |"
        rows = [f"| `{name}` | " + " | ".join(map(str, values.values())) + " |" for name, values in presets.items()]
        rule = "|---" * (1 + len(presets["tiny"])) + "|"
        parts.append("\n".join([f"## Presets of `model.preset`: {family}", "", head, rule, *rows]))
    return "\n\n".join(parts) + "\n"


def _accepts(field: FieldInfo) -> str:
    """A field's type and bounds, in words."""
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
    if get_origin(field.annotation) is Literal:
        words = [f"`{value}`" for value in kinds]
    elif get_origin(field.annotation) is list:
        words = ["two numbers"]
    else:
        words = []
        for kind in kinds:
            if get_origin(kind) is Literal:
                words += [f"`{value}`" for value in get_args(kind)]
            else:
                is_section = isinstance(kind, type) and issubclass(kind, Section)
                words.append("options, see below" if is_section else KINDS[kind])
    signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    bounds = [
        f"{sign} {getattr(bound, name)}"
        for bound in field.metadata
        for name, sign in signs
        if getattr(bound, name, None) is not None and getattr(bound, name) < 2**60
    ]
    optional = ["or unset"] if type(None) in get_args(field.annotation) else []
    return " ".join([", ".join([*words, *bounds]), *optional])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "unset"
    if isinstance(field.default, Section):
        return "see below"
    return f"`{json.dumps(field.default)}`" if not isinstance(field.default, str) else f"`{field.default}`"


def _accepted(location: Sequence[str | int]) -> list[str]:
    """The keys of the section that an unknown key stands in."""
    section: type[Section] = Config
    for part in location[:-1]:
        section = SECTIONS.get(str(part), section)
    return [field.alias or name for name, field in section.model_fields.items()]


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold keys such as `system:` and `data:`, but holds {type(raw).__name__}")
    return raw


def _assign(raw: dict[str, Any], names: Sequence[str], value: Any, override: str) -> None:
    *sections, last = names
    for name in sections:
        if raw.get(name) is None:
            raw[name] = {}
        raw = raw[name]
        if not isinstance(raw, dict):
            raise ConfigError(f"override {override!r}: {name} is not a section")
    raw[last] = value


if __name__ == "__main__":
    print(reference(), end="")
