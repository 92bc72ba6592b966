"""Pools with more or fewer workers, in the middle of an epoch and between two: not a bit changes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import RandomSampler

from comparable import flat
from executors.mortal_datasets import Mortal
from headrace import DataLoader
from rays import RAY, undisturbed
from waiting import wait_until

WORKERS = [
    pytest.param({"multiprocessing_context": "fork"}, id="fork"),
    pytest.param({"multiprocessing_context": "spawn"}, id="spawn", marks=pytest.mark.slow),
    pytest.param({"executor": RAY}, id="ray", marks=pytest.mark.ray),
]


def a_loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": 3, "num_workers": 1, "seed": 3} | options)


@pytest.mark.parametrize("workers", WORKERS)
def test_more_and_fewer_workers_in_the_middle_of_an_epoch(workers: dict[str, Any], tmp_path: Path) -> None:
    """1, 4, then 2; with a death after each."""
    dataset = Mortal(tmp_path, [40, 100], length=150)
    loader = a_loader(dataset, **workers)
    reader: Any = iter(loader)
    pool = reader._pool
    batches = []
    for number, batch in enumerate(reader):
        batches.append(flat(batch))
        if number in (5, 30):
            workers_now = 4 if number == 5 else 2
            loader.resize_workers(workers_now)
            assert loader.stats().workers == pool.workers == workers_now
    assert batches == undisturbed(Mortal(tmp_path, length=150))
    assert loader.num_workers == 1
    assert len({worker for _, worker, _ in dataset.begun()}) > 1


def test_those_that_are_too_many_end_and_leave_nothing(tmp_path: Path) -> None:
    loader = a_loader(Mortal(tmp_path), num_workers=4, persistent_workers=True)
    whole = [flat(batch) for batch in loader]
    pool: Any = loader._iterator
    processes = [peer.process for peer in pool._peers]
    loader.resize_workers(1)
    loader.set_epoch(0)
    assert [flat(batch) for batch in loader] == whole
    wait_until(lambda: not any(process.is_alive() for process in processes[1:]))
    assert processes[0].is_alive()
    assert pool.slots[0] <= 4, "their memory is released"


def test_between_epochs_new_workers_are_as_many(tmp_path: Path) -> None:
    loader = a_loader(Mortal(tmp_path), num_workers=1)
    first = [flat(batch) for batch in loader]
    loader.resize_workers(3)
    loader.set_epoch(0)
    reader: Any = iter(loader)
    assert len(reader._pool._peers) == 3
    assert len(reader._window._futures) == 6, "with as many tasks each"
    assert [flat(batch) for batch in reader] == first


def test_more_workers_have_tasks_at_once_and_fewer_ask_for_less(tmp_path: Path) -> None:
    loader = a_loader(Mortal(tmp_path, length=300), num_workers=1)
    reader: Any = iter(loader)
    next(reader)
    loader.resize_workers(4)
    next(reader)
    assert len(reader._window._futures) == 8
    loader.resize_workers(1)
    for _ in range(10):
        next(reader)
    assert len(reader._window._futures) == 2
    assert len(list(reader)) == 88


def test_a_killed_worker_that_leaves_is_not_replaced(tmp_path: Path) -> None:
    loader = a_loader(Mortal(tmp_path, length=300), num_workers=2)
    reader: Any = iter(loader)
    batches = [flat(next(reader))]
    leaving = reader._pool._peers[1].process
    loader.resize_workers(1)
    os.kill(leaving.pid, signal.SIGKILL)
    batches += [flat(batch) for batch in reader]
    assert batches == undisturbed(Mortal(tmp_path, length=300))
    assert loader.stats().restarts == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "follows no plan"),
        ({"sampler": RandomSampler(range(9))}, "follows no plan"),
        ({"seed": 1, "executor": "thread"}, "only local processes"),
        ({"seed": 1, "executor": "inline"}, "only local processes"),
    ],
)
def test_where_bits_would_change_it_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        DataLoader(range(9), num_workers=2, **options).resize_workers(3)


@pytest.mark.parametrize(("workers", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_wrong_number_is_refused(workers: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="workers="):
        DataLoader(range(9), num_workers=2, seed=1).resize_workers(workers)
