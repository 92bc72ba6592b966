"""The worker threads of a pool: their queue, and how they compute batches beside each other."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headrace.executors.base import name_task
from headrace.executors.future import Failure, Future, locate
from headrace.executors.thread.compute_lock import compute_lock, this_thread
from headrace.executors.thread.delegated import DelegatedBatch, Outcome
from headrace.executors.thread.worker_info import worker_info
from headrace.randomness import Generators
from headrace.system.interrupts import InterruptsHeld
from headrace.system.torch_threads import begin_with_torch_threads
from headrace.types import StreamTask, Task
from headrace.worker.work import Work
from headrace.worker.worker import Worker


@dataclass(eq=False)
class Job:
    """A task in the queue. It is dropped when nobody holds its future any more.

    Attributes:
        task: The task.
        future: Where its outcome goes.
        worker: The worker that computes it; None if any may.
        number: Its number among that worker's tasks; None before it has begun.
        again: Whether the generators moved while it was computed, so that it must be computed again, exclusively.
    """

    task: Task
    future: "weakref.ref[Future]"
    worker: int | None
    number: int | None = None
    again: bool = False


class WorkerThreads:
    """What the threads of a pool share. It does not refer to the pool, which can be dropped while threads live.

    Attributes:
        work: The work.
        queue: The jobs that no thread has taken.
        init_failures: The failure of `worker_init_fn`, or None, of each worker that has begun.
        probed: Whether a first batch has been computed in the caller's thread.
        serial: Whether all further batches are computed exclusively, since the dataset draws.
        closed: Whether the threads are to end.
        false_alarms: How many batches in a row were computed twice although they did not draw.
        workers: The workers.
        current: The task that each worker computes now.
        delegated: The batch that each worker computes exclusively, by worker.
    """

    def __init__(self, work: Work, workers: int) -> None:
        self.work = replace(work, in_threads=True, reuses=True)
        self._owner = os.getpid()
        self.queue: deque[Job] = deque()
        self._init_lock = threading.Lock()
        self.init_failures: dict[int, Failure | None] = {}
        self.probed = self.serial = self.closed = False
        self.false_alarms = 0
        self.workers = [Worker(self.work, worker, workers) for worker in range(workers)]
        self.current: list[Task | None] = [None] * workers
        self.delegated: dict[int, DelegatedBatch] = {}

    def serve(self, worker_id: int) -> None:
        """Compute jobs until `close`; the body of a worker thread."""
        begin_with_torch_threads(1)
        name = partial(self.describe, worker_id)
        with self.as_worker(worker_id):
            self._initialize(worker_id)
            while (job := self._next_job(worker_id)) is not None:
                self.current[worker_id] = job.task
                if isinstance(job, DelegatedBatch):
                    job.run()
                else:
                    with compute_lock.shared(name):
                        self._compute(job, self.workers[worker_id])
                self.current[worker_id] = None
                del job

    def describe(self, worker_id: int) -> str:
        """Name a worker's thread, and what it computes now."""
        task = self.current[worker_id]
        what = "nothing" if task is None else name_task(self.work, task)
        return f"worker thread {worker_id} is at {what} of a {type(self.work.dataset).__name__}"

    def as_worker(self, worker_id: int) -> AbstractContextManager[None]:
        """Make `get_worker_info` return a worker's info in this thread."""
        return worker_info(self.work.info(worker_id, len(self.workers)))

    def _initialize(self, worker_id: int) -> None:
        """Call `worker_init_fn`, in one thread at a time."""
        failure: Failure | None = None
        if self.work.worker_init_fn is not None:
            with self._init_lock:
                try:
                    self.work.worker_init_fn(worker_id)
                except BaseException as error:  # noqa: BLE001 - it is raised in the rank, at every fetch
                    # Not the exception itself: its traceback would keep the frames of each place that raises it.
                    failure = Failure.of(error, _where(worker_id))
        with compute_lock.mutex:
            self.init_failures[worker_id] = failure
            compute_lock.notify_all()

    def _next_job(self, worker_id: int) -> Job | DelegatedBatch | None:
        taken: list[Job | DelegatedBatch] = []

        def take() -> bool:
            delegated = self.delegated.get(worker_id)
            if delegated is not None and not delegated.started:
                delegated.started = True
                taken.append(delegated)
            elif self.probed and not self.serial and not compute_lock.paused:
                free = (one for one in self.queue if one.worker in (None, worker_id) and not one.again)
                job = next(free, None)
                if job is not None:
                    self.queue.remove(job)
                    compute_lock.running += 1
                    taken.append(job)
            return self.closed or bool(taken)

        compute_lock.wait_for(take)
        return taken[0] if taken else None

    def _compute(self, job: Job, worker: Worker) -> None:
        future, failure = job.future(), self.init_failures[worker.worker_id]
        if future is None:
            return
        if failure is not None:
            future.resolve(failure)
            return
        job.worker, job.number = worker.worker_id, worker.count()
        before = Generators()
        outcome, error = outcome_of(worker, partial(worker.run, job.task, job.number, seeded=False))
        moved = before.moved()
        if moved and not isinstance(job.task, StreamTask):
            job.again = True
            self.put_back(job)
            del error  # its traceback refers to this frame, which refers to it
            return
        future.remarks.extend(worker.remarks)
        future.packed_stages = worker.clock.packed()
        if moved:
            future.remarks.append(stream_remark(moved))  # its samples are gone, so it cannot be computed again
        self.false_alarms = 0
        fill(future, outcome, error)
        del error, future  # this frame must not be in a reference cycle here either

    def put_back(self, job: Job) -> None:
        """Put a job at the front of the queue."""
        with compute_lock.mutex:
            self.queue.appendleft(job)
            compute_lock.notify_all()

    def callers_job(self, futures: Sequence[Future]) -> Job | None:
        """Return the job that the caller must compute before any of some futures is done, if there is one."""
        # A loader inside a worker's dataset cannot count on threads: they may have to wait for that worker.
        every = self.serial or not self.probed or this_thread.computing or this_thread.exclusive
        jobs = {job.future(): job for job in self.queue if every or job.again}
        return next((jobs[future] for future in futures if future in jobs), None)

    def close(self) -> None:
        """Drop all queued jobs, and tell the threads to end after their current batch. This does not wait for them."""
        if os.getpid() != self._owner:  # a forked child has no threads, and maybe a lock that nobody releases
            return
        with InterruptsHeld(), compute_lock.mutex:
            self.closed = True
            self.queue.clear()
            compute_lock.notify_all()


def outcome_of(worker: Worker, compute: Callable[[], Any]) -> Outcome:
    """Return what a computation returned or raised. A stream's collate_fn that raises StopIteration ends the stream.

    An interrupt of the main thread is raised: it does not belong to the batch.
    """
    try:
        return compute(), None
    except StopIteration:
        return worker.end_stream(), None
    except KeyboardInterrupt as error:
        if threading.current_thread() is threading.main_thread():
            raise
        return None, error
    except BaseException as error:  # noqa: BLE001 - it is raised where the batch would have been returned
        locate(error, _where(worker.worker_id))
        return None, error


def fill(future: Future, outcome: Any, error: BaseException | None) -> None:
    """Fill in a batch, or the error in its place."""
    if error is None:
        future.resolve(outcome)
    else:
        future.fail(error)


def stream_remark(moved: Sequence[str]) -> str:
    """Word the warning about an iterable dataset that draws from generators that threads share."""
    return (
        f"the global generator of {' and '.join(moved)} was drawn from while threads read an IterableDataset: which "
        "batch got which numbers depends on chance. Draw from headrace.rng() or headrace.torch_rng(), or use "
        'executor="process".'
    )


def _where(worker_id: int) -> str:
    return f"in DataLoader worker thread {worker_id}"
