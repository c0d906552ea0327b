"""Text in, text out: the whole pipeline on one screen.

    texts -> ids -> batches of like length -> model -> search -> hypotheses -> texts

Training, validation and the command line decode through the same functions.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bothways.config import SearchConfig, changed
from bothways.errors import DataError, SearchError
from bothways.models.interface import Seq2Seq
from bothways.run import Run, Say, device_of
from bothways.search.beam import search
from bothways.search.hypothesis import Found, Hypothesis, Trace, length_norm
from bothways.tokens import DIRECTIONS, END, L2R, PAD, R2L, Direction, turn

LONGEST_SOURCE = 1024  # tokens; longer sentences are refused rather than decoded badly and slowly
MOST_WORKERS = 4  # that decode on a CPU; more of them would wait for Python's lock, so they get more cores each
CPU_IS_FULL = "DefaultCPUAllocator: can't allocate memory"  # PyTorch's words; it has no class for this error
WINDOW = 16  # batches that are read ahead, so that sentences of like length are decoded together


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
    best: dict[str, Output]  # the best of each direction that decoded
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


class Translator:
    """A run, ready to decode. Results do not depend on what a sentence is batched with."""

    def __init__(self, run: Run, model: Seq2Seq, config: SearchConfig, device: str = "cpu") -> None:
        self.run, self.model, self.config, self.device = run, model, config, torch.device(device)
        self.directions = DIRECTIONS[config.direction or "both"]
        missing = [d for d in self.directions if d not in run.directions]
        if missing:
            has = " and ".join(d.label for d in run.directions)
            raise SearchError(
                f"search.direction: {run.folder} is a {run.config.system} run and decodes {has} only, "
                f"got {config.direction!r}"
            )

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
        return cls(run, model if precision == "float32" else model.in_precision(precision), config, device)

    def translate(
        self,
        texts: Sequence[str],
        prefixes: Sequence[str] = (),
        suffixes: Sequence[str] = (),
        trace: bool = False,
    ) -> list[Translation]:
        """Translate texts. `prefixes` force how l2r begins; `suffixes`, in reading order, how r2l does."""
        sources = [self._encode(i, text) for i, text in enumerate(texts, 1)]
        forced = self._forced(len(texts), prefixes, suffixes)
        found = decode(self.model, sources, self.directions, self.config, self.device, forced, trace)
        results: list[Translation | None] = [None] * len(texts)
        for i, one in found:
            results[i] = self._as_text(texts[i], one)
        return [result for result in results if result is not None]

    def stream(self, lines: Iterable[str], allow_empty: bool = False, trace: bool = False) -> Iterator[Translation]:
        """Translate as lines come, in their order; sentences of like length within a window are decoded together."""
        window: list[str] = []
        size = WINDOW * self.config.batch_sentences
        for line in self.checked(lines, allow_empty):
            window.append(line)
            if len(window) == size:
                yield from self._window(window, trace)
                window = []
        yield from self._window(window, trace)

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
        """
        other = R2L if direction is L2R else L2R
        for what, texts in (("targets", targets), *([] if isinstance(future, str) else [("futures", future)])):
            if len(texts) != len(sources):
                raise DataError(
                    f"there are {len(sources)} sources but {len(texts)} {what}; line i of one belongs to line i"
                )
        source_ids = [self._encode(i, text) for i, text in enumerate(sources, 1)]
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

    def _window(self, lines: list[str], trace: bool) -> Iterator[Translation]:
        filled = [line for line in lines if line.strip()]
        results = iter(self.translate(filled, trace=trace))
        for line in lines:
            yield next(results) if line.strip() else Translation(line, [], {})

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
        if not (self.run.config.model.interaction and len(self.run.directions) == 2):
            raise SearchError(
                f"--future: {self.run.folder} is a {self.run.config.system} run, which reads no future; accepted: none"
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
    model: Seq2Seq,
    sources: Sequence[Sequence[int]],
    directions: tuple[Direction, ...],
    config: SearchConfig,
    device: torch.device,
    forced: dict[Direction, list[list[int]]] | None = None,
    trace: bool = False,
) -> Iterator[tuple[int, Found]]:
    """Search all sources (ids without end marks), longest first; yields their places and results as they come.

    On a CPU workers take batches in turn, with one copy of the weights: cores that each decode a batch of their own
    wait for nobody, where cores that share a product wait for each other at every operation.
    """
    order = sorted(range(len(sources)), key=lambda i: (-len(sources[i]), i))
    threads = torch.get_num_threads()
    workers = min(threads, MOST_WORKERS, len(order)) if device.type == "cpu" else 1
    size = min(config.batch_sentences, -(-len(order) // max(1, workers)))
    batches = [order[begin : begin + size] for begin in range(0, len(order), max(1, size))]

    def decoded(places: list[int]) -> Iterator[tuple[int, Found]]:
        return _decode_batch(model, sources, places, directions, config, device, forced, trace)

    if workers < 2:
        for places in batches:
            yield from decoded(places)
        return
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
        try:
            futures = [pool.submit(lambda places: list(decoded(places)), places) for places in batches]
            for future in as_completed(futures):
                yield from future.result()
        finally:  # also where the caller wants no more, or a batch failed
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # a worker's setting becomes that of every thread to come


def _decode_batch(
    model: Seq2Seq,
    sources: Sequence[Sequence[int]],
    places: list[int],
    directions: tuple[Direction, ...],
    config: SearchConfig,
    device: torch.device,
    forced: dict[Direction, list[list[int]]] | None,
    trace: bool,
) -> Iterator[tuple[int, Found]]:
    """One batch; when memory runs out, its halves."""
    try:
        beginnings = [[forced[d][i] if forced and d in forced else [] for d in directions] for i in places]
        lengths = [max(map(len, row)) for row in beginnings]
        limits = [max_length(config, len(sources[i])) + length for i, length in zip(places, lengths, strict=True)]
        K = 1 if config.greedy else config.beam // len(directions)
        with torch.inference_mode():
            memory = model.encode(padded([[*sources[i], END] for i in places]).to(device))
            found = search(
                model.step,
                model.start(memory, len(directions), K),
                torch.tensor(limits, device=device),
                directions,
                config,
                _padded_twice(beginnings, max(lengths)).to(device) if any(lengths) else None,
                trace,
            )
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not (isinstance(error, torch.OutOfMemoryError) or CPU_IS_FULL in str(error)):
            raise
        if len(places) == 1:
            raise SearchError(
                f"out of memory with one sentence of {len(sources[places[0]])} tokens; lower search.beam"
            ) from None
        half = len(places) // 2
        for part in (places[:half], places[half:]):
            yield from _decode_batch(model, sources, part, directions, config, device, forced, trace)
        return
    yield from zip(places, found, strict=True)


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
    """
    config = config.model_copy(update={"early_stop": False, "direction": "both"})
    futures: list[list[int]] = [[]] * len(sources)
    for i, found in decode(model, sources, (L2R, R2L), config, device):
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
    """Log-probabilities of each target's tokens and end mark; targets and futures in generation order."""
    scores: list[list[float]] = [[]] * len(sources)
    order = sorted(range(len(sources)), key=lambda i: (-len(targets[i]), i))
    for begin in range(0, len(order), batch_sentences):
        places = order[begin : begin + batch_sentences]
        streams: dict[Direction, list[list[int]]] = {direction: [[direction.tag, *targets[i]] for i in places]}
        if futures is not None:
            other = R2L if direction is L2R else L2R
            streams[other] = [[other.tag, *futures[i]] for i in places]
        width = max(len(tokens) for tokens in streams[direction])  # what lies beyond is read by nobody
        inputs = torch.stack([padded([t[:width] for t in streams[d]], width) for d in sorted(streams)], dim=1)
        source = padded([[*sources[i], END] for i in places])
        labels = padded([[*targets[i], END] for i in places], width).to(device)
        with torch.inference_mode():
            hidden = model.hidden(model.encode(source.to(device)), inputs.to(device))[
                :, sorted(streams).index(direction)
            ]
            found = model.log_probs(hidden).gather(-1, labels[..., None]).squeeze(-1).double().tolist()
        for i, row in zip(places, found, strict=True):
            scores[i] = row[: len(targets[i]) + 1]
    return scores


def padded(rows: Sequence[Sequence[int]], width: int = 0) -> Tensor:
    """[n, longest] with padding behind."""
    width = width or max(len(row) for row in rows)
    filled = np.full((len(rows), width), PAD, dtype=np.int64)
    for i, row in enumerate(rows):
        filled[i, : len(row)] = row
    return torch.from_numpy(filled)


def _padded_twice(rows: Sequence[Sequence[Sequence[int]]], width: int) -> Tensor:
    return torch.stack([padded(row, width) for row in rows])
