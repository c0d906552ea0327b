"""A run and a validation set -> the length penalty, and the weight of rescoring, that score best there.

The set is searched once. No hypothesis lives or dies by its length, so the n-best list under every length penalty is
part of what the same search completes, and a weight only puts candidates in another order: what is chosen is what
decoding anew would find with it. Only a model with two passes is searched for each penalty, by which its first one
chooses what the second reads.

run/config.yaml     search.length_penalty and search.rerank_weight, with the search options they were chosen under
    tuned.json      every value that was tried, with what it gave
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bothways import config as configuration
from bothways.config import SearchConfig, changed
from bothways.data.corpus import EvalSet, Prepared
from bothways.errors import ConfigError, DataError
from bothways.evaluate.scores import digits, gain, label, make_metric
from bothways.models.interface import TwoPass
from bothways.rescoring import Jury
from bothways.run import Say
from bothways.search.hypothesis import Found, Hypothesis
from bothways.search.rerank import rerank, under, union, weights_of
from bothways.tokens import Direction
from bothways.train.checkpoint import write_json, write_text
from bothways.translator import Translator, before_rescoring, in_batches, search_each
from bothways.version import program

FORMAT = "bothways tuned 1"
PENALTIES = [round(0.1 * i, 1) for i in range(21)]
WEIGHTS = [round(0.1 * i, 1) for i in range(11)]
Setting = tuple[float, float]  # a length penalty and a weight
Text = tuple[int, ...]  # in reading order


@dataclass(frozen=True)
class Value:
    """What the set scores under a setting."""

    length_penalty: float
    rerank_weight: float
    score: float
    length_ratio: float


@dataclass(frozen=True)
class Tuned:
    """All that was tried, and what was chosen."""

    values: list[Value]  # by length penalty, then by weight
    before: Value
    chosen: Value
    metric: str
    signature: str


def tune(
    run: str | Path,
    on: str | None = None,
    metric: str = "bleu",
    data: str | Path | None = None,
    *,
    checkpoint: str = "best",
    device: str | None = None,
    say: Say = lambda _: None,
    **search_options: Any,
) -> Tuned:
    """Choose by a metric on a validation set (by default the first) of the run's data, or of `data`; write it down."""
    translator = Translator.open(run, checkpoint=checkpoint, device=device, say=say, **search_options)
    future = search_options.get("rerank_future")
    if future is not None and not translator.rescores:
        raise ConfigError(f"--future belongs to --rerank self, got {future!r} without it")
    prepared = Prepared.open(data or translator.run.config.data)
    valid = _validation_set(prepared, on)
    config = translator.config
    penalties = sorted({*PENALTIES, config.length_penalty})
    weights = sorted({*WEIGHTS, config.rerank_weight}) if translator.has_weight else [config.rerank_weight]
    say(f"{run}: searching {valid.name} ({len(valid.pair):,} sentences)")
    tuned = measured(translator, valid, metric, best_texts(translator, valid.source_lines(), penalties, weights))
    chosen = {"length_penalty": tuned.chosen.length_penalty}
    if translator.has_weight:
        chosen["rerank_weight"] = tuned.chosen.rerank_weight
    written = changed(translator.run.config, search={**search_options, **chosen})
    about = {"format": FORMAT, "on": valid.name, "data": prepared.fingerprint}
    recipe = {"checkpoint": checkpoint, "search": written.search.model_dump(), "program": program()}
    write_json(translator.run.folder / "tuned.json", {**about, **recipe, **asdict(tuned)})
    write_text(translator.run.folder / "config.yaml", configuration.dump(written))
    return tuned


def best_texts(
    translator: Translator, lines: Sequence[str], penalties: Sequence[float], weights: Sequence[float]
) -> list[dict[Setting, Text]]:
    """What every line becomes under every setting, by as few searches as can be; of an empty line, an empty text."""
    settings = [(penalty, weight) for penalty in penalties for weight in weights]
    results: list[dict[Setting, Text]] = [dict.fromkeys(settings, ()) for _ in lines]
    filled = [i for i, line in enumerate(lines) if line.strip()]
    sources = translator.encoded([lines[i] for i in filled])

    def work(places: list[int]) -> list[dict[Setting, Text]]:
        texts: list[dict[Setting, Text]] = [{} for _ in places]
        for some in _searched_together(translator, penalties):
            config = translator.config.model_copy(update={"length_penalty": some[0]})
            for text, more in zip(texts, _texts(translator, config, sources, places, some, weights), strict=True):
                text.update(more)
        return texts

    for place, texts in in_batches(sources, translator.config.batch_sentences, translator.device, work):
        results[filled[place]] = texts
    return results


def _searched_together(translator: Translator, penalties: Sequence[float]) -> list[Sequence[float]]:
    """One search serves all, unless a second pass reads what the first one chose by the penalty."""
    has_two_passes = any(isinstance(model, TwoPass) for model in translator.panel.members)
    return [[penalty] for penalty in penalties] if has_two_passes else [penalties]


def _texts(
    translator: Translator,
    config: SearchConfig,
    sources: Sequence[Sequence[int]],
    places: list[int],
    penalties: Sequence[float],
    weights: Sequence[float],
) -> list[dict[Setting, Text]]:
    """What these sources become under every setting, by one search."""
    panel, device, size = translator.panel, translator.device, before_rescoring(config).nbest
    memories, every = search_each(panel, sources, places, config, device, all_complete=True)
    lists = {p: [[_found_under(p, one, size) for one in sentences] for sentences in every] for p in penalties}
    texts: list[dict[Setting, Text]] = [{} for _ in places]
    if not translator.rescores:
        for penalty, found in lists.items():
            for b, one in enumerate(found[0]):
                texts[b] |= dict.fromkeys(((penalty, weight) for weight in weights), _first(one.hypotheses))
        return texts
    jury = Jury(panel, memories, config, device)
    jury.hear(every)
    if config.rerank_future == "none":  # whatever will be asked, in one pass
        whole = [union([one[b].hypotheses for found in lists.values() for one in found]) for b in range(len(places))]
        jury.log_probs(whole, every)
    for penalty, found in lists.items():
        candidates = [union([one.hypotheses for one in sentence]) for sentence in zip(*found, strict=True)]
        for b, judged in enumerate(jury.log_probs(candidates, found)):
            for weight in weights:
                shares = weights_of(jury.groups, weight)
                texts[b][penalty, weight] = _first(rerank(candidates[b], judged, shares, penalty))
    return texts


def measured(translator: Translator, valid: EvalSet, metric: str, found: Sequence[dict[Setting, Text]]) -> Tuned:
    """The metric under every setting, and the best one; of equals the one that changes least."""
    kinds, references = [make_metric(name) for name in (metric, "length_ratio")], valid.references()
    rows = {key: n for n, key in enumerate(dict.fromkeys((i, t) for i, one in enumerate(found) for t in one.values()))}
    texts = [translator.run.target_vocabulary.decode(list(text)) for _, text in rows]
    theirs = [[lines[i] for i, _ in rows] for lines in references]
    statistics = [np.asarray(kind.segments(texts, theirs)) for kind in kinds]
    values = {}
    for setting in found[0]:
        chosen = [rows[i, one[setting]] for i, one in enumerate(found)]
        score, ratio = (kind.score(x[chosen].sum(axis=0)) for kind, x in zip(kinds, statistics, strict=True))
        values[setting] = Value(*setting, score, ratio)
    now = values[translator.config.length_penalty, translator.config.rerank_weight]
    best = max(values.values(), key=lambda value: _merit(metric, value, now))
    return Tuned(list(values.values()), now, best, metric, kinds[0].signature(len(references)))


def table(tuned: Tuned) -> str:
    """A line for each length penalty, with the best weight for it."""
    has_weight = len({value.rerank_weight for value in tuned.values}) > 1
    best: dict[float, Value] = {}
    for value in tuned.values:
        other = best.setdefault(value.length_penalty, value)
        best[value.length_penalty] = max(other, value, key=lambda one: _merit(tuned.metric, one, tuned.before))
    name, places = label(tuned.metric), digits(tuned.metric)
    head = f"{'α':>5}" + (f"  {'weight':>6}" if has_weight else "") + f"  {name:>8}  length ratio"
    lines = []
    for value in [*best.values(), *([] if tuned.before in best.values() else [tuned.before])]:
        weight = f"  {value.rerank_weight:6.2f}" if has_weight else ""
        said = [word for word, one in (("chosen", tuned.chosen), ("before", tuned.before)) if value == one]
        cells = f"{weight}  {value.score:8.{places}f}  {value.length_ratio:12.3f}"
        lines.append(f"{value.length_penalty:5.2f}{cells}  {', '.join(said)}")
    return "\n".join(line.rstrip() for line in [head, *lines, tuned.signature])


def _merit(metric: str, value: Value, before: Value) -> tuple[float, float]:
    """How much better than before, and how near to it: both the more the better."""
    change = abs(value.length_penalty - before.length_penalty) + abs(value.rerank_weight - before.rerank_weight)
    return gain(metric, value.score, before.score), -change


def _validation_set(prepared: Prepared, name: str | None) -> EvalSet:
    if not prepared.valid:
        raise DataError(f"{prepared.folder}: has no validation set; give `bothways prepare` one by --valid")
    if name is None:
        return next(iter(prepared.valid.values()))
    if name not in prepared.valid:
        why = " (it is a test set, on which nothing is chosen)" if name in prepared.test else ""
        raise ConfigError(f"--on: must be one of {', '.join(prepared.valid)}, got {name!r}{why}")
    return prepared.valid[name]


def _found_under(penalty: float, every: Found, size: int) -> Found:
    """The result of the same search under this length penalty."""
    complete = [hypothesis for hypothesis in every.hypotheses if not hypothesis.cut_off]
    best: dict[Direction, Hypothesis] = {}
    for hypothesis in [*under(penalty, complete, len(complete)), *every.best.values()]:
        best.setdefault(hypothesis.direction, hypothesis)
    return replace(every, hypotheses=under(penalty, complete, size) or every.hypotheses, best=best)


def _first(hypotheses: Sequence[Hypothesis]) -> Text:
    return tuple(hypotheses[0].reading_order) if hypotheses else ()
