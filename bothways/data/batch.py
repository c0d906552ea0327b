"""Rows of a corpus in, tensors out: padding, tags, both target directions and their losses, made once.

B sources   R rows of streams (R / B of them share a source)   D direction   S source   T target   N tokens with a loss

Which text stands in which stream, and which stream bears a loss, is decided here and nowhere else:

    pairs      (x; gold l2r)  or  (x; gold r2l)                 one direction
               (x; gold l2r, gold r2l), both with a loss        both, without interaction only: with it, gold leaks
    triples    (x; gold l2r, decoded r2l), the loss on l2r      both, with interaction
               (x; decoded l2r, gold r2l), the loss on r2l
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol, Self

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
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of every source and every gold target, end marks not counted."""
        ...

    def loss_tokens(self, rows: np.ndarray) -> float:
        """The sum of the loss's weights over these rows."""
        ...

    def build(self, rows: np.ndarray, width: int, size: int, fixed: bool) -> Batch:
        """A batch of these rows. `fixed`: exactly `size` sources and `width` tokens a side, filled up with empty ones;
        otherwise only as large as the rows need."""
        ...


class PairBuilder:
    """Gold text in every direction, each with a loss."""

    def __init__(self, pair: Pair, directions: tuple[Direction, ...]) -> None:
        self.pair, self.directions = pair, directions

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """See Builder."""
        return self.pair.source.lengths, self.pair.target.lengths

    def loss_tokens(self, rows: np.ndarray) -> float:
        """See Builder."""
        return float(len(self.directions) * (self.pair.target.lengths[rows] + 1).sum())

    def build(self, rows: np.ndarray, width: int, size: int, fixed: bool) -> Batch:
        """See Builder."""
        source, target = self.pair.source, self.pair.target
        S, T = (width, width) if fixed else (_longest(source, rows), _longest(target, rows))
        streams = np.stack([target.gather(rows, T, reverse=d is R2L) for d in self.directions], axis=1)
        weights = np.ones(streams.shape[:2])
        return _filled(source.gather(rows, S), streams, self.directions, weights, size if fixed else len(rows), fixed)


@dataclass(frozen=True)
class Decoded:
    """Decoded text of some training sources, the futures of training with interaction (reading order on disk)."""

    rows: np.ndarray  # [n] rows of the training corpus
    texts: tuple[Texts, Texts]  # l2r, r2l
    usable: np.ndarray  # [n, 2] whether the text is neither empty nor cut off, and so may be a training target itself

    @classmethod
    def open(cls, folder: Path, fingerprint: str | None = None) -> "Decoded":
        """Read what a strategy's decoding stage wrote; with the fingerprint of the prepared data it must belong to."""
        try:
            rows, usable = np.load(folder / "rows.npy"), np.load(folder / "usable.npy")
            made_from = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["data"]
        except (OSError, ValueError, KeyError, TypeError):
            raise DataError(f"{folder}: holds no decoded text; write it with `bothways train` and a strategy") from None
        if fingerprint not in (None, made_from):
            raise DataError(
                f"{folder}: was decoded from other prepared data (fingerprint {made_from}) than this run's "
                f"({fingerprint}); decode again"
            )
        texts = (Texts.open(folder, "l2r"), Texts.open(folder, "r2l"))
        if not len(rows) == len(usable) == len(texts[0]) == len(texts[1]):
            raise DataError(f"{folder}: decoded texts and rows differ in number; remove the folder and decode again")
        return cls(rows, texts, usable)


class TripleBuilder:
    """Gold text in one stream and decoded text in the other, both ways round: two rows a source.

    A decoded text is used as it is, and never replaced by gold: an empty one leaves only its tag to be read, and of a
    long or cut-off one only what the gold stream reaches is read. `pseudo_loss` falls on usable decoded texts only.
    """

    def __init__(self, pair: Pair, decoded: Decoded, pseudo_loss: float, max_length: int) -> None:
        self.pair, self.decoded, self.pseudo_loss, self.max_length = pair, decoded, pseudo_loss, max_length

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """See Builder; row i is the i-th decoded source."""
        return self.pair.source.lengths[self.decoded.rows], self.pair.target.lengths[self.decoded.rows]

    def loss_tokens(self, rows: np.ndarray) -> float:
        """See Builder."""
        gold = 2.0 * (self.pair.target.lengths[self.decoded.rows[rows]] + 1).sum()
        return float(gold + self.pseudo_loss * sum(self._pseudo_lengths(rows, d).sum() for d in (L2R, R2L)))

    def build(self, rows: np.ndarray, width: int, size: int, fixed: bool) -> Batch:
        """See Builder."""
        corpus_rows = self.decoded.rows[rows]
        source, target = self.pair.source, self.pair.target
        S, T = (width, width) if fixed else (_longest(source, corpus_rows), _longest(target, corpus_rows))
        if self.pseudo_loss:  # then a decoded stream counts to its end
            T = max(T, *(int(self._pseudo_lengths(rows, d).max()) for d in (L2R, R2L)))
            T = -(-T // 8) * 8 if fixed else T
        gold = [target.gather(corpus_rows, T, reverse=d is R2L) for d in (L2R, R2L)]
        decoded = [self.decoded.texts[d].gather(rows, T, reverse=d is R2L) for d in (L2R, R2L)]
        streams = np.stack([np.stack([gold[L2R], decoded[R2L]], 1), np.stack([decoded[L2R], gold[R2L]], 1)], 1)
        weights = np.ones(streams.shape[:3])  # [B, 2, D]
        for d in (L2R, R2L):
            weights[:, 1 - d, d] = self.pseudo_loss * (self._pseudo_lengths(rows, d) > 0)
        return _filled(
            source.gather(corpus_rows, S),
            streams.reshape(-1, 2, T),
            (L2R, R2L),
            weights.reshape(-1, 2),
            size if fixed else len(rows),
            fixed,
        )

    def _pseudo_lengths(self, rows: np.ndarray, d: Direction) -> np.ndarray:
        """Tokens of the decoded texts with their end marks; 0 for those that cannot be targets."""
        lengths = self.decoded.texts[d].lengths[rows] + 1
        return np.where(self.decoded.usable[rows, d] & (lengths <= self.max_length + 1), lengths, 0)


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
