"""A configuration in, a trained run out: data, model, validation and strategy put together."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from bothways import config as configuration
from bothways.config import Config, SearchConfig
from bothways.data.batch import Builder, Decoded, PairBuilder, TripleBuilder
from bothways.data.corpus import EvalSet, Prepared
from bothways.data.sampler import rows_of
from bothways.decoding import Job, decode_parts
from bothways.errors import ConfigError
from bothways.evaluate.scores import METRICS
from bothways.evaluate.scores import score as score_text
from bothways.models.interface import Seq2Seq
from bothways.models.table import resolve
from bothways.run import Run, device_of, must_agree, start_from
from bothways.tokens import DIRECTIONS, L2R, R2L, turn
from bothways.train.checkpoint import Checkpoints, write_text
from bothways.train.loop import Trainer, Validate
from bothways.train.strategy import Part, Plan, run_stages
from bothways.translator import Translator, decoded_futures, force
from bothways.version import program


def train(
    config: Config | str | Path | dict[str, Any],
    output: str | Path,
    overrides: Sequence[str] = (),
    device: str | None = None,
    quiet: bool = False,
) -> Run:
    """Train a run, all stages of its strategy included, from wherever it stands."""
    if isinstance(config, dict):
        config = configuration.parse(config)
    if not isinstance(config, Config):
        config = configuration.load(config, overrides)
    elif overrides:
        raise ConfigError("overrides belong to a configuration file; change the configuration itself instead")
    config, output = resolve(config), Path(output)
    if device is not None and ":" in device_of(device):
        raise ConfigError(f"--device: must be cpu or cuda, got {device!r}; CUDA_VISIBLE_DEVICES chooses the GPU")
    prepared = Prepared.open(config.data)
    _must_be_trainable(config, prepared)
    console = Console(stderr=True, quiet=quiet or PartialState(cpu=device == "cpu").process_index > 0, highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    def train_stage(stage: Config, folder: Path) -> None:
        _train_once(stage, folder, prepared, device, quiet, say)

    def decode_stage(parts: Sequence[Part], folder: Path) -> None:
        _decode(config, parts, folder, prepared, device, say)

    if config.strategy is None:
        train_stage(config, output)
    else:
        state = PartialState(cpu=device == "cpu")
        if state.is_main_process:
            _begin_recipe(config, output)
        state.wait_for_everyone()
        plan = Plan(config, output, prepared.train, train_stage, decode_stage)
        run_stages(plan, _about(prepared), say, state.is_main_process)
    return Run.open(output)


def _about(prepared: Prepared) -> dict[str, Any]:
    """What a manifest says beside a stage: the data by its checksums, and the program."""
    data = {"folder": str(prepared.folder), "fingerprint": prepared.fingerprint, "inputs": prepared.meta["inputs"]}
    return {"data": data, "program": program()}


def _begin_recipe(config: Config, output: Path) -> None:
    """Keep what a strategy was asked for, so that its stages are not mixed from two experiments."""
    recipe = output / "recipe.yaml"
    if recipe.exists():
        must_agree(output, configuration.load(recipe), config)
    elif (output / "config.yaml").exists() and not (output / "manifest.json").exists():
        raise ConfigError(f"{output}: holds a run that was trained without a strategy; give another --output")
    output.mkdir(parents=True, exist_ok=True)
    write_text(recipe, configuration.dump(config))


def _must_be_trainable(config: Config, prepared: Prepared) -> None:
    if config.strategy is not None and not config.model.interaction:
        raise ConfigError(f"strategy: is for systems with interaction (bift, bi-rnmt), but system is {config.system}")
    if config.strategy is None and config.model.interaction and config.decoded is None:
        raise ConfigError(
            "decoded: is required to train with interaction, since gold text as the future would leak the words to be "
            "predicted; set `strategy: {name: fine-tuning}`, which decodes it, or name a folder of decoded text"
        )
    if config.decoded is not None and not config.model.interaction and not config.train.pseudo_loss:
        raise ConfigError(
            f"decoded: system {config.system} reads no future; set train.pseudo_loss above 0 to train on decoded text "
            "as further targets, or leave `decoded` out"
        )
    accepted = ("loss", *METRICS)
    if config.train.metric not in accepted:
        raise ConfigError(f"train.metric: must be one of {', '.join(accepted)}, got {config.train.metric!r}")
    if config.model.share_embeddings == "all" and not prepared.joint:
        raise ConfigError(
            f"model.share_embeddings: `all` needs a joint vocabulary, but {prepared.folder} has separate ones; "
            "set it to `target` or `none`, or prepare with a joint vocabulary"
        )


def _train_once(
    config: Config, folder: Path, prepared: Prepared, device: str | None, quiet: bool, say: Callable[[str], None]
) -> None:
    state = PartialState(cpu=device == "cpu")
    if state.is_main_process:
        Run.create(folder, config, prepared)
    state.wait_for_everyone()
    run = Run.open(folder)
    model = run.fresh_model()
    if config.train.start_from and Checkpoints(folder).is_empty():
        vocabularies = (run.source_vocabulary, run.target_vocabulary)
        start_from(model, Path(config.train.start_from), vocabularies, say)
    Trainer(
        model,
        builder_of(config, prepared),
        config.train,
        folder,
        validate=validation_of(run, prepared),
        fresh_model=run.fresh_model,
        device=device,
        quiet=quiet,
    ).run()


def builder_of(config: Config, prepared: Prepared) -> Builder:
    """What training reads: pairs, with decoded text beside them if it is to be learned too, or triples."""
    pair, train, directions = prepared.train, config.train, DIRECTIONS[config.model.direction or "both"]
    rows = rows_of((pair.source.lengths, pair.target.lengths), train)
    if config.decoded is None:
        return PairBuilder(pair, directions, rows)
    decoded = Decoded.open(Path(config.decoded), prepared.fingerprint, directions)
    if config.model.interaction:
        return TripleBuilder(pair, decoded, train.pseudo_loss, train.max_length, rows)
    return PairBuilder(pair, directions, rows, decoded, train.pseudo_loss, train.max_length)


def validation_of(run: Run, prepared: Prepared) -> Validate | None:
    """Loss on the first validation set and, where a metric of text is wanted, that and its companions.

    With interaction the loss of each direction is taken under the other's decoded text, as search will see it.
    """
    if not prepared.valid:
        return None
    valid = next(iter(prepared.valid.values()))
    limit = run.config.train.validate_sentences
    sources = [valid.pair.source[i].tolist() for i in range(min(limit, len(valid.pair)))]
    targets = [valid.pair.target[i].tolist() for i in range(len(sources))]

    def validate(model: Seq2Seq) -> dict[str, float]:
        device = next(model.parameters()).device
        values = {"loss": _validation_loss(run, model, sources, targets, device)}
        if run.config.train.metric != "loss":
            values |= text_metrics(run, model, valid, len(sources), (run.config.train.metric, "length_ratio"))
        return values

    return validate


def _validation_loss(
    run: Run, model: Seq2Seq, sources: list[list[int]], targets: list[list[int]], device: torch.device
) -> float:
    """Negative log-likelihood per target token, over all directions."""
    total, count = 0.0, 0
    for direction in run.directions:
        futures = None
        if run.config.model.interaction:
            other = R2L if direction is L2R else L2R
            futures = decoded_futures(model, sources, other, _greedy(run.config.search), device)
        turned = [turn(tokens, direction) for tokens in targets]
        scores = force(model, sources, turned, direction, futures, device)
        total, count = total - sum(map(sum, scores)), count + sum(map(len, scores))
    return total / count


def text_metrics(run: Run, model: Seq2Seq, valid: EvalSet, count: int, metrics: Sequence[str]) -> dict[str, float]:
    """Metrics of decoded text, on the first `count` sentences."""
    translator = Translator(run, model, run.config.search, str(next(model.parameters()).device))
    outputs = [result.text for result in translator.translate(valid.source_lines()[:count])]
    references = [lines[:count] for lines in valid.references()]
    return {result.name: result.score for result in score_text(outputs, references, list(dict.fromkeys(metrics)))}


def _decode(
    recipe: Config,
    parts: Sequence[Part],
    output: Path,
    prepared: Prepared,
    device: str | None,
    say: Callable[[str], None],
) -> None:
    """Decode training sources as a strategy wants it."""
    assert recipe.strategy is not None
    search = _greedy(recipe.search) if recipe.strategy.greedy else recipe.search
    decode_parts(Job(prepared, "train", search, output, device), parts, say)


def _greedy(search: SearchConfig) -> SearchConfig:
    return search.model_copy(update={"greedy": True, "direction": "both", "nbest": 1})
