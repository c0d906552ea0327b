"""Rows of a corpus in, tensors out: padding, tags, both target directions and their losses, made once.

B sources   R rows of streams (R / B of them share a source)   D direction   S source   T target   N tokens with a loss

Which text stands in which stream, and which stream bears a loss, is decided here and nowhere else:

    pairs      (x; gold l2r)  or  (x; gold r2l)                 one direction
               (x; gold l2r, gold r2l), both with a loss        both, without interaction only: with it, gold leaks
               (x; decoded ...) besides, in the same streams    if decoded text is to be learned too, as a control
    triples    (x; gold l2r, decoded r2l), the loss on l2r      both, with interaction
               (x; decoded l2r, gold r2l), the loss on r2l
    two passes (x; gold l2r, decoded r2l, gold r2l)             l2r reads what r2l has said before: all of the decoded
               with a loss on gold text                         stream; the third keeps the r2l decoder in practice
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from bothways.data.corpus import Pair, Texts
from bothways.errors import DataError
from bothways.tokens import END, L2R, PAD, R2L, Direction


@dataclass(frozen=True)
class Batch:
    """One part of an update."""

    source: Tensor  # [B, S] with end marks
    inputs: Tensor  # [R, D, T] tag and tokens; neither end mark nor anything after it
    positions: Tensor  # [N] places in the flattened inputs that predict a token with a loss
    labels: Tensor  # [N] those tokens
    weights: Tensor  # [N] their weights in the loss; 0 where N is only filled up

    @classmethod
    def of_streams(
        cls, source: np.ndarray, streams: np.ndarray, tags: Sequence[int], weights: np.ndarray, fill: bool = False
    ) -> "Batch":
        """Sources [B, S] and streams [R, D, T] in generation order, with end marks; weights [R, D]."""
        inputs = np.empty_like(streams)
        inputs[..., 0] = np.asarray(tags)
        inputs[..., 1:] = np.where(streams[..., :-1] == END, PAD, streams[..., :-1])
        bears_loss = (streams != PAD) & (weights[..., None] > 0)
        (positions,) = bears_loss.reshape(-1).nonzero()
        labels = streams.reshape(-1)[positions]
        each = np.broadcast_to(weights[..., None], streams.shape).reshape(-1)[positions].astype(np.float32)
        if fill:  # N then follows from the other shapes: every place of every stream that may bear a loss
            gap = int((weights > 0).sum(1).max()) * len(streams) * streams.shape[-1] - len(positions)
            positions, labels = np.pad(positions, (0, gap)), np.pad(labels, (0, gap), constant_values=END)
            each = np.pad(each, (0, gap))
        return cls(*(torch.from_numpy(x) for x in (source, inputs, positions, labels, each)))

    @property
    def loss_tokens(self) -> float:
        """Sum of the loss's weights."""
        return float(self.weights.sum())

    def to(self, device: torch.device) -> Self:
        """The same on a device; asynchronously from pinned memory."""
        return replace(self, **{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})

    def pin(self) -> Self:
        """The same in pinned memory."""
        return replace(self, **{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})

    def halves(self) -> tuple["Batch", "Batch"]:
        """Two batches of half the sources each, for when the whole does not fit into memory."""
        cut = self.source.size(0) // 2
        rows = cut * (self.inputs.size(0) // self.source.size(0))
        edge = rows * self.inputs[0].numel()
        first = self.positions < edge
        return (
            Batch(
                self.source[:cut], self.inputs[:rows], self.positions[first], self.labels[first], self.weights[first]
            ),
            Batch(
                self.source[cut:],
                self.inputs[rows:],
                self.positions[~first] - edge,
                self.labels[~first],
                self.weights[~first],
            ),
        )


class Builder(Protocol):
    """Turns rows of a corpus into batches."""

    @property
    def rows(self) -> np.ndarray:
        """The rows of the corpus that can be trained on."""
        ...

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of every source and every gold target of the corpus, end marks not counted."""
        ...

    def loss_tokens(self, rows: np.ndarray) -> float:
        """The sum of the loss's weights over these rows."""
        ...

    def build(self, rows: np.ndarray, width: int, size: int, fixed: bool) -> Batch:
        """A batch of these rows. `fixed`: exactly `size` sources and `width` tokens a side, filled up with empty ones;
        otherwise only as large as the rows need."""
        ...


@dataclass(frozen=True)
class Decoded:
    """Decoded text of some sources, in one direction or in both: `decoding.py` writes it (in reading order on disk)."""

    folder: Path
    rows: np.ndarray  # [n] rows of the corpus, rising
    texts: dict[Direction, Texts]
    usable: dict[Direction, np.ndarray]  # [n] neither empty nor cut off, so that the text may be a target itself

    @classmethod
    def open(cls, folder: Path, fingerprint: str | None = None, directions: Sequence[Direction] = ()) -> "Decoded":
        """Read a folder; with the fingerprint of the prepared data it must belong to, and directions it must have."""
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            rows, made_from = np.load(folder / "rows.npy"), meta["data"]
            held = [Direction[label.upper()] for label in meta["directions"]]
            usable = {d: np.load(folder / f"{d.label}.usable.npy") for d in held}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise DataError(
                f"{folder}: holds no decoded text; a strategy writes it, or `bothways decode RUN --split train`"
            ) from None
        if fingerprint not in (None, made_from):
            raise DataError(
                f"{folder}: was decoded from other prepared data (fingerprint {made_from}) than this run's "
                f"({fingerprint}); decode again"
            )
        if meta["split"] != "train" and fingerprint is not None:
            raise DataError(f"{folder}: holds decoded text of {meta['split']}, not of the training sources")
        lacking = [d.label for d in directions if d not in held]
        if lacking:
            raise DataError(f"{folder}: holds no {lacking[0]} text, only {', '.join(d.label for d in held)}")
        texts = {d: Texts.open(folder, d.label) for d in held}
        if any(not len(rows) == len(usable[d]) == len(texts[d]) for d in held):
            raise DataError(f"{folder}: decoded texts and rows differ in number; remove the folder and decode again")
        return cls(folder, rows, texts, usable)

    def stream(self, rows: np.ndarray, d: Direction, width: int) -> np.ndarray:
        """The texts of these rows of the corpus in generation order, with end marks, [n, width]."""
        return self.texts[d].gather(self._places(rows), width, reverse=d is R2L)

    def lengths(self, rows: np.ndarray, d: Direction) -> np.ndarray:
        """Tokens of the texts of these rows, end marks not counted."""
        return self.texts[d].lengths[self._places(rows)]

    def target_lengths(self, rows: np.ndarray, d: Direction, max_length: int) -> np.ndarray:
        """Tokens with end marks of those texts that can be targets themselves, 0 for all others."""
        places = self._places(rows)
        lengths = self.texts[d].lengths[places] + 1
        return np.where(self.usable[d][places] & (lengths <= max_length + 1), lengths, 0)

    def _places(self, rows: np.ndarray) -> np.ndarray:
        places = np.searchsorted(self.rows, rows)
        lacking = rows[self.rows[np.minimum(places, len(self.rows) - 1)] != rows]
        if len(lacking):
            raise DataError(
                f"{self.folder}: holds no decoded text of training pair {lacking[0] + 1}; decode all pairs that are "
                "trained on, or lower train.share to those that were decoded"
            )
        return places


class _OfCorpus:
    """What builders share: the gold text, which of its rows can be trained on, and decoded text of them."""

    def __init__(
        self, pair: Pair, decoded: Decoded | None, pseudo_loss: float, max_length: int, rows: np.ndarray | None
    ) -> None:
        self.pair, self.decoded, self.pseudo_loss, self.max_length = pair, decoded, pseudo_loss, max_length
        if rows is None:
            rows = np.arange(len(pair)) if decoded is None else decoded.rows
        self.rows = rows

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """See Builder."""
        return self.pair.source.lengths, self.pair.target.lengths

    def _gold(self, rows: np.ndarray, d: Direction, width: int) -> np.ndarray:
        return self.pair.target.gather(rows, width, reverse=d is R2L)

    def _gold_tokens(self, rows: np.ndarray) -> float:
        return float((self.pair.target.lengths[rows] + 1).sum())

    def _pseudo_lengths(self, rows: np.ndarray, d: Direction) -> np.ndarray:
        """Tokens of decoded texts that can bear a loss, 0 for the others."""
        assert self.decoded is not None
        return self.decoded.target_lengths(rows, d, self.max_length)

    def _width(self, rows: np.ndarray, width: int, fixed: bool, directions: Sequence[Direction]) -> int:
        """Tokens a stream: enough for gold text and, where decoded text bears a loss, for that to its end."""
        T = width if fixed else _longest(self.pair.target, rows)
        if self.pseudo_loss:
            T = max(T, *(int(self._pseudo_lengths(rows, d).max()) for d in directions))
            T = -(-T // 8) * 8 if fixed else T
        return T

    def _batch(
        self,
        rows: np.ndarray,
        width: int,
        size: int,
        fixed: bool,
        directions: Sequence[Direction],
        streams: np.ndarray,
        weights: np.ndarray,
    ) -> Batch:
        S = width if fixed else _longest(self.pair.source, rows)
        return _filled(
            self.pair.source.gather(rows, S), streams, directions, weights, size if fixed else len(rows), fixed
        )


class PairBuilder(_OfCorpus):
    """Gold text in every direction, each with a loss; with decoded text, that in the same streams, a row of its own."""

    def __init__(
        self,
        pair: Pair,
        directions: tuple[Direction, ...],
        rows: np.ndarray | None = None,
        decoded: Decoded | None = None,
        pseudo_loss: float = 0.0,
        max_length: int = 0,
    ) -> None:
        super().__init__(pair, decoded, pseudo_loss if decoded else 0.0, max_length, rows)
        self.directions = directions

    def loss_tokens(self, rows: np.ndarray) -> float:
        """See Builder."""
        gold = len(self.directions) * self._gold_tokens(rows)
        if not self.pseudo_loss:
            return gold
        return float(gold + self.pseudo_loss * sum(self._pseudo_lengths(rows, d).sum() for d in self.directions))

    def build(self, rows: np.ndarray, width: int, size: int, fixed: bool) -> Batch:
        """See Builder."""
        T = self._width(rows, width, fixed, self.directions)
        streams = np.stack([self._gold(rows, d, T) for d in self.directions], axis=1)
        weights: np.ndarray = np.ones(streams.shape[:2])
        if self.decoded is not None:
            others = [self.decoded.stream(rows, d, T) for d in self.directions]
            shares = [self.pseudo_loss * (self._pseudo_lengths(rows, d) > 0) for d in self.directions]
            streams = np.stack([streams, np.stack(others, 1)], 1).reshape(2 * len(rows), -1, T)
            weights = np.stack([weights, np.stack(shares, 1)], 1).reshape(2 * len(rows), -1)
        return self._batch(rows, width, size, fixed, self.directions, streams, weights)


class TripleBuilder(_OfCorpus):
    """Gold text in one stream and decoded text in the other, both ways round: two rows a source.

    A decoded text is used as it is, and never replaced by gold: an empty one leaves only its tag to be read, and of a
    long or cut-off one only what the gold stream reaches is read. `pseudo_loss` falls on usable decoded texts only.
    """

    def __init__(
        self, pair: Pair, decoded: Decoded, pseudo_loss: float, max_length: int, rows: np.ndarray | None = None
    ) -> None:
        super().__init__(pair, decoded, pseudo_loss, max_length, rows)

    def loss_tokens(self, rows: np.ndarray) -> float:
        """See Builder."""
        pseudo: Any = sum(self._pseudo_lengths(rows, d).sum() for d in (L2R, R2L))
        return float(2 * self._gold_tokens(rows) + self.pseudo_loss * pseudo)

    def build(self, rows: np.ndarray, width: int, size: int, fixed: bool) -> Batch:
        """See Builder."""
        assert self.decoded is not None
        T = self._width(rows, width, fixed, (L2R, R2L))
        gold = [self._gold(rows, d, T) for d in (L2R, R2L)]
        decoded = [self.decoded.stream(rows, d, T) for d in (L2R, R2L)]
        streams = np.stack([np.stack([gold[L2R], decoded[R2L]], 1), np.stack([decoded[L2R], gold[R2L]], 1)], 1)
        weights = np.ones(streams.shape[:3])  # [B, 2, D]
        for d in (L2R, R2L):
            weights[:, 1 - d, d] = self.pseudo_loss * (self._pseudo_lengths(rows, d) > 0)
        return self._batch(rows, width, size, fixed, (L2R, R2L), streams.reshape(-1, 2, T), weights.reshape(-1, 2))


class AsynchronousBuilder(_OfCorpus):
    """Gold l2r text, the decoded r2l text that it reads to the end, and gold r2l text: one row a source.

    A decoded text is used as it is, as in triples; one of more than `max_length` tokens is cut there.
    """

    def __init__(
        self, pair: Pair, decoded: Decoded, pseudo_loss: float, max_length: int, rows: np.ndarray | None = None
    ) -> None:
        super().__init__(pair, decoded, pseudo_loss, max_length, rows)

    def loss_tokens(self, rows: np.ndarray) -> float:
        """See Builder."""
        return 2 * self._gold_tokens(rows) + self.pseudo_loss * float(self._pseudo_lengths(rows, R2L).sum())

    def build(self, rows: np.ndarray, width: int, size: int, fixed: bool) -> Batch:
        """See Builder."""
        assert self.decoded is not None
        read = self.decoded.lengths(rows, R2L).clip(max=self.max_length) + 1
        T = max(width if fixed else _longest(self.pair.target, rows), int(read.max()))
        T = -(-T // 8) * 8 if fixed else T
        gold = [self._gold(rows, d, T) for d in (L2R, R2L)]
        streams = np.stack([gold[L2R], self.decoded.stream(rows, R2L, T), gold[R2L]], 1)
        weights = np.ones(streams.shape[:2])
        weights[:, 1] = self.pseudo_loss * (self._pseudo_lengths(rows, R2L) > 0)
        return self._batch(rows, width, size, fixed, (L2R, R2L, R2L), streams, weights)


def _longest(texts: Texts, rows: np.ndarray) -> int:
    return int(texts.lengths[rows].max()) + 1


def _filled(
    source: np.ndarray,
    streams: np.ndarray,
    directions: Sequence[Direction],
    weights: np.ndarray,
    size: int,
    fill: bool,
) -> Batch:
    """Filled up to `size` sources with rows that are empty and bear no loss."""
    gap, share = size - len(source), len(streams) // len(source)
    if gap:
        empty = np.full((gap, source.shape[1]), PAD, dtype=source.dtype)
        empty[:, 0] = END
        source = np.concatenate([source, empty])
        ended = np.full((gap * share, *streams.shape[1:]), PAD, dtype=streams.dtype)
        ended[..., 0] = END
        streams = np.concatenate([streams, ended])
        weights = np.concatenate([weights, np.zeros((gap * share, weights.shape[1]))])
    return Batch.of_streams(source, streams, [d.tag for d in directions], weights, fill)
