"""For tests of code that uses a loader: a dataset without data, and an executor that the test controls."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from headrace.errors import DeliveryTimeout, bad_value
from headrace.executors.base import Executor, Pool
from headrace.executors.future import Future
from headrace.types import Task
from headrace.worker.work import Work
from headrace.worker.worker import Worker


class FakeDataset(Dataset[dict[str, Any]]):
    """A map-style dataset of any length. Each sample has its index and a draw from each of the three generators.

    Each sample is `{"index": int, "torch": float, "random": float, "numpy": float}`.

    Args:
        length: The number of samples.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return {
            "index": index,
            "torch": torch.rand(()).item(),
            "random": random.random(),
            "numpy": np.random.rand(),
        }


@dataclass(frozen=True)
class ManualExecutor(Executor):
    """An executor whose tasks are computed only when the test completes them, in any order.

    Pass it to a loader with `num_workers` ≥ 1, begin to iterate, then `complete` tasks by the order in which they
    were submitted. A reader that waits for a task that was not completed raises `DeliveryTimeout` at once, so a test
    that would hang fails instead.

    Attributes:
        pools: The pools started so far, in order.
    """

    pools: list["ManualPool"] = field(default_factory=list)

    def start(self, work: Work, workers: int, context: Any = None) -> "ManualPool":
        """Start a pool that does nothing by itself."""
        self.pools.append(ManualPool(work, workers))
        return self.pools[-1]


class ManualPool(Pool):
    """The pool of a `ManualExecutor`.

    Attributes:
        submitted: Every task so far with its future, in order.
        closed: Whether the loader has closed it.
    """

    def __init__(self, work: Work, workers: int) -> None:
        self.work = work
        self.workers = workers
        self.submitted: list[tuple[Task, Future]] = []
        self.closed = False
        self._workers_by_id = [Worker(work, worker) for worker in range(workers)]

    def submit(self, task: Task, worker: int | None = None) -> Future:
        """Note the task. Without `worker`, it is for the worker with the fewest open tasks."""
        if worker is None:
            loads = [0] * self.workers
            for _, future in self.submitted:
                loads[future.worker] += not future.done()
            worker = loads.index(min(loads))
        future = Future(worker)
        self.submitted.append((task, future))
        return future

    def complete(self, number: int, outcome: Any = None, error: BaseException | None = None) -> None:
        """Complete the task submitted as `number`, from 0: by computing it, or with the given outcome or error."""
        if not 0 <= number < len(self.submitted):
            bad_value("number", number, f"a task in [0, {len(self.submitted) - 1}]", "That many were submitted so far.")
        task, future = self.submitted[number]
        if error is not None:
            future.fail(error)
            return
        if outcome is None:
            outcome = self._workers_by_id[future.worker].run_inline(task)
            future.remarks.extend(self._workers_by_id[future.worker].remarks)
            future.packed_stages = self._workers_by_id[future.worker].clock.packed()
        future.resolve(outcome)

    def wait(self, futures: Sequence[Future], timeout_s: float | None = None) -> bool:
        """Return at once; raise if none is done, since only the test could complete one."""
        if any(future.done() for future in futures):
            return True
        waiting = [number for number, (_, future) in enumerate(self.submitted) if future in futures]
        raise DeliveryTimeout(f"the reader waits for one of the tasks {waiting}, and the test completed none of them")

    def close(self) -> None:
        """Note that the pool was closed."""
        self.closed = True
