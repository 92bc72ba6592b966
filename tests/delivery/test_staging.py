"""The staging queue: what is computed and not delivered counts as not delivered."""

from typing import Any

import pytest
from torch.utils.data import IterableDataset

from headrace.delivery.reader import Delivery, Reader
from headrace.loader import DataLoader
from headrace.progress.base import Observer
from headrace.testing import ManualExecutor
from headrace.types import StreamPlace
from headrace.worker.streams import Portion, StreamEnd


class Told(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, bool]] = []
        self.finished: list[bool] = []

    def delivering(self, nth: int, number: int, worker: int, samples: int, resume: Any, last: bool) -> None:
        self.batches.append((number, last))

    def ended(self, finished: bool) -> None:
        self.finished.append(finished)


class Numbers(IterableDataset[int]):
    def __init__(self, length: int, broken: int = -1) -> None:
        self.length, self.broken = length, broken

    def __iter__(self) -> Any:
        return Reading(self)


class Reading:
    """Raises in the place of a number, and goes on after it."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers, self.at = numbers, -1

    def __next__(self) -> int:
        self.at += 1
        if self.at == self.numbers.broken:
            raise OSError(f"number {self.at} is broken")
        if self.at >= self.numbers.length:
            raise StopIteration
        return self.at


def staged_ahead(loader: DataLoader[Any], ahead: int, told: Told) -> Reader:
    """Begin to read a loader with so many batches staged behind the one that is delivered."""
    made = iter(loader)
    reading, pool = made._pass, made._pool
    reading.observers = (told,)
    made._keep_pool = True
    return Reader(pool, reading, Delivery(**{**vars(made._delivery), "staged_ahead": ahead}), loader._meter)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_last_batch_is_known_where_batches_are_staged_ahead(ahead: int) -> None:
    loader, told = DataLoader(Numbers(5), batch_size=None), Told()
    reader = staged_ahead(loader, ahead, told)
    for number in range(5):
        assert next(reader) == number
        assert loader.state_dict()["samples"] == number + 1, "what is staged counts as not delivered"
        assert loader.stats().samples == number + 1
    assert told.batches == [(number, ahead > 0 and number == 4) for number in range(5)]
    assert told.finished == []
    assert next(reader, None) is None
    assert told.finished == [True]


def test_an_error_that_was_staged_comes_in_its_place() -> None:
    loader, told = DataLoader(Numbers(5, broken=2), batch_size=None), Told()
    reader = staged_ahead(loader, 1, told)
    assert [next(reader), next(reader)] == [0, 1]
    with pytest.raises(OSError, match="number 2 is broken"):
        next(reader)
    assert [next(reader), next(reader)] == [3, 4]
    assert [number for number, _ in told.batches] == [0, 1, 2, 3, 4]


def test_an_error_of_a_worker_that_was_staged_comes_in_its_place() -> None:
    executor, told = ManualExecutor(), Told()
    loader = DataLoader(Numbers(9), batch_size=None, executor=executor, num_workers=1, prefetch_factor=4)
    reader = staged_ahead(loader, 1, told)
    pool = executor.pools[0]
    first = len(pool.submitted) - 4
    pool.complete(first, Portion(1, "a", StreamPlace()))
    pool.complete(first + 1, error=OSError("broken"))
    pool.complete(first + 2, Portion(1, "b", StreamPlace()))

    def take() -> Any:
        for number in range(first + 3, len(pool.submitted)):
            pool.complete(number, StreamEnd())
        return next(reader, None)

    assert take() == "a"
    with pytest.raises(OSError, match="broken"):
        take()
    assert take() == "b"
    assert take() is None
    assert told.batches == [(0, False), (1, False), (2, True)]


def test_a_reader_that_is_dropped_drops_what_is_staged() -> None:
    loader, told = DataLoader(Numbers(5), batch_size=None), Told()
    reader = staged_ahead(loader, 2, told)
    assert next(reader) == 0
    del reader
    assert told.finished[-1] is False
    assert loader.state_dict()["samples"] == 1
