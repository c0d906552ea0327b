"""A configuration in, a trained run out: data, model, validation and strategy put together."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from rich.console import Console

from bothways import config as configuration
from bothways.config import Config, SearchConfig
from bothways.data.batch import Builder, Decoded, PairBuilder, TripleBuilder
from bothways.data.corpus import EvalSet, Prepared, TextsWriter, writing
from bothways.errors import ConfigError, DataError
from bothways.evaluate.scores import METRICS
from bothways.evaluate.scores import score as score_text
from bothways.models.interface import Seq2Seq
from bothways.models.table import resolve
from bothways.run import Run, device_of, must_agree, start_from
from bothways.tokens import DIRECTIONS, L2R, R2L, Direction, turn
from bothways.train.checkpoint import Checkpoints, write_json, write_text
from bothways.train.loop import Trainer, Validate
from bothways.train.strategy import fine_tuning, run_stages
from bothways.translator import Translator, decode, decoded_futures, force

SHARD = 4_096  # training sources decoded at a time; a shard that is finished is not decoded again


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

    def decode_stage(recipe: Config, run: Path, folder: Path) -> None:
        decode_training_sources(recipe, run, folder, prepared, device, say)

    if config.strategy is None:
        train_stage(config, output)
    else:
        state = PartialState(cpu=device == "cpu")
        if state.is_main_process:
            _begin_recipe(config, output)
        state.wait_for_everyone()
        run_stages(fine_tuning(config, output, train_stage, decode_stage), output, say, state.is_main_process)
    return Run.open(output)


def _begin_recipe(config: Config, output: Path) -> None:
    """Keep what a strategy was asked for, so that its stages are not mixed from two experiments."""
    recipe = output / "recipe.yaml"
    if recipe.exists():
        must_agree(output, configuration.load(recipe), config)
    elif (output / "config.yaml").exists() and not (output / "stages.json").exists():
        raise ConfigError(f"{output}: holds a run that was trained without a strategy; give another --output")
    output.mkdir(parents=True, exist_ok=True)
    write_text(recipe, configuration.dump(config))


def _must_be_trainable(config: Config, prepared: Prepared) -> None:
    if config.strategy is not None and not config.model.interaction:
        raise ConfigError(f"strategy: is for systems with interaction (bift), but system is {config.system}")
    if config.strategy is None and config.model.interaction and config.decoded is None:
        raise ConfigError(
            "decoded: is required to train with interaction, since gold text as the future would leak the words to be "
            "predicted; set `strategy: {name: fine-tuning}`, which decodes it, or name a folder of decoded text"
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
    """What training reads: pairs, or, with interaction, triples."""
    if not config.model.interaction:
        return PairBuilder(prepared.train, DIRECTIONS[config.model.direction or "both"])
    assert config.decoded is not None
    decoded = Decoded.open(Path(config.decoded), prepared.fingerprint)
    return TripleBuilder(prepared.train, decoded, config.train.pseudo_loss, config.train.max_length)


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


def decode_training_sources(
    recipe: Config, run_folder: Path, output: Path, prepared: Prepared, device: str | None, say: Callable[[str], None]
) -> None:
    """Decode a random share of the training sources in both directions, shard by shard, for `Decoded` to read.

    Processes take turns at the shards. A shard that is there already is kept if the same weights, settings and rows
    would make it again, which the name of its folder says.
    """
    assert recipe.strategy is not None
    state = PartialState(cpu=device == "cpu")
    search = _greedy(recipe.search) if recipe.strategy.greedy else recipe.search
    translator = Translator.open(run_folder, device=device, say=say, **{**search.model_dump(), "direction": "both"})
    rows = training_share(prepared, recipe.strategy.share, recipe.train.max_length, recipe.train.seed)
    shards = output / f"shards-{_identity(translator, prepared, rows)}"
    with writing(output):
        shards.mkdir(parents=True, exist_ok=True)
        starts = range(0, len(rows), SHARD)
        for number, begin in enumerate(starts):
            if number % state.num_processes != state.process_index:
                continue
            part = shards / f"{number:05d}.npz"
            if not part.exists():
                _decode_shard(translator, prepared, rows[begin : begin + SHARD], part)
            say(f"decoded {min(begin + SHARD, len(rows))} of {len(rows)} training sources")
        state.wait_for_everyone()
        if state.is_main_process:
            _join_shards(output, rows, [shards / f"{i:05d}.npz" for i in range(len(starts))], prepared)
            for folder in output.glob("shards-*"):
                shutil.rmtree(folder)
    state.wait_for_everyone()


def _identity(translator: Translator, prepared: Prepared, rows: np.ndarray) -> str:
    """The same for the same decoded text: a digest of weights, settings, data and rows."""
    settings = (prepared.fingerprint, translator.config.model_dump(exclude={"batch_sentences"}), SHARD)
    digest = hashlib.sha256(json.dumps(settings).encode())
    digest.update(rows.tobytes())
    for parameter in translator.model.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def training_share(prepared: Prepared, share: float, max_length: int, seed: int) -> np.ndarray:
    """Rows of the training corpus: a random share of those that training would not leave out, in corpus order."""
    longest = np.maximum(prepared.train.source.lengths, prepared.train.target.lengths)
    fitting = np.flatnonzero(longest <= max_length)
    count = max(1, round(share * len(fitting))) if len(fitting) else 0
    if not count:
        raise DataError(f"train.max_length: all training pairs are longer than {max_length} tokens")
    return np.sort(np.random.default_rng([seed, 0]).permutation(fitting)[:count])


def _decode_shard(translator: Translator, prepared: Prepared, rows: np.ndarray, path: Path) -> None:
    sources = [prepared.train.source[int(row)].tolist() for row in rows]
    texts: dict[Direction, list[list[int]]] = {d: [[]] * len(rows) for d in (L2R, R2L)}
    usable = np.zeros((len(rows), 2), dtype=bool)
    for i, found in decode(translator.model, sources, (L2R, R2L), translator.config, translator.device):
        for direction, hypothesis in found.best.items():
            texts[direction][i] = hypothesis.reading_order
            usable[i, direction] = bool(hypothesis.tokens) and not hypothesis.cut_off
    arrays: dict[str, Any] = {"usable": usable}
    for direction in (L2R, R2L):
        arrays[f"{direction.label}_lengths"] = np.array([len(ids) for ids in texts[direction]], dtype=np.int64)
        arrays[f"{direction.label}_ids"] = np.array([i for ids in texts[direction] for i in ids], dtype=np.int64)
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **arrays)
    temporary.rename(path)


def _join_shards(output: Path, rows: np.ndarray, parts: Sequence[Path], prepared: Prepared) -> None:
    usable = []
    size = prepared.target_vocabulary.size
    with TextsWriter(output, "l2r", size) as l2r, TextsWriter(output, "r2l", size) as r2l:
        for part in parts:
            with np.load(part) as arrays:
                usable.append(arrays["usable"])
                for writer, label in ((l2r, "l2r"), (r2l, "r2l")):
                    bounds = np.cumsum(arrays[f"{label}_lengths"])[:-1]
                    writer.append([ids.tolist() for ids in np.split(arrays[f"{label}_ids"], bounds)])
    np.save(output / "rows.npy", rows)
    np.save(output / "usable.npy", np.concatenate(usable))
    write_json(output / "meta.json", {"data": prepared.fingerprint, "sources": len(rows)})


def _greedy(search: SearchConfig) -> SearchConfig:
    return search.model_copy(update={"greedy": True, "direction": "both", "nbest": 1})
