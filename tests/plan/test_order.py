"""Sequential, Shuffled and Subset: which sample stands where, and what is refused."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan import Balanced, Order, Plan, Sequential, Shuffled, Subset, Weighted
from headrace.plan.order import EpochOrder
from headrace.types import World
from late import Late

stats = Late("scipy.stats")

UNLIKELY = 1e-4
SEEDS = st.integers(0, 2**64 - 1)


def epoch_of(order: Order, length: int, *, seed: int = 0, epoch: int = 0, count: int | None = None) -> list[int]:
    positions = np.arange(order.samples(length) if count is None else count)
    return order.epoch(seed, epoch, length)(positions).tolist()


def test_sequential_is_the_datasets_own_order_and_wraps_round() -> None:
    assert not Sequential.random
    for epoch in range(3):
        assert epoch_of(Sequential(), 4, seed=epoch, epoch=epoch, count=11) == [0, 1, 2, 3] * 2 + [0, 1, 2]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.integers(1, 200), SEEDS, SEEDS)
def test_shuffled_reads_every_sample_once_and_wraps_round(length: int, seed: int, epoch: int) -> None:
    read = epoch_of(Shuffled(), length, seed=seed, epoch=epoch, count=2 * length + 3)
    assert sorted(read[:length]) == list(range(length))
    assert read[length:] == (read * 2)[: length + 3]


def test_shuffled_is_new_in_each_epoch_under_each_seed_and_at_each_length() -> None:
    assert Shuffled.random
    words = [(0, 0), (0, 1), (1, 0), (1, 1), (2**32, 0), (2**32 + 1, 0), (2**64 - 1, 0), (0, 2**64 - 1)]
    orders = {tuple(epoch_of(Shuffled(), 100, seed=seed, epoch=epoch)) for seed, epoch in words}
    assert len(orders) == len(words)
    assert [index for index in epoch_of(Shuffled(), 101) if index < 100] != list(range(100))


@pytest.mark.parametrize("along", ["epoch", "seed"])
def test_consecutive_shuffles_are_unrelated(along: str) -> None:
    """Agreements of two random permutations follow Poisson(1); rank correlations are normal."""
    length, count = 500, 2000
    orders = np.array([epoch_of(Shuffled(), length, **{along: number}) for number in range(count)])
    agree = np.bincount(np.minimum((orders[1:] == orders[:-1]).sum(axis=1), 5), minlength=6)
    expected = np.append(stats.poisson.pmf(range(5), 1), stats.poisson.sf(4, 1)) * (count - 1)
    assert stats.chisquare(agree, expected).pvalue > UNLIKELY
    centred = orders - (length - 1) / 2
    scale = math.sqrt(length - 1) / (centred[0] @ centred[0])
    correlations = (centred[1:] * centred[:-1]).sum(axis=1) * scale
    assert stats.kstest(correlations, "norm").pvalue > UNLIKELY
    places = np.argsort(orders, axis=1)
    moved = np.bincount(((places[1:, 7] - places[:-1, 7]) % length) * 20 // length, minlength=20)
    assert stats.chisquare(moved).pvalue > UNLIKELY, "where one sample stands next"


def test_large_consecutive_shuffles_are_unrelated() -> None:
    length = 2**16 + 1
    orders = np.array([epoch_of(Shuffled(), length, seed=3, epoch=epoch) for epoch in range(12)])
    for one, other in zip(orders[1:], orders[:-1], strict=True):
        assert (one == other).sum() < 10
        assert abs(stats.pearsonr(one, other).statistic) * math.sqrt(length) < 4
        assert stats.chisquare(np.bincount((one - other) % length * 64 // length, minlength=64)).pvalue > UNLIKELY


@pytest.mark.parametrize("order", [Sequential(), Shuffled()], ids=["sequential", "shuffled"])
def test_a_trillion_samples_cost_nothing(order: Order) -> None:
    length = 10**12
    read = order.epoch(0, 0, length)(np.array([0, length - 1, length, 2 * length - 1]))
    assert read[0] == read[2]
    assert read[1] == read[3]
    assert 0 <= read.min() < read.max() < length
    plan = Plan(order, length, 256, World(3, 7))
    assert plan.steps(0) == -(-length // (256 * 7))
    last = plan.positions(0, plan.steps(0) - 1)
    assert length - 256 * 7 <= last[0] < last[-1] < length + 7
    assert len(set(plan.batch(0, plan.steps(0) // 2).tolist())) == 256


def test_by_default_positions_are_dealt_as_they_are() -> None:
    for order in (Sequential(), Shuffled(), Subset([4, 5])):
        assert order.deal(0, 0, 10, 20, np.array([0, 3, 9])).tolist() == [10, 13, 19]


@pytest.mark.parametrize(
    "indices",
    [
        [5, 2, 9],
        (5, 2, 9),
        np.array([5, 2, 9], np.uint8),
        np.array([5, 2, 9], np.uint64),
        torch.tensor([5, 2, 9]),
        torch.tensor([5, 2, 9], dtype=torch.int32),
    ],
)
def test_subset_reads_its_indices_in_the_order_given(indices: Any) -> None:
    subset = Subset(indices)
    assert not subset.random
    assert subset.samples(10) == 3
    assert epoch_of(subset, 10, seed=1, epoch=1, count=7) == [5, 2, 9, 5, 2, 9, 5]
    assert subset.indices.dtype == np.int64


def test_subset_of_a_range() -> None:
    assert epoch_of(Subset(range(10, 0, -3)), 11) == [10, 7, 4, 1]


def test_a_subset_reads_a_repeated_index_as_often_as_given() -> None:
    assert epoch_of(Subset([1, 1, 0]), 2) == [1, 1, 0]
    assert sorted(epoch_of(Subset([1, 1, 0], shuffle=True), 2)) == [0, 1, 1]


def test_a_subset_does_not_follow_later_changes_of_its_argument() -> None:
    indices = np.array([3, 1, 2])
    subset = Subset(indices)
    indices[:] = 0
    assert epoch_of(subset, 4) == [3, 1, 2]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=60, unique=True), SEEDS)
def test_a_shuffled_subset_permutes_its_own_indices(indices: list[int], seed: int) -> None:
    subset = Subset(indices, shuffle=True)
    assert subset.random
    read = epoch_of(subset, 301, seed=seed, count=2 * len(indices))
    assert sorted(read[: len(indices)]) == sorted(indices)
    assert read[len(indices) :] == read[: len(indices)]
    within = epoch_of(Shuffled(), len(indices), seed=seed)
    assert read[: len(indices)] == [indices[place] for place in within]


def test_shuffled_returns_another_subset() -> None:
    plain = Subset(range(50))
    shuffled = plain.shuffled()
    assert (plain.random, shuffled.random, shuffled.shuffled().random) == (False, True, True)
    assert epoch_of(plain, 50) == list(range(50))
    assert epoch_of(shuffled, 50) == epoch_of(Subset(range(50), shuffle=True), 50) != list(range(50))
    assert epoch_of(shuffled, 50) != epoch_of(shuffled, 50, epoch=1)


@pytest.mark.parametrize(
    ("indices", "error", "text"),
    [
        ([], ValueError, "indices is empty: expected a non-empty sequence of integers"),
        (np.empty(0, np.int64), ValueError, "indices is empty"),
        ([[1, 2], [3, 4]], ValueError, r"indices of shape \(2, 2\) is not allowed.*one dimension"),
        ([[1], [2, 3]], ValueError, r"indices is not allowed.*one dimension \(.*inhomogeneous"),
        (5, TypeError, "indices=5 is not allowed: expected a non-empty sequence of integers, got int"),
        ((one for one in [1]), TypeError, "got generator. Pass a list, an array or a tensor"),
        ([3, -1, 2], ValueError, "indices=-1 is not allowed: expected indices >= 0"),
        ([-(2**63)], ValueError, "indices >= 0"),
        ([0.0, 1.0], TypeError, "dtype float64 are not allowed: expected integers"),
        ([True, False], TypeError, r"dtype bool are not allowed.*numpy\.flatnonzero\(mask\)"),
        (torch.tensor([True, False]), TypeError, r"numpy\.flatnonzero\(mask\)"),
        (["1"], TypeError, "expected integers"),
        ([1, None], TypeError, "expected integers"),
    ],
)
def test_subset_errors(indices: Any, error: type[Exception], text: str) -> None:
    for shuffle in (False, True):
        with pytest.raises(error, match=text):
            Subset(indices, shuffle=shuffle)


@pytest.mark.parametrize("largest", [10, 11, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_subset_of_another_dataset_is_refused(largest: int) -> None:
    subset = Subset(np.array([0, largest], np.uint64))
    for order in (subset, subset.shuffled()) if largest < 2**63 else (subset,):
        with pytest.raises(ValueError, match=rf"largest index={largest} is not allowed.*len\(dataset\)=10\b"):
            order.samples(10)


@pytest.mark.parametrize("order", [Sequential(), Shuffled(), Subset([3, 1, 2]), Subset([3, 1, 2], shuffle=True)])
def test_orders_travel_to_workers(order: Order) -> None:
    copy = pickle.loads(pickle.dumps(order))
    assert copy.random == order.random
    assert epoch_of(copy, 4, seed=5) == epoch_of(order, 4, seed=5)


@pytest.mark.parametrize(
    ("order", "line"),
    [
        (Sequential(), "Sequential()"),
        (Shuffled(), "Shuffled()"),
        (Subset([1, 2, 3]), "Subset(3#77ba1ae68d5afbb4, False)"),
        (Subset(np.array([1, 2, 3], np.int16)), "Subset(3#77ba1ae68d5afbb4, False)"),
        (Subset([1, 2, 3], shuffle=True), "Subset(3#77ba1ae68d5afbb4, True)"),
        (Weighted([1, 2]), "Weighted(2#4d390aa17e8c1093, None)"),
        (Weighted([1, 2], num_samples=9), "Weighted(2#4d390aa17e8c1093, 9)"),
        (Balanced(["a", "b", "a"]), "Balanced(2#1ebcf2e6c5f6c017, 3#add34d8899c563cc, 3#1d963967b6b6b7e0, None)"),
    ],
)
def test_the_line_that_describes_an_order_is_frozen(order: Order, line: str) -> None:
    """States on disk hold it: one that changed would be refused."""
    assert order.described == line
    assert pickle.loads(pickle.dumps(order)).described == line


class Rotated(Order):
    """A user's own."""

    def __init__(self, by: object) -> None:
        self.by = by

    def _parameters(self) -> tuple[Any, ...]:
        return (self.by,)

    def samples(self, length: int) -> int:
        return length

    def epoch(self, seed: int, epoch: int, length: int) -> EpochOrder:
        return lambda positions: positions % length


@pytest.mark.parametrize(
    ("order", "line"),
    [
        (Sequential(), "Sequential()"),
        (Shuffled(), "Shuffled()"),
        (Subset(range(1234)), "Subset(1,234 indices)"),
        (Subset(range(1234), shuffle=True), "Subset(1,234 indices, shuffle=True)"),
        (Weighted(np.ones(1234)), "Weighted(1,234 weights)"),
        (Weighted([1, 2], num_samples=1000), "Weighted(2 weights, num_samples=1,000)"),
        (Balanced(["a", "b", "a"]), "Balanced(3 labels of 2 classes)"),
        (Balanced(np.arange(1234), length=9), "Balanced(1,234 labels of 1,234 classes, length=9)"),
        (Rotated(3), "Rotated(3)"),
        (Rotated(np.zeros((40, 50))), "Rotated(2,000 items)"),
    ],
    ids=repr,
)
def test_an_order_is_shown_in_a_short_line(order: Order, line: str) -> None:
    assert repr(order) == line
