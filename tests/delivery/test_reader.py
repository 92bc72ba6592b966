"""The window: order, bounds and errors, with the order of completion chosen by the test."""

import warnings
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from headrace import DataLoader, DeliveryTimeout
from headrace.testing import FakeDataset, ManualExecutor, ManualPool
from headrace.types import PlanTask
from headrace.worker.streams import StreamEnd


def begin(length: int = 12, **options: Any) -> tuple[Any, ManualPool]:
    """A reader over single samples, and the pool behind it."""
    executor = ManualExecutor()
    options = {"num_workers": 2, "prefetch_factor": 2, "batch_size": None, "seed": 0} | options
    reader = iter(DataLoader(FakeDataset(length), executor=executor, **options))
    return reader, executor.pools[0]


def test_batches_come_in_order_whatever_is_done_first() -> None:
    reader, pool = begin()
    for number in (3, 1, 0):
        pool.complete(number)
    assert next(reader)["index"] == 0
    assert next(reader)["index"] == 1
    with pytest.raises(DeliveryTimeout, match=r"waits for one of the tasks \[2\]"):
        next(reader)


def test_out_of_order_delivery_takes_what_is_done() -> None:
    reader, pool = begin(in_order=False)
    pool.complete(3)
    pool.complete(1)
    assert [next(reader)["index"], next(reader)["index"]] == [1, 3]


@pytest.mark.parametrize("in_order", [True, False])
def test_no_more_than_prefetch_times_workers_are_outstanding(in_order: bool) -> None:
    reader, pool = begin(in_order=in_order)
    assert len(pool.submitted) == 4, "before the first batch is asked for"
    for taken in range(12):
        pool.complete(taken)
        next(reader)
        assert len(pool.submitted) == min(4 + taken + 1, 12)
    with pytest.raises(StopIteration):
        next(reader)
    assert pool.closed


def test_an_error_takes_the_place_of_its_batch() -> None:
    reader, pool = begin()
    pool.complete(0, error=ValueError("broken"))
    pool.complete(1)
    with pytest.raises(ValueError, match="broken"):
        next(reader)
    assert next(reader)["index"] == 1
    assert len(pool.submitted) == 6, "the window is filled up behind an error too"


def test_tasks_are_integers_and_go_to_the_least_loaded() -> None:
    reader, pool = begin()
    assert [task for task, _ in pool.submitted] == [PlanTask(0, step) for step in range(4)]
    assert [future.worker for _, future in pool.submitted] == [0, 1, 0, 1]
    for number in (0, 2):
        pool.complete(number)
    next(reader)
    assert pool.submitted[-1][1].worker == 0


def test_a_late_epoch_restarts_the_prefetch() -> None:
    executor = ManualExecutor()
    loader = DataLoader(FakeDataset(5), executor=executor, num_workers=1, seed=0)
    reader = iter(loader)
    loader.set_epoch(3)
    with pytest.raises(DeliveryTimeout):
        next(reader)
    assert [task for task, _ in executor.pools[0].submitted[2:]] == [PlanTask(3, 0), PlanTask(3, 1)]


def test_persistent_readers_share_a_pool() -> None:
    executor = ManualExecutor()
    loader = DataLoader(FakeDataset(5), executor=executor, num_workers=1, seed=0, persistent_workers=True)
    first, second = iter(loader), iter(loader)
    assert len(executor.pools) == 1
    del first, second
    assert not executor.pools[0].closed
    loader._iterator = None
    assert len(executor.pools) == 1


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(100))

    def __len__(self) -> int:
        return 2


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_streams_go_round_the_workers_that_are_left() -> None:
    executor = ManualExecutor()
    reader = iter(DataLoader(Endless(), executor=executor, num_workers=3, prefetch_factor=1, batch_size=None))
    pool = executor.pools[0]
    assert [future.worker for _, future in pool.submitted] == [0, 1, 2]
    pool.complete(0)
    pool.complete(1, StreamEnd())
    pool.complete(2)
    assert [next(reader), next(reader)] == [0, 0]
    assert [future.worker for _, future in pool.submitted] == [0, 1, 2, 0, 2, 0]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_streams_in_any_order_are_asked_of_whoever_has_least_to_do() -> None:
    executor = ManualExecutor()
    options = {"executor": executor, "num_workers": 3, "prefetch_factor": 2, "batch_size": None, "in_order": False}
    reader = iter(DataLoader(Endless(), **options))
    pool = executor.pools[0]
    assert [future.worker for _, future in pool.submitted] == [0, 1, 2, 0, 1, 2]
    for task in (1, 4):  # worker 1 is quick, and worker 0 does not answer
        pool.complete(task)
        next(reader)
    assert [future.worker for _, future in pool.submitted[6:]] == [1, 1]
    pool.complete(2, StreamEnd())
    pool.complete(6)
    next(reader)
    assert [future.worker for _, future in pool.submitted[8:]] == [1, 0], "both have two now, and none is left to 2"


def test_a_stream_longer_than_it_said_is_worth_a_warning() -> None:
    loader = DataLoader(Endless(), batch_size=None)
    assert len(loader) == 2
    reader = iter(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [next(reader), next(reader)] == [0, 1]
    with pytest.warns(UserWarning, match="was reported to be 2.*but 3 samples have been fetched"):
        next(reader)


class Remarkable(FakeDataset):
    """Two samples are replaced, and one draws, which draws a warning in threads."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in (1, 6):
            raise OSError(f"sample {index} is broken")
        return super().__getitem__(index) if index == 5 else {"index": index}


@pytest.mark.parametrize(
    "where",
    [
        pytest.param({"fetch_threads": 2}, id="inline"),
        pytest.param({"fetch_threads": 2, "num_workers": 1}, id="process"),
        pytest.param({"executor": "thread", "num_workers": 2}, id="thread"),
        pytest.param({"executor": "thread", "num_workers": 2, "in_order": False}, id="thread-as-done"),
    ],
)
def test_a_warning_that_is_an_error_comes_out_once_and_then_the_batch(where: dict[str, Any]) -> None:
    loader = DataLoader(Remarkable(8), 4, seed=0, on_error="replace", collate_fn=list, **where)
    expected = list(DataLoader(Remarkable(8), 4, seed=0, on_error="replace", collate_fn=list))
    reader = iter(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert next(reader) == expected[0]
        assert (loader.stats().replaced, loader._schedule.epoch) == (1, 0)
        with pytest.raises(UserWarning, match="draws from the global generator"):
            next(reader)
        assert (loader.stats().batches, loader._schedule.epoch) == (1, 0), "it was not delivered"
        assert next(reader) == expected[1]
        assert (loader.stats().replaced, loader.stats().batches, loader._schedule.epoch) == (2, 2, 1)
        with pytest.raises(StopIteration):
            next(reader)


def test_remarks_come_with_their_batch_or_the_error_in_its_place() -> None:
    executor = ManualExecutor()
    loader = DataLoader(Remarkable(8), executor=executor, num_workers=1, prefetch_factor=8, seed=0, on_error="replace")
    reader, pool = iter(loader), executor.pools[0]
    for number in (6, 1, 0):
        pool.complete(number)
    pool.submitted[0][1].remarks.append("said of the first")
    pool.submitted[2][1].remarks.append("said of the third")
    pool.complete(2, error=ValueError("broken"))
    assert loader.stats().replaced == 0
    with pytest.warns(UserWarning, match="said of the first") as said:
        next(reader)
    assert [one.filename for one in said] == [__file__]
    assert loader.stats().replaced == 0
    next(reader)
    assert [one.index for one in loader.stats().replacements] == [1]
    with pytest.warns(UserWarning, match="said of the third"), pytest.raises(ValueError, match="broken"):
        next(reader)
