"""Texts that are given, not searched for: what models say of them, the source being encoded once.

    candidates of a sentence, models with their directions -> log-probabilities -> search/rerank.py: a new order

B sentences   R rows (R / B of them share a source)   D direction   T target   E width
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from bothways.config import SearchConfig
from bothways.models.ensemble import Panel
from bothways.models.interface import Memory, Seq2Seq
from bothways.search.hypothesis import Found, Hypothesis
from bothways.search.rerank import rerank, union, weights_of
from bothways.tokens import END, L2R, PAD, R2L, Direction, turn

POSITIONS = 16_384  # whose distributions over the vocabulary are in memory at once


@dataclass(frozen=True)
class Given:
    """A text to be said in one direction, in generation order, and what that direction sees of the other side."""

    tokens: Sequence[int]
    future: Sequence[int] | None = None  # in the other's generation order; None: nothing


def force_rows(
    model: Seq2Seq, memory: Memory, rows: Sequence[Sequence[Given]], direction: Direction, device: torch.device
) -> list[list[list[float]]]:
    """Log-probabilities of each text's tokens and end mark; the texts rows[b] share the b-th source of the memory.

    Either all of them have a future or none has. Sentences with fewer texts are filled up, which nobody reads.
    """
    most = max(map(len, rows))
    if not most:
        return [[] for _ in rows]
    futures = any(given.future is not None for row in rows for given in row)
    filler = Given([], [] if futures else None)
    filled = [given for row in rows for given in (*row, *[filler] * (most - len(row)))]
    width = 1 + max(len(given.tokens) for given in filled)  # what of a future lies beyond is read by nobody
    streams = {direction: [[direction.tag, *given.tokens] for given in filled]}
    if futures:
        other = R2L if direction is L2R else L2R
        streams[other] = [[other.tag, *(given.future or ())][:width] for given in filled]
    inputs = torch.stack([padded(streams[d], width) for d in sorted(streams)], dim=1).to(device)
    hidden = model.hidden(memory, inputs)[:, sorted(streams).index(direction)].flatten(0, 1)  # [R * T, E]
    wanted = [(b * most + i, given) for b, row in enumerate(rows) for i, given in enumerate(row)]
    places = np.concatenate([np.arange(r * width, r * width + len(given.tokens) + 1) for r, given in wanted])
    labels = np.concatenate([[*given.tokens, END] for _, given in wanted]).astype(np.int64)
    hidden, label = hidden[torch.from_numpy(places).to(device)], torch.from_numpy(labels).to(device)
    parts = zip(hidden.split(POSITIONS), label.split(POSITIONS), strict=True)
    found = torch.cat([model.following(x).of(y) for x, y in parts]).double().tolist()
    ends = list(accumulate(len(given.tokens) + 1 for _, given in wanted))
    each: Iterator[list[float]] = (found[begin:end] for begin, end in zip([0, *ends], ends, strict=False))
    return [[next(each) for _ in row] for row in rows]


class Jury:
    """The models of a batch of sources as judges of candidates. What a judge has said once is not asked again."""

    def __init__(self, panel: Panel, memories: Sequence[Memory], config: SearchConfig, device: torch.device) -> None:
        self.panel, self.memories, self.config, self.device = panel, memories, config, device
        self.judges = [(m, d) for m, directions in enumerate(panel.directions) for d in directions]
        self.groups = [len(directions) for directions in panel.directions]  # judges that each model brings
        self.weights = weights_of(self.groups, config.rerank_weight)
        self.known: dict[tuple[int, int, Direction, tuple[int, ...], tuple[int, ...] | None], float] = {}

    def hear(self, found: Sequence[Sequence[Found]]) -> None:
        """Take over what searches have said, found[model][sentence]: without a future, it is the forced score."""
        for m, sentences in enumerate(found):
            if not self._reads_futures(m):
                for b, one in enumerate(sentences):
                    for h in one.hypotheses:
                        if not h.cut_off:
                            self.known[m, b, h.direction, tuple(h.tokens), None] = sum(h.token_scores)

    def log_probs(
        self, candidates: Sequence[Sequence[Hypothesis]], found: Sequence[Sequence[Found]]
    ) -> list[list[list[float]]]:
        """[sentence][judge][candidate]. Where futures are read, they are the other direction's best in `found`."""
        keys = [
            [
                [(m, b, d, tuple(turn(c.reading_order, d)), self._future(m, d, found[m][b])) for c in texts]
                for m, d in self.judges
            ]
            for b, texts in enumerate(candidates)
        ]
        for j, (m, d) in enumerate(self.judges):
            asked = [list(dict.fromkeys(key for key in row[j] if key not in self.known)) for row in keys]
            rows = [[Given(tokens, future) for *_, tokens, future in row] for row in asked]
            answers = force_rows(self.panel.members[m], self.memories[m], rows, d, self.device)
            for row, answer in zip(asked, answers, strict=True):
                self.known.update(zip(row, map(sum, answer), strict=True))
        return [[[self.known[key] for key in judged] for judged in row] for row in keys]

    def _reads_futures(self, m: int) -> bool:
        """Whether a model searched with both directions reading each other."""
        return self.panel.members[m].interaction and len(self.panel.directions[m]) == 2

    def _future(self, m: int, direction: Direction, found: Found) -> tuple[int, ...] | None:
        if self.config.rerank_future == "none" or not self._reads_futures(m):
            return None
        best = found.best.get(R2L if direction is L2R else L2R)
        return tuple(best.tokens) if best else ()


def rescored(jury: Jury, found: Sequence[Sequence[Found]]) -> list[Found]:
    """Searches' results, found[model][sentence], joined and put in a new order; at most `search.nbest` of each."""
    candidates = [union([one.hypotheses for one in sentence]) for sentence in zip(*found, strict=True)]
    results = []
    for b, judged in enumerate(jury.log_probs(candidates, found)):
        ranked = rerank(candidates[b], judged, jury.weights, jury.config.length_penalty)
        best = best_of_each(ranked, [one[b] for one in found])
        results.append(replace(found[0][b], hypotheses=ranked[: jury.config.nbest], best=best))
    return results


def best_of_each(ranked: Sequence[Hypothesis], found: Sequence[Found]) -> dict[Direction, Hypothesis]:
    """The first text of the new order that a direction has found, maybe not it alone; else the best of its search."""
    own: dict[tuple[Direction, tuple[int, ...]], Hypothesis] = {}
    for hypothesis in [h for one in found for h in one.hypotheses]:
        own.setdefault((hypothesis.direction, tuple(hypothesis.reading_order)), hypothesis)
    best: dict[Direction, Hypothesis] = {}
    for hypothesis in ranked:
        for direction in (L2R, R2L):
            mine = own.get((direction, tuple(hypothesis.reading_order)))
            if mine is not None:
                best.setdefault(direction, replace(mine, score=hypothesis.score))
    for direction, hypothesis in [pair for one in found for pair in one.best.items()]:
        best.setdefault(direction, hypothesis)
    return best


def padded(rows: Sequence[Sequence[int]], width: int = 0) -> Tensor:
    """[n, longest] with padding behind."""
    width = width or max(len(row) for row in rows)
    filled = np.full((len(rows), width), PAD, dtype=np.int64)
    for i, row in enumerate(rows):
        filled[i, : len(row)] = row
    return torch.from_numpy(filled)
