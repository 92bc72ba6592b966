"""Workers as threads of this process: for decoders that release the GIL, and for Python without one.

Threads share the process's global random generators. Therefore a batch is computed without seeding them, and their
states are compared before and after it. If the states differ, the batch is computed again in the caller's thread, while
no other thread computes. If the states differ then, too, the batch has drawn random numbers, and not the training loop.
It is then computed with the generators seeded for each sample, as in every other executor, and so are all batches after
it, one at a time. The first batch is computed in the caller's thread in any case, since most datasets that draw random
numbers do so from the first sample on.

Where the caller waits with a time limit, it gives the batches of its own thread to a worker's thread, so that it can
stop waiting. It notes the generators' states before that and restores them afterwards. It also restores them when the
limit is over; the worker's thread, which still runs, is then kept from setting the generators.
"""

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.executors.base import Executor, Pool
from headrace.executors.future import Future
from headrace.executors.thread.compute_lock import compute_lock, forget_threads
from headrace.executors.thread.serial import SerialComputing
from headrace.executors.thread.threads import Job, WorkerThreads
from headrace.executors.thread.worker_info import patch_get_worker_info
from headrace.randomness import callers_generators_kept
from headrace.system.interrupts import InterruptsHeld, Living
from headrace.types import Task
from headrace.worker.work import Work

_EXIT_S = 5.0
"""How long the interpreter waits at its exit for batches that threads still compute, in seconds."""

_NAME = "headrace-worker-"

_all_threads = Living[WorkerThreads]()


@dataclass(frozen=True)
class ThreadExecutor(Executor):
    """Run work in threads of this process, `num_workers` of them, always under a plan.

    Nothing is copied or pickled, so it starts at once. All workers use the same dataset object, which must allow that.
    Python code runs in one thread at a time unless it releases the GIL, as decoders and I/O do.

    Random augmentation should draw from `headrace.rng()` or `headrace.torch_rng()`. Draws from the global generators
    are noticed, and then batches are computed one at a time. Code that seeds a generator and restores it
    (`torch.random.fork_rng`) is not noticed and draws wrong numbers in threads. Such a dataset needs processes.
    """

    copies = False
    ignores = ("multiprocessing_context",)

    def start(self, work: Work, workers: int, context: Any = None) -> Pool:
        """Start the threads; `context` is ignored."""
        return _ThreadPool(work, workers)


class _ThreadPool(Pool):
    _threads: WorkerThreads | None = None

    def __init__(self, work: Work, workers: int) -> None:
        self.work = work
        self.workers = workers
        threads = self._threads = WorkerThreads(work, workers)
        self._serial = SerialComputing(threads)
        _all_threads.add(threads)
        _prepare_process()
        with callers_generators_kept():  # worker_init_fn often seeds them
            # Threads that are no daemons would keep the interpreter from exiting while a pool lives.
            for worker in range(workers):
                thread = threading.Thread(target=threads.serve, args=(worker,), name=f"{_NAME}{worker}", daemon=True)
                with InterruptsHeld():
                    thread.start()
            compute_lock.wait_for(lambda: len(threads.init_failures) == workers)

    def submit(self, task: Task, worker: int | None = None) -> Future:
        assert self._threads is not None
        future = Future(-1 if worker is None else worker)
        with compute_lock.mutex:
            queue = self._threads.queue
            for job in [job for job in queue if job.future() is None]:  # of an abandoned pass
                queue.remove(job)
            queue.append(Job(task, weakref.ref(future), worker))
            compute_lock.notify_all()
        return future

    def wait(self, futures: Sequence[Future], timeout_s: float | None = None) -> bool:
        threads = self._threads
        assert threads is not None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def done() -> bool:
            return any(future.done() for future in futures)

        while compute_lock.wait_for(lambda: done() or threads.callers_job(futures) is not None, deadline):
            if done():
                return True
            if not self._serial.compute(futures, deadline):
                return False
        return False

    def describe(self, window: Sequence[Future]) -> str:
        threads = self._threads
        assert threads is not None
        busy = [threads.describe(worker) for worker, task in enumerate(threads.current) if task is not None]
        others = "" if busy else compute_lock.describe_busy()  # a batch that is computed alone waits for all
        return f"{'; '.join(busy) or others or 'no worker thread is at work'}; {super().describe(window)}"

    @property
    def owed(self) -> int:
        return 0 if self._threads is None else len(self._threads.queue)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()


@functools.cache
def _prepare_process() -> None:
    """Prepare this process for worker threads, once: `get_worker_info`, the interpreter's exit, and forks."""
    patch_get_worker_info()
    atexit.register(_wait_for_threads)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget_threads)


def _wait_for_threads() -> None:
    """Give threads time to end: the interpreter would stop them in the middle of a batch."""
    for threads in _all_threads:
        threads.close()
    deadline = time.monotonic() + _EXIT_S
    for thread in threading.enumerate():
        if thread.name.startswith(_NAME):
            thread.join(max(0.0, deadline - time.monotonic()))
