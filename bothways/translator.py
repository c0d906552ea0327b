"""Text in, text out: the whole pipeline.

    texts -> ids -> batches of like length -> model -> search -> hypotheses -> texts

Training, validation and the command line decode through the same functions.
"""

import atexit
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from bothways import kernels
from bothways.config import SearchConfig, changed
from bothways.errors import DataError, SearchError
from bothways.models.ensemble import Panel
from bothways.models.interface import Memory, Seq2Seq, TwoPass, TwoPassMemory
from bothways.rescoring import Given, Jury, force_rows, padded, rescored
from bothways.run import Run, Say, device_of
from bothways.search.beam import Plan, search
from bothways.search.hypothesis import Found, Hypothesis, Trace, length_norm
from bothways.search.recorded import Recorder
from bothways.search.rerank import rerank
from bothways.tokens import DIRECTIONS, END, L2R, R2L, Direction, turn

LONGEST_SOURCE = 1024  # tokens; longer sentences are refused rather than decoded badly and slowly
MOST_WORKERS = 4  # that decode on a CPU; more of them would wait for Python's lock, so they get more cores each
CPU_IS_FULL = "DefaultCPUAllocator: can't allocate memory"  # PyTorch's words; it has no class for this error
WINDOW = 16  # batches that are read ahead, so that sentences of like length are decoded together
T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """One hypothesis as text."""

    text: str
    score: float  # length-normalized log-probability
    direction: str  # which direction generated it: "l2r" or "r2l"
    cut_off: bool  # it has no end mark: the maximum length, or the end of the search, came first
    tokens: list[str]  # subwords in reading order; the end mark stands where it was generated: last, of r2l first
    token_scores: list[float]  # their log-probabilities


@dataclass(frozen=True)
class Translation:
    """What one source became."""

    source: str
    hypotheses: list[Output]  # best first
    best: dict[str, Output]  # the best of each direction that decoded; of two passes, what the first said is r2l's
    trace: Trace | None = None  # every step of the search, on request

    @property
    def text(self) -> str:
        """The best hypothesis' text."""
        return self.hypotheses[0].text if self.hypotheses else ""

    @property
    def score(self) -> float:
        """The best hypothesis' score."""
        return self.hypotheses[0].score if self.hypotheses else 0.0

    @property
    def direction(self) -> str:
        """The direction that won."""
        return self.hypotheses[0].direction if self.hypotheses else ""

    @property
    def tokens(self) -> list[str]:
        """The best hypothesis' subwords, see Output."""
        return self.hypotheses[0].tokens if self.hypotheses else []

    @property
    def token_scores(self) -> list[float]:
        """Their log-probabilities."""
        return self.hypotheses[0].token_scores if self.hypotheses else []


class Translator:
    """A run, ready to decode. Results do not depend on what a sentence is batched with."""

    def __init__(self, run: Run, model: Seq2Seq | Panel, config: SearchConfig, device: str = "cpu") -> None:
        self.run, self.model, self.config, self.device = run, model, config, torch.device(device)
        self.directions = run.directions if config.direction is None else DIRECTIONS[config.direction]
        missing = [d for d in self.directions if d not in run.directions]
        if missing:
            has = " and ".join(d.label for d in run.directions)
            raise SearchError(
                f"search.direction: {run.folder} is a {run.config.system} run and decodes {has} only, "
                f"got {config.direction!r}"
            )
        if self.rescores and config.rerank_future == "decoded":
            self._must_read_futures()
        if isinstance(model, Panel):
            self._must_be_of_panel(model)

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        checkpoint: str = "best",
        device: str | None = None,
        precision: str = "float32",
        say: Say = lambda _: None,
        **search_options: Any,
    ) -> Self:
        """A run's model on a device (a GPU if there is one), its search options changed as named."""
        device = device_of(device)
        if precision == "int8" and torch.device(device).type != "cpu":
            raise SearchError(f"--precision: int8 is for CPUs; accepted on {device}: float32, bfloat16")
        run = Run.open(folder)
        config = changed(run.config, search=search_options).search
        model = run.model(checkpoint, say).to(device)
        if torch.device(device).type == "cuda" and (reason := kernels.why_not(torch.device(device))):
            say(f"decoding without kernels, which is slower: {reason}")
        return cls(run, model if precision == "float32" else model.in_precision(precision), config, device)

    @property
    def rescores(self) -> bool:
        """Whether what is found is put in a new order."""
        return self.config.rerank == "self" or self.is_panel

    @property
    def is_panel(self) -> bool:
        """Whether several models search, each on its own."""
        return isinstance(self.model, Panel)

    @property
    def has_weight(self) -> bool:
        """Whether `search.rerank_weight` says in which order: there are two directions, or two models."""
        return self.rescores and (not isinstance(self.model, Panel) or len(self.model.members) == 2)

    @property
    def panel(self) -> Panel:
        """The models that search, and judge."""
        return panel_of(self.model, self.directions)

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Sources as ids; one that is too long is refused by its line."""
        return [self._encode(i, text) for i, text in enumerate(texts, 1)]

    def translate(
        self,
        texts: Sequence[str],
        prefixes: Sequence[str] = (),
        suffixes: Sequence[str] = (),
        trace: bool = False,
        allow_empty: bool = False,
    ) -> list[Translation]:
        """Translate texts. `prefixes` force how l2r begins; `suffixes`, in reading order, how r2l does.

        With `allow_empty` a text of nothing but white space gives an empty result, and is not decoded.
        """
        if isinstance(texts, str):
            raise DataError(f"translate takes a list of texts, got the text {texts!r}; put it in brackets")
        if trace and self.is_panel:
            raise SearchError(
                f"--trace: {self.run.folder} is a rerank run, which searches several times; trace its runs"
            )
        places = [i for i, text in enumerate(texts) if text.strip() or not allow_empty]
        sources = [self._encode(i + 1, texts[i]) for i in places]
        forced = self._forced(len(texts), prefixes, suffixes)
        forced = forced and {direction: [rows[i] for i in places] for direction, rows in forced.items()}
        results = [Translation(text, [], {}) for text in texts]
        for k, one in decode(self.model, sources, self.directions, self.config, self.device, forced, trace):
            results[places[k]] = self._as_text(texts[places[k]], one)
        return results

    def stream(self, lines: Iterable[str], allow_empty: bool = False, trace: bool = False) -> Iterator[Translation]:
        """Translate as lines come, in their order; sentences of like length within a window are decoded together."""
        window: list[str] = []
        size = WINDOW * self.config.batch_sentences
        for line in self.checked(lines, allow_empty):
            window.append(line)
            if len(window) == size:
                yield from self.translate(window, trace=trace, allow_empty=allow_empty)
                window = []
        yield from self.translate(window, trace=trace, allow_empty=allow_empty)

    def checked(self, lines: Iterable[str], allow_empty: bool = False) -> Iterator[str]:
        """The same lines, up to one that cannot be a source."""
        count = 0
        for count, line in enumerate(lines, 1):
            if not line.strip() and not allow_empty:
                raise DataError(f"line {count} is empty; remove it, or give --allow-empty to get an empty line back")
            self._encode(count, line)
            yield line
        if not count:
            raise DataError("the input is empty; it must have at least one line")

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        direction: Direction,
        future: str | Sequence[str] = "none",
    ) -> list[Output]:
        """Forced scores: log-probability of each target, generated in one direction under a stated future.

        The future is `none`, `decoded` (the other direction's best hypothesis for that source), or the caller's texts.
        A run with two passes always reads one: where none is given, what its first pass says.
        """
        if isinstance(self.model, Panel):
            raise SearchError(f"{self.run.folder} is a rerank run, which scores texts by all its runs: see `rescore`")
        if direction not in self.run.directions:
            has = " and ".join(d.label for d in self.run.directions)
            raise SearchError(
                f"{self.run.folder} is a {self.run.config.system} run and scores {has} only, got {direction.label}"
            )
        if future == "none" and isinstance(self.model, TwoPass) and self.run.config.model.interaction:
            future = "decoded"
        other = R2L if direction is L2R else L2R
        for what, texts in (("targets", targets), *([] if isinstance(future, str) else [("futures", future)])):
            if len(texts) != len(sources):
                raise DataError(
                    f"there are {len(sources)} sources but {len(texts)} {what}; line i of one belongs to line i"
                )
        source_ids = self.encoded(sources)
        target_ids = [turn(ids, direction) for ids in self.run.target_vocabulary.encode_batch(list(targets))]
        futures: list[list[int]] | None = None
        if future == "decoded":
            self._must_read_futures()
            futures = decoded_futures(self.model, source_ids, other, self.config, self.device)
        elif isinstance(future, str) and future != "none":
            raise SearchError(f"the future must be none, decoded, or a list of texts, got {future!r}")
        elif future != "none":
            self._must_read_futures()
            futures = [turn(ids, other) for ids in self.run.target_vocabulary.encode_batch(list(future))]
        scored = force(self.model, source_ids, target_ids, direction, futures, self.device)
        alpha = self.config.length_penalty
        return [
            self._output(
                Hypothesis(ids, scores, sum(scores) / float(length_norm(len(scores), alpha)), direction, False)
            )
            for ids, scores in zip(target_ids, scored, strict=True)
        ]

    def rescore(self, sources: Sequence[str], candidates: Sequence[Sequence[str]]) -> list[Translation]:
        """Put texts that were found elsewhere in order, all of each source's: by both directions, or by all runs.

        The score is the weighted sum that rescoring gives a hypothesis of a search. Nothing is known of who found
        them: they have no direction and no scores of tokens.
        """
        texts: list[dict[tuple[int, ...], str]] = [{} for _ in candidates]
        for told, some in zip(texts, candidates, strict=True):
            for ids, text in zip(self.run.target_vocabulary.encode_batch(list(some)), some, strict=True):
                told.setdefault(tuple(ids), text)
        given = [[Hypothesis(list(ids), [], 0.0, L2R, False) for ids in told] for told in texts]
        source_ids, panel = self.encoded(sources), self.panel
        searches = self.config.rerank_future == "decoded"
        if searches:
            self._must_read_futures()

        def work(places: list[int]) -> list[list[Hypothesis]]:
            if searches:
                memories, found = search_each(panel, source_ids, places, before_rescoring(self.config), self.device)
            else:
                memories, _ = encode(panel, source_ids, places, self.config, self.device)
                found = [[Found([], {}) for _ in places] for _ in memories]
            mine = [given[i] for i in places]
            jury = Jury(panel, memories, self.config, self.device)
            judged = jury.log_probs(mine, found)
            alpha = self.config.length_penalty
            return [rerank(some, said, jury.weights, alpha) for some, said in zip(mine, judged, strict=True)]

        results = [Translation(source, [], {}) for source in sources]
        for i, ranked in in_batches(source_ids, self.config.batch_sentences, self.device, work):
            outputs = [
                replace(self._output(h), text=texts[i][tuple(h.tokens)], direction="", token_scores=[]) for h in ranked
            ]
            results[i] = Translation(sources[i], outputs, {})
        return results

    def _encode(self, number: int, text: str) -> list[int]:
        ids = self.run.source_vocabulary.encode(text)
        if len(ids) > LONGEST_SOURCE:
            raise DataError(
                f"line {number} has {len(ids)} tokens, more than the {LONGEST_SOURCE} that a source may have; "
                "split it into sentences"
            )
        return ids

    def _forced(
        self, count: int, prefixes: Sequence[str], suffixes: Sequence[str]
    ) -> dict[Direction, list[list[int]]] | None:
        """Forced beginnings in generation order."""
        forced = {}
        for name, direction, texts in (("prefix", L2R, prefixes), ("suffix", R2L, suffixes)):
            if not texts:
                continue
            if direction not in self.directions:
                raise SearchError(
                    f"a {name} needs {direction.label} decoding, but search.direction is {self.config.direction}"
                )
            if len(texts) != count:
                raise DataError(
                    f"there are {count} sources but {len(texts)} lines of {name}; line i of one belongs to line i"
                )
            forced[direction] = [turn(ids, direction) for ids in self.run.target_vocabulary.encode_batch(list(texts))]
        return forced or None

    def _must_read_futures(self) -> None:
        two = len(self.run.directions) == 2 or isinstance(self.model, TwoPass)
        if not (self.run.config.model.interaction and two):
            raise SearchError(
                f"--future: {self.run.folder} is a {self.run.config.system} run, which reads no future; accepted: none"
            )

    def _must_be_of_panel(self, panel: Panel) -> None:
        """Refuse options that runs which search one by one cannot follow."""
        if self.directions != self.run.directions:
            raise SearchError(
                f"search.direction: {self.run.folder} is a rerank run, whose runs decode as they can; "
                f"decode one of them instead, got {self.config.direction!r}"
            )
        if self.config.rerank == "self":
            raise SearchError(
                f"search.rerank: {self.run.folder} is a rerank run, whose runs rescore in any case; "
                "`self` is for a single model"
            )
        if len(panel.members) > 2 and self.config.rerank_weight != SearchConfig().rerank_weight:
            raise SearchError(
                f"search.rerank_weight: is for two runs; the {len(panel.members)} of {self.run.folder} weigh alike, "
                f"got {self.config.rerank_weight}"
            )

    def _as_text(self, source: str, found: Found) -> Translation:
        best = {direction.label: self._output(hypothesis) for direction, hypothesis in found.best.items()}
        return Translation(source, [self._output(hypothesis) for hypothesis in found.hypotheses], best, found.trace)

    def _output(self, hypothesis: Hypothesis) -> Output:
        vocabulary = self.run.target_vocabulary
        generated = [*hypothesis.tokens, *([] if hypothesis.cut_off else [END])]
        return Output(
            text=vocabulary.decode(hypothesis.reading_order),
            score=hypothesis.score,
            direction=hypothesis.direction.label,
            cut_off=hypothesis.cut_off,
            tokens=vocabulary.pieces(turn(generated, hypothesis.direction)),
            token_scores=hypothesis.token_scores[:: 1 if hypothesis.direction is L2R else -1],
        )


def decode(
    model: Seq2Seq | Panel,
    sources: Sequence[Sequence[int]],
    directions: tuple[Direction, ...],
    config: SearchConfig,
    device: torch.device,
    forced: dict[Direction, list[list[int]]] | None = None,
    trace: bool = False,
) -> Iterator[tuple[int, Found]]:
    """Search all sources (ids without end marks), longest first; yields their places and results as they come.

    Where hypotheses are rescored, it is from the memory that the search has read.
    """
    panel = panel_of(model, directions)
    rescores = isinstance(model, Panel) or config.rerank == "self"

    def work(places: list[int]) -> list[Found]:
        wanted = before_rescoring(config) if rescores else config
        memories, found = search_each(panel, sources, places, wanted, device, forced, trace)
        if not rescores:
            return found[0]
        jury = Jury(panel, memories, config, device)
        jury.hear(found)
        return rescored(jury, found)

    return in_batches(sources, config.batch_sentences, device, work)


def in_batches(
    sources: Sequence[Sequence[int]], size: int, device: torch.device, work: Callable[[list[int]], Sequence[T]]
) -> Iterator[tuple[int, T]]:
    """Work on places of sources, longest first, so many at a time; when memory runs out, on half as many.

    On a CPU workers take batches in turn, with one copy of the weights: cores that each decode a batch of their own
    wait for nobody, where cores that share a product wait for each other at every operation.
    """
    order = sorted(range(len(sources)), key=lambda i: (-len(sources[i]), i))
    threads = torch.get_num_threads()
    workers = min(threads, MOST_WORKERS, len(order)) if device.type == "cpu" else 1
    size = min(size, -(-len(order) // max(1, workers)))
    batches = [order[begin : begin + size] for begin in range(0, len(order), max(1, size))]
    if workers < 2:
        for places in batches:
            yield from _halving(sources, places, work)
        return
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
        try:
            futures = [pool.submit(lambda places: list(_halving(sources, places, work)), places) for places in batches]
            for future in as_completed(futures):
                yield from future.result()
        finally:  # also where the caller wants no more, or a batch failed
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # a worker's setting becomes that of every thread to come


def _halving(
    sources: Sequence[Sequence[int]], places: list[int], work: Callable[[list[int]], Sequence[T]]
) -> Iterator[tuple[int, T]]:
    """One batch; when memory runs out, its halves."""
    try:
        with torch.inference_mode():
            found = work(places)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not (isinstance(error, torch.OutOfMemoryError) or CPU_IS_FULL in str(error)):
            raise
        if len(places) == 1:
            raise SearchError(
                f"out of memory with one sentence of {len(sources[places[0]])} tokens; lower search.beam"
            ) from None
        half = len(places) // 2
        for part in (places[:half], places[half:]):
            yield from _halving(sources, part, work)
        return
    yield from zip(places, found, strict=True)


def settle() -> None:
    """What is loaded stays: Python's collector need not walk through it, a tenth of a second every few batches."""
    gc.freeze()
    atexit.register(gc.unfreeze)


def panel_of(model: Seq2Seq | Panel, directions: tuple[Direction, ...]) -> Panel:
    """A model that stands alone is a panel of one."""
    return model if isinstance(model, Panel) else Panel([model], [directions])


def search_each(
    panel: Panel,
    sources: Sequence[Sequence[int]],
    places: list[int],
    config: SearchConfig,
    device: torch.device,
    forced: dict[Direction, list[list[int]]] | None = None,
    trace: bool = False,
    all_complete: bool = False,
) -> tuple[list[Memory], list[list[Found]]]:
    """The memory that each model reads of these sources, and what it finds on its own, [model][sentence].

    One without the direction that is forced finds nothing.
    """
    try:
        return _search_each(panel, sources, places, config, device, forced, trace, all_complete)
    except torch.OutOfMemoryError:
        models = [model for model in panel.modules() if isinstance(model, Seq2Seq)]
        if not any([model.forget_recorded() for model in models]):
            raise
    # Not above, where the error still holds what it came from.
    return _search_each(panel, sources, places, config, device, forced, trace, all_complete)


def _search_each(
    panel: Panel,
    sources: Sequence[Sequence[int]],
    places: list[int],
    config: SearchConfig,
    device: torch.device,
    forced: dict[Direction, list[list[int]]] | None,
    trace: bool,
    all_complete: bool,
) -> tuple[list[Memory], list[list[Found]]]:
    memories, firsts = encode(panel, sources, places, config, device)
    found: list[list[Found]] = []
    for model, directions, memory, before in zip(panel.members, panel.directions, memories, firsts, strict=True):
        if forced and not any(d in forced for d in directions):
            found.append([Found([], {}) for _ in places])
            continue
        beginnings = [[forced[d][i] if forced and d in forced else [] for d in directions] for i in places]
        lengths = [max(map(len, row)) for row in beginnings]
        limits = [max_length(config, len(sources[i])) + length for i, length in zip(places, lengths, strict=True)]
        slots = Plan.of(config, directions).slots
        found.append(
            search(
                model.step,
                model.start(memory, len(directions), slots),
                torch.tensor(limits),
                directions,
                config,
                _padded_twice(beginnings, max(lengths)) if any(lengths) else None,
                trace,
                all_complete,
                device,
                recorder_of(model, device),
            )
        )
        pairs = zip(found[-1], before, strict=True)
        found[-1] = [replace(one, best={**one.best, **said.best}) if said.best else one for one, said in pairs]
    return memories, found


def encode(
    panel: Panel, sources: Sequence[Sequence[int]], places: Sequence[int], config: SearchConfig, device: torch.device
) -> tuple[list[Memory], list[list[Found]]]:
    """What each model's search and rescoring read of these sources: all that is computed from them, once.

    A model with two passes has its first one behind it then; what that found comes second.
    """
    longest = max(len(sources[i]) for i in places) + 1
    memories, before = [], []
    for model in panel.members:
        recorder = recorder_of(model, device)
        width = longest if recorder is None else recorder.size(longest)
        source = padded([[*sources[i], END] for i in places], width).to(device)
        memory = model.encode(source) if recorder is None else recorder.computed(model.encode, source)
        found = [Found([], {}) for _ in places]
        if isinstance(model, TwoPass):
            limits = torch.tensor([max_length(config, len(sources[i])) for i in places])
            memory, found = first_pass(model, memory, limits, config, device)
        memories.append(memory)
        before.append(found)
    return memories, before


def recorder_of(model: Seq2Seq, device: torch.device) -> Recorder | None:
    """What records a model's steps, on a GPU; it is kept with the model, which lets go of it when it must."""
    if device.type != "cuda" or model.training:  # then a step has dropout, which none that is recorded has
        return None
    recorder: Recorder = model.__dict__.setdefault("recorder", Recorder())
    return recorder


def before_rescoring(config: SearchConfig) -> SearchConfig:
    """Search for all that the beam holds; a future must be a direction's best, so its search goes on to its end."""
    early_stop = config.early_stop and config.rerank_future == "none"
    return config.model_copy(update={"nbest": 2 if config.greedy else config.beam, "early_stop": early_stop})


def first_pass(
    model: TwoPass, memory: Memory, limits: Tensor, config: SearchConfig, device: torch.device
) -> tuple[Memory, list[Found]]:
    """Search from right to left, and inform the memory of the best hypothesis: a complete one if there is any."""
    assert isinstance(memory, TwoPassMemory)
    config = config.model_copy(update={"nbest": 1})  # one is read; more would only be waited for
    slots = Plan.of(config, (R2L,)).slots
    state, recorder = model.first.start(memory.first, 1, slots), recorder_of(model.first, device)
    found = search(model.first.step, state, limits, (R2L,), config, device=device, recorder=recorder)
    rows = [[R2L.tag, *(one.best[R2L].tokens if R2L in one.best else [])] for one in found]
    longest = max(map(len, rows))
    said = padded(rows, longest if recorder is None else recorder.size(longest))
    return model.informed(memory, said.to(device)), found


def max_length(config: SearchConfig, source_length: int) -> int:
    """The most tokens before the end mark. It depends on the sentence's own source, never on its batch."""
    if config.max_length is not None:
        return config.max_length
    return max(1, round(config.max_length_factor * source_length) + config.max_length_offset)


def decoded_futures(
    model: Seq2Seq, sources: Sequence[Sequence[int]], direction: Direction, config: SearchConfig, device: torch.device
) -> list[list[int]]:
    """The best complete hypothesis of one direction for every source, when both decode; in generation order.

    It need not be the winner, so the search goes on to its end; where none is complete, the best one as it stands.
    Of a model with two passes it is what the first one says.
    """
    directions: tuple[Direction, ...] = (L2R, R2L)
    if isinstance(model, TwoPass):
        model, directions = model.first, (R2L,)
    else:
        config = config.model_copy(update={"early_stop": False, "direction": "both", "rerank": "none"})
    futures: list[list[int]] = [[]] * len(sources)
    for i, found in decode(model, sources, directions, config, device):
        futures[i] = found.best[direction].tokens if direction in found.best else []
    return futures


def force(
    model: Seq2Seq,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    direction: Direction,
    futures: Sequence[Sequence[int]] | None,
    device: torch.device,
    batch_sentences: int = 32,
) -> list[list[float]]:
    """Log-probabilities of each target's tokens and end mark; targets and futures in generation order.

    A future is read as far as the target reaches; by a model with two passes, which knows all of it, to its end.
    """
    scores: list[list[float]] = [[]] * len(sources)
    order = sorted(range(len(sources)), key=lambda i: (-len(targets[i]), i))
    for begin in range(0, len(order), batch_sentences):
        places = order[begin : begin + batch_sentences]
        read = futures if not isinstance(model, TwoPass) else None  # the memory of two passes has it already
        rows = [[Given(targets[i], None if read is None else read[i])] for i in places]
        with torch.inference_mode():
            memory = model.encode(padded([[*sources[i], END] for i in places]).to(device))
            if isinstance(model, TwoPass) and isinstance(memory, TwoPassMemory) and futures is not None:
                memory = model.informed(memory, padded([[R2L.tag, *futures[i]] for i in places]).to(device))
            found = force_rows(model, memory, rows, direction, device)
        for i, (row,) in zip(places, found, strict=True):
            scores[i] = row
    return scores


def _padded_twice(rows: Sequence[Sequence[Sequence[int]]], width: int) -> Tensor:
    return torch.stack([padded(row, width) for row in rows])
