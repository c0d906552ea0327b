"""The order of training: every pair once an epoch, within the budget, from any point on, for any number of parts."""

from itertools import islice

import numpy as np
import pytest

from bothways.config import TrainConfig
from bothways.data.sampler import Sampler, Update, share_of
from bothways.errors import DataError


def lengths(seed: int = 0, count: int = 203) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.integers(1, 40, count), draw.integers(1, 60, count)


def some(sampler: Sampler, start: int, count: int) -> list[tuple]:
    return [(u.index, u.rows.tolist(), u.width, u.size) for u in islice(sampler.updates(start), count)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [10, 64, 500, 10_000])
def test_every_fitting_row_comes_exactly_once_an_epoch(budget: int, seed: int) -> None:
    source, target = lengths(seed)
    sampler = Sampler((source, target), budget, 45, seed)
    fitting = np.flatnonzero(np.maximum(source, target) <= 45)
    assert sampler.left_out == len(source) - len(fitting) > 0
    updates = some(sampler, 0, 3 * sampler.updates_per_epoch)
    for epoch in range(3):
        part = updates[epoch * sampler.updates_per_epoch : (epoch + 1) * sampler.updates_per_epoch]
        assert sorted(row for _, rows, _, _ in part for row in rows) == fitting.tolist()
    assert [index for index, *_ in updates] == list(range(len(updates)))


@pytest.mark.parametrize("budget", [10, 64, 500])
def test_budgets_are_kept(budget: int) -> None:
    source, target = lengths()
    for update in islice(Sampler((source, target), budget, 100, 1).updates(0), 60):
        longest = max(int(source[update.rows].max()), int(target[update.rows].max())) + 1  # the end mark
        assert longest <= update.width < longest + 8 and update.width % 8 == 0
        assert len(update.rows) <= update.size
        assert update.size * update.width <= max(budget, update.width)  # one pair, however long


def test_batches_are_full_and_of_like_length() -> None:
    source, target = lengths(count=2000)
    sampler = Sampler((source, target), 600, 100, 1)
    updates = list(islice(sampler.updates(0), sampler.updates_per_epoch))
    assert sum(len(u.rows) == u.size for u in updates) >= len(updates) - 1
    used = sum(int(np.maximum(source, target)[u.rows].sum()) + len(u.rows) for u in updates)
    assert used / sum(len(u.rows) * u.width for u in updates) > 0.85


def test_order_goes_on_from_anywhere() -> None:
    sampler = Sampler(lengths(), 200, 100, 1)
    n = sampler.updates_per_epoch
    whole = some(sampler, 0, 3 * n + 5)
    for start in (0, 1, n - 1, n, n + 1, 2 * n, 3 * n + 2):
        assert some(Sampler(lengths(), 200, 100, 1), start, 3) == whole[start : start + 3]


def test_order_differs_between_epochs_and_seeds() -> None:
    first, other = (Sampler(lengths(), 200, 100, seed) for seed in (1, 2))
    n = first.updates_per_epoch
    assert some(first, 0, n) != some(other, 0, n)
    batches = [sorted(tuple(sorted(rows)) for _, rows, _, _ in some(first, start, n)) for start in (0, n)]
    assert batches[0] != batches[1]  # not only their order: also who is together
    widths = [width for _, _, width, _ in some(first, 0, n)]
    assert widths != sorted(widths) and widths != sorted(widths, reverse=True)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_are_a_partition_of_like_size(count: int) -> None:
    for update in islice(Sampler(lengths(), 100, 100, 1).updates(0), 40):
        parts = update.parts(count)
        assert sorted(row for part in parts for row in part.rows) == sorted(update.rows)
        assert max(len(part.rows) for part in parts) - min(len(part.rows) for part in parts) <= 1
        assert all(part.width == update.width and len(part.rows) <= part.size for part in parts)
        assert parts[0].size * count < update.size + count


def test_parts_of_parts_are_the_parts() -> None:
    """Who computes what does not depend on whether it is processes or accumulation that share the work."""
    update = Update(0, np.arange(11), 8, 12)
    assert [part.rows.tolist() for part in update.parts(4)] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7]]


def test_a_corpus_of_longer_pairs_only_is_an_error() -> None:
    with pytest.raises(DataError, match=r"train\.max_length: all 203 training pairs are longer than 0 tokens"):
        Sampler(lengths(), 100, 0, 1)


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_a_share_is_of_the_pairs_that_fit(share: float) -> None:
    """What is not trained on is not decoded for training either."""
    source, target = lengths()
    fitting = np.flatnonzero(np.maximum(source, target) <= 45)
    rows = share_of((source, target), share, TrainConfig(max_length=45, seed=2))
    assert len(rows) == round(share * len(fitting)) and set(rows) <= set(fitting)
    assert (np.diff(rows) > 0).all()
