"""Loaders whose batches the test completes, one by one."""

from typing import Any

from headrace import DataLoader
from headrace.testing import FakeDataset, ManualExecutor, ManualPool


def made(length: int = 12, **options: Any) -> tuple[DataLoader[Any], ManualExecutor]:
    """A loader over single samples whose batches the test completes."""
    executor = ManualExecutor()
    options = {"num_workers": 2, "prefetch_factor": 2, "batch_size": None, "seed": 0} | options
    return DataLoader(options.pop("dataset", FakeDataset(length)), executor=executor, **options), executor


def run(reader: Any, pool: ManualPool, first: int, count: int) -> None:
    for number in range(first, first + count):
        pool.complete(number)
        next(reader)


def tasks(pool: ManualPool) -> list[Any]:
    return [task for task, _ in pool.submitted]


def outstanding(pool: ManualPool, taken: int) -> int:
    return len(pool.submitted) - taken
