"""The figures a loader tells of itself, counted by hand beside them."""

import gc
import os
import pickle
import signal
import warnings
from dataclasses import FrozenInstanceError
from time import perf_counter
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from headrace import DataLoader, WorkerDied
from headrace.telemetry.stats import Stats
from headrace.testing import FakeDataset


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(11))


def read(loader: DataLoader[Any], batches: int | None = None) -> Stats:
    for number, _ in enumerate(loader, 1):
        if number == batches:
            break
    return loader.stats()


def test_a_new_loader_has_done_nothing() -> None:
    stats = DataLoader(FakeDataset(3)).stats()
    assert stats == Stats()
    assert stats.wait_percent == 0
    with pytest.raises(FrozenInstanceError):
        stats.batches = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("dataset", "options", "batches", "samples"),
    [
        (FakeDataset(11), {"batch_size": 4}, 3, 11),
        (FakeDataset(11), {"batch_size": 4, "drop_last": True}, 2, 8),
        (FakeDataset(11), {"batch_size": None}, 11, 11),
        (FakeDataset(11), {"batch_size": 4, "seed": 1}, 3, 11),
        (FakeDataset(11), {"batch_size": None, "seed": 1}, 11, 11),
        (FakeDataset(11), {"batch_sampler": [[0], [1, 2, 3]]}, 2, 4),
        (TensorDataset(torch.arange(11)), {"batch_size": 4}, 3, 11),
        (TensorDataset(torch.arange(11)), {"batch_size": 4, "shuffle": True}, 3, 11),
        (Stream(), {"batch_size": 4}, 3, 11),
        (Stream(), {"batch_size": None}, 11, 11),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_counts(dataset: Any, options: dict[str, Any], batches: int, samples: int, workers: int) -> None:
    loader = DataLoader(dataset, num_workers=workers, **options)
    began = perf_counter()
    stats = read(loader)
    took = perf_counter() - began
    assert (stats.batches, stats.samples, stats.restarts) == (batches, samples, 0)
    assert 0 < stats.wait_s <= stats.elapsed_s <= took
    assert 0 < stats.wait_percent <= 100
    again = read(loader, batches=2)
    assert again.batches == batches + 2, "an epoch broken off counts as far as it went"
    assert again.elapsed_s > stats.elapsed_s


def test_the_time_between_batches_is_elapsed_but_not_waited() -> None:
    loader = DataLoader(FakeDataset(2))
    batches = iter(loader)
    next(batches)
    began = perf_counter()
    while perf_counter() - began < 0.02:
        pass
    next(batches)
    stats = loader.stats()
    assert stats.elapsed_s - stats.wait_s >= 0.02


class Dying(FakeDataset):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_workers_that_replace_dead_ones_are_counted() -> None:
    loader = DataLoader(Dying(3), num_workers=1)
    for _ in range(3):
        with pytest.raises(WorkerDied):
            list(loader)
        gc.collect()
    stats = loader.stats()
    assert (stats.restarts, stats.batches) == (2, 6)


def test_bytes_and_slots_of_workers() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(8, 50_000)), batch_size=2, num_workers=1)
    batches = iter(loader)
    next(batches)
    stats = loader.stats()
    assert 400_000 <= stats.received_bytes < 410_000
    assert 1 <= stats.slots <= 4
    assert stats.slot_bytes >= 400_000 * stats.slots
    del batches
    assert loader.stats().slots == 0


def test_slots_that_were_needed_for_batches_held_once_are_given_back() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(800, 10_000)), batch_size=2, num_workers=2, seed=0)
    batches = iter(loader)
    held = [next(batches) for _ in range(50)]
    assert loader.stats().slots >= 50
    held.clear()
    for _ in range(200):
        next(batches)
    assert loader.stats().slots <= 2 * 2 + 1 + 2, "as many as there are batches asked for or held, and one a worker"


class Broken(FakeDataset):
    """Odd samples cannot be read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 2:
            raise OSError(f"sample {index}\nis broken" + 500 * " x")
        return super().__getitem__(index)


def test_replaced_samples_are_counted_and_logged_and_the_last_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Broken(240), 8, seed=0, on_error="replace")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats = read(loader)
    assert (stats.replaced, stats.batches, stats.samples) == (120, 30, 240)
    assert [one.index for one in stats.replacements] == list(range(41, 240, 2))
    last = stats.replacements[-1]
    assert (last.epoch, last.step, last.position, last.index) == (0, 29, 239, 239)
    assert last.error.startswith("OSError: sample 239 is broken x x")
    assert 250 < len(last.error) <= 300
    assert [one.levelname for one in caplog.records] == ["WARNING"] * 120
    assert {one.name for one in caplog.records} == {"headrace"}
    assert caplog.messages[-1] == (
        f"sample 239, position 239 of epoch 0, step 29, was replaced by sample {last.substitute}: {last.error}"
    )
    copy = pickle.loads(pickle.dumps(loader))
    assert copy.stats().replacements == stats.replacements


def test_only_batches_that_are_taken_count() -> None:
    loader = DataLoader(Broken(40), 2, seed=0, on_error="replace", num_workers=1, prefetch_factor=4)
    assert read(loader, batches=3).replaced == 3


def test_an_error_is_no_batch() -> None:
    loader = DataLoader(FakeDataset(4), batch_sampler=[[0], [9], [1]])
    batches = iter(loader)
    next(batches)
    with pytest.raises(IndexError):
        next(batches)
    next(batches)
    assert (loader.stats().batches, loader.stats().samples) == (2, 2)


def test_people_can_read_them() -> None:
    stats = Stats(batches=1234, samples=78976, wait_s=1.23456789, elapsed_s=20.0, replaced=1, replacements=(None,))  # type: ignore[arg-type]
    assert str(Stats()) == "Stats()"
    assert str(stats) == (
        "Stats(batches=1,234, samples=78,976, wait_s=1.235, elapsed_s=20.000, replaced=1,\n"
        "      replacements=(1 of them))"
    )
