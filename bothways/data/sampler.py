"""Lengths in, the rows that a run trains on and an endless and repeatable sequence of updates out.

What update n consists of depends on the corpus, the budget and the seed alone: not on the system that is trained, not
on how many processes share the update, and not on where a run was interrupted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bothways.config import TrainConfig
from bothways.errors import DataError

WIDTH_MULTIPLE = 8  # padded lengths are multiples of this, so that there are only a few shapes


@dataclass(frozen=True)
class Update:
    """The pairs of one update of the weights."""

    index: int
    rows: np.ndarray
    width: int  # tokens a side, end mark included, padded to a multiple
    size: int  # sources that the budget allows at this width; the last update of an epoch may have fewer

    def parts(self, count: int) -> "list[Update]":
        """Its share for each of `count` processes or accumulated parts; some may be empty."""
        size = -(-self.size // count)
        return [Update(self.index, self.rows[i::count], self.width, size) for i in range(count)]


class Sampler:
    """Shuffles, sorts by length, fills each update up to its budget of padded tokens, shuffles again."""

    def __init__(
        self,
        lengths: tuple[np.ndarray, np.ndarray],
        batch_tokens: int,
        max_length: int,
        seed: int,
        rows: np.ndarray | None = None,
    ) -> None:
        """Lengths of the whole corpus; `rows` of it (by default all) are trained on, unless they are too long."""
        source, target = (np.asarray(side, dtype=np.int64) for side in lengths)
        longer = np.maximum(source, target)
        rows = np.arange(len(longer)) if rows is None else rows
        self.rows = rows[longer[rows] <= max_length]
        self.left_out = len(rows) - len(self.rows)
        if not len(self.rows):
            raise DataError(f"train.max_length: all {len(rows)} training pairs are longer than {max_length} tokens")
        self.width = _rounded(longer[self.rows] + 1)
        # Longest first; within a width, pairs with targets of like length together.
        self.order = -(self.width * (int(self.width.max()) + 1) + _rounded(target[self.rows] + 1))
        self.seed = seed
        self.bounds = self._bounds(batch_tokens)

    @property
    def updates_per_epoch(self) -> int:
        """The same in every epoch: it follows from the lengths."""
        return len(self.bounds)

    def updates(self, start: int) -> Iterator[Update]:
        """Every update from the `start`-th on, for ever."""
        epoch, first = divmod(start, self.updates_per_epoch)
        while True:
            for offset, update in enumerate(self._epoch(epoch)):
                if offset >= first:
                    yield update
            epoch, first = epoch + 1, 0

    def _epoch(self, epoch: int) -> Iterator[Update]:
        random = np.random.default_rng([self.seed, epoch])
        shuffled = random.permutation(len(self.rows))
        ordered = shuffled[np.argsort(self.order[shuffled], kind="stable")]
        for offset, i in enumerate(random.permutation(len(self.bounds))):
            begin, end, width, size = self.bounds[i]
            yield Update(epoch * len(self.bounds) + offset, self.rows[ordered[begin:end]], width, size)

    def _bounds(self, batch_tokens: int) -> list[tuple[int, int, int, int]]:
        """Begin, end, width and size of every update, in the order of length."""
        widths = self.width[np.argsort(self.order, kind="stable")]
        bounds, begin = [], 0
        while begin < len(widths):
            width = int(widths[begin])
            size = max(1, batch_tokens // width)
            end = min(begin + size, len(widths))
            bounds.append((begin, end, width, size))
            begin = end
        return bounds


def rows_of(lengths: tuple[np.ndarray, np.ndarray], config: TrainConfig) -> np.ndarray:
    """The rows that a run trains on: its share, without the fold that is left out."""
    rows = np.arange(len(lengths[0])) if config.share == 1 else share_of(lengths, config.share, config)
    if config.without_fold is None:
        return rows
    return rows[folds_of(len(lengths[0]), config.folds, config.seed)[rows] != config.without_fold]


def share_of(lengths: tuple[np.ndarray, np.ndarray], share: float, config: TrainConfig) -> np.ndarray:
    """A random share of those rows that are not too long for training, rising."""
    fitting = np.flatnonzero(np.maximum(*lengths) <= config.max_length)
    if not len(fitting):
        raise DataError(f"train.max_length: all training pairs are longer than {config.max_length} tokens")
    count = max(1, round(share * len(fitting)))
    return np.sort(np.random.default_rng([config.seed, 0]).permutation(fitting)[:count])


def folds_of(count: int, folds: int, seed: int) -> np.ndarray:
    """The fold of every row, 1 to `folds`, of like size and at random."""
    return np.random.default_rng([seed, 1]).permutation(count) % folds + 1


def _rounded(lengths: np.ndarray) -> np.ndarray:
    return -(-lengths // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
