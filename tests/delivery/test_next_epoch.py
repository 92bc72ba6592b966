"""The first batches of an epoch, computed while the last ones of the epoch before are read."""

import multiprocessing
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from delivery.manual import made, run, tasks
from headrace import DataLoader
from headrace.testing import FakeDataset
from headrace.types import PlanTask


def test_the_next_epoch_begins_while_the_last_batches_are_read() -> None:
    loader, executor = made(6, persistent_workers=True)
    reader = iter(loader)
    (pool,) = executor.pools
    run(reader, pool, 0, 4)
    assert len(pool.submitted) == 8, "at most one window"
    assert tasks(pool)[6:] == [PlanTask(1, 0), PlanTask(1, 1)]
    run(reader, pool, 4, 2)
    assert next(reader, None) is None
    assert len(pool.submitted) == 10
    assert loader.stats().batches == 6
    reader = iter(loader)
    assert len(pool.submitted) == 10, "they are the first of this epoch"
    run(reader, pool, 6, 1)
    assert len(pool.submitted) == 11
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("what", ["set_epoch", "load_state_dict", "abandoned"])
def test_what_was_computed_for_another_epoch_is_thrown_away(what: str) -> None:
    loader, executor = made(6, persistent_workers=True)
    reader = iter(loader)
    (pool,) = executor.pools
    state = loader.state_dict()
    run(reader, pool, 0, 5)
    assert tasks(pool)[6:] == [PlanTask(1, 0), PlanTask(1, 1), PlanTask(1, 2)]
    expected = PlanTask(0, 0)
    if what == "set_epoch":
        loader.set_epoch(3)
        expected = PlanTask(3, 0)
    elif what == "load_state_dict":
        loader.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an epoch was abandoned
        reader = iter(loader)
        assert tasks(pool)[9] == expected
        pool.complete(9)
        next(reader)
    assert loader.state_dict()["epoch"] == expected.epoch


def test_an_epoch_that_is_set_before_its_first_batch_is_read() -> None:
    """Lightning sets it after `iter()`."""
    loader, executor = made(6, persistent_workers=True)
    reader = iter(loader)
    (pool,) = executor.pools
    run(reader, pool, 0, 6)
    assert next(reader, None) is None
    reader = iter(loader)
    loader.set_epoch(1)
    run(reader, pool, 6, 1)
    assert len(pool.submitted) == 11
    loader.set_epoch(7)
    reader = iter(loader)
    pool.complete(11)
    assert tasks(pool)[11] == PlanTask(7, 0)


class WithEpoch(FakeDataset):
    def set_epoch(self, epoch: int) -> None:
        """Set what the samples are made of."""


class Told(FakeDataset):
    """It can be told something through shared memory."""

    def __init__(self, length: int, shared: Any) -> None:
        super().__init__(length)
        self.shared = shared


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": WithEpoch(6)},
        {"dataset": Subset(WithEpoch(9), range(6))},
        {"dataset": Told(6, torch.zeros(1).share_memory_())},
        {"dataset": Told(6, [multiprocessing.Value("i", 0)])},
        {"persistent_workers": False},
    ],
    ids=["set_epoch", "of a part", "a shared tensor", "a shared value", "workers that end"],
)
def test_where_it_could_be_another_nothing_is_computed(options: dict[str, Any]) -> None:
    loader, executor = made(6, **({"persistent_workers": True} | options))
    reader = iter(loader)
    (pool,) = executor.pools
    run(reader, pool, 0, 6)
    assert next(reader, None) is None
    assert len(pool.submitted) == 6


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_no_bit_changes(start: str) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5}
    workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": start}
    expected, found = DataLoader(FakeDataset(10), **options), DataLoader(FakeDataset(10), **options, **workers)
    for epoch in (0, 1, 2, 6, 7, 3):
        for loader in (expected, found):
            if epoch in (6, 3):
                loader.set_epoch(epoch)
        for one, other in zip(expected, found, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
