"""Work done in the caller's own thread, when it asks for the result: the reference for every other executor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from headrace.executors.base import Executor, Pool
from headrace.executors.future import Future
from headrace.types import Task
from headrace.worker.work import Work
from headrace.worker.worker import Worker


@dataclass(frozen=True)
class InlineExecutor(Executor):
    """Run everything in the calling thread, whatever `num_workers` says: for debuggers and small data."""

    parity = True
    prefetches = False
    ignores = (
        *("num_workers", "worker_init_fn", "multiprocessing_context", "persistent_workers", "prefetch_factor"),
        *("timeout", "in_order", "max_prefetch_bytes"),
    )

    def start(self, work: Work, workers: int, context: Any = None) -> Pool:
        """Start nothing: there is one worker, the caller."""
        return _InlinePool(work)


class _InlinePool(Pool):
    def __new__(cls, *_: Any) -> Self:
        return object.__new__(cls)  # without `Droppable`'s finalizer: there is nothing to close

    def __init__(self, work: Work) -> None:
        self.work = work = replace(work, reuses=True)
        self.workers = 1
        self.direct = self._worker = Worker(work)

    def submit(self, task: Task, worker: int | None = None) -> Future:
        future = Future(0)
        try:
            future.resolve(self._worker.run_inline(task))
        except BaseException as error:  # noqa: BLE001 - it is raised where the batch would have been returned
            future.fail(error)
        future.remarks.extend(self._worker.remarks)
        future.packed_stages = self._worker.clock.packed()
        return future

    def wait(self, futures: Sequence[Future], timeout_s: float | None = None) -> bool:
        return True

    def open_stream(self, number: int, epoch: int) -> None:
        self._worker.open_inline(number, epoch)

    def close(self) -> None:
        pass
