"""Workers as threads of this process: for decoders that release the GIL, and for Python without one.

Threads share the process's global generators. A batch is therefore computed without seeding them, and they are watched:
if they moved, the batch is computed again in the caller's thread, seeded sample by sample as everywhere else. If it was
the batch that drew, all further batches are computed like that; it may also have been the training loop. The first
batch is tried in the caller's thread to begin with, since most datasets that draw do so from the first sample on.
"""

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker

from headrace.executors.base import Executor, Failure, Future, Pool, locate
from headrace.fetch import drawing_remark
from headrace.interrupts import InterruptsHeld, Living
from headrace.randomness import Generators, callers_generators_kept
from headrace.types import Remark, StreamTask, Task
from headrace.work import Work, Worker

FALSE_ALARMS = 8
"""After so many batches in a row whose generators somebody else moved, computing each twice is given up."""

_EXIT_S = 5.0
"""How long the interpreter waits at its end for batches in work."""

_NAME = "headrace-worker-"

_crews = Living["_Crew"]()


@dataclass(frozen=True)
class ThreadExecutor(Executor):
    """Run work in threads of this process, `num_workers` of them, always under a plan.

    Nothing is copied or pickled, so it starts at once; but all workers use the same dataset object, which must bear
    that, and Python code runs in one thread at a time unless it releases the GIL, as decoders and I/O do. Random
    augmentation should draw from `headrace.rng()` or `headrace.torch_rng()`. Draws from the global generators are
    noticed, and cost the concurrency; but not those of code that seeds a generator and puts it back as it was
    (`torch.random.fork_rng`): in threads it draws wrong numbers. Such a dataset needs processes.
    """

    def start(self, work: Work, workers: int, context: Any = None) -> Pool:
        """Start the threads; `context` means nothing to them."""
        return _ThreadPool(work, workers)


@dataclass(eq=False)
class _Job:
    """A task that waits to be computed, by any worker if `worker` is None, as long as somebody waits for it."""

    task: Task
    future: "weakref.ref[Future]"
    worker: int | None


class _Process:
    """What all threads of the process share: whether some compute, or one alone.

    Attributes:
        lock: Held while anything of it, or of a crew, is looked at or changed. No `Condition`: a Ctrl-C among the lines
            of its methods would leave it locked.
        running: Batches being computed in worker threads.
        paused: Whether no further one may begin.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.running = 0
        self.paused = False
        self._bells: list[threading.Lock] = []

    def tell(self) -> None:
        """Have all who wait look again; to be called with the lock."""
        bells, self._bells = self._bells, []
        for bell in bells:
            bell.release()

    def wait_for(self, happened: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until something, asked with the lock, is so; return whether it is, within the time allowed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with InterruptsHeld(), self.lock:
                if happened():
                    return True
                bell = threading.Lock()
                bell.acquire()
                self._bells.append(bell)
            if not bell.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
                return False

    @contextmanager
    def alone(self, held: InterruptsHeld) -> Iterator[None]:
        """Keep other worker threads from computing meanwhile. May be nested."""
        if _here.alone:
            yield
            return
        own = int(_here.computing)  # a loader inside a dataset: the batch that this thread computes waits, too
        with self.lock:
            self._count(-own)
        try:
            with held.let():
                self.wait_for(self._pause)
                self.wait_for(lambda: not self.running)
            yield
        finally:
            self._resume(own)

    def _pause(self) -> bool:
        if not self.paused:
            self.paused = _here.alone = True
        return _here.alone

    def _resume(self, own: int) -> None:
        with self.lock:
            if _here.alone:
                self.paused = _here.alone = False
            self._count(own)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count this thread, which `running` was raised for already, as computing."""
        _here.computing = True
        try:
            yield
        finally:
            _here.computing = False
            with self.lock:
                self._count(-1)

    def _count(self, change: int) -> None:
        self.running += change
        self.tell()


class _Here(threading.local):
    """What a thread is at.

    Attributes:
        info: What `get_worker_info` tells in it, if it is a worker.
        computing: Whether it is a worker in the middle of a batch.
        alone: Whether it keeps others from computing.
    """

    info: Any = None
    computing = False
    alone = False


_here = _Here()
_process = _Process()


class _Crew:
    """What the threads of a pool share. They do not know the pool, so that it can be dropped while they live."""

    def __init__(self, work: Work, workers: int) -> None:
        self.work = replace(work, in_threads=True)
        self.size = workers
        self._owner = os.getpid()
        self.waiting: deque[_Job] = deque()
        self._hooks = threading.Lock()
        self.refusals: dict[int, Failure | None] = {}  # by worker, once it has begun
        self.tried = self.serial = self.closed = False
        self.false_alarms = 0
        self.workers = [Worker(self.work, worker, workers) for worker in range(workers)]

    def serve(self, worker_id: int) -> None:
        """Compute jobs until the crew is closed; the body of a worker thread."""
        with self.as_worker(worker_id):
            self._begin(worker_id)
            while (job := self._next_job(worker_id)) is not None:
                with _process.counted():
                    self._compute(job, self.workers[worker_id])
                del job

    def _begin(self, worker_id: int) -> None:
        """Call the user's hook, one worker at a time."""
        refusal: Failure | None = None
        if self.work.worker_init_fn is not None:
            with self._hooks:
                try:
                    self.work.worker_init_fn(worker_id)
                except BaseException as error:  # noqa: BLE001 - it is raised in the rank, at every fetch
                    # Not the exception itself: with each raising it would hold on to the frames it passes.
                    refusal = Failure.of(error, _where(worker_id))
        with _process.lock:
            self.refusals[worker_id] = refusal
            _process.tell()

    def _next_job(self, worker_id: int) -> _Job | None:
        taken: list[_Job] = []

        def take() -> bool:
            if self.tried and not self.serial and not _process.paused:
                job = next((one for one in self.waiting if one.worker in (None, worker_id)), None)
                if job is not None:
                    self.waiting.remove(job)
                    _process.running += 1
                    taken.append(job)
            return self.closed or bool(taken)

        _process.wait_for(take)
        return taken[0] if taken else None

    def _compute(self, job: _Job, worker: Worker) -> None:
        future, refusal = job.future(), self.refusals[worker.worker_id]
        if future is None:
            return
        if refusal is not None:
            future.resolve(refusal)
            return
        number = worker.count()
        before = Generators()
        outcome, error = _outcome(worker, partial(worker.run, job.task, number, seeded=False))
        moved = before.moved()
        if moved and not isinstance(job.task, StreamTask):
            future.resolve_later(partial(self._again, worker, job.task, number, future.remarks))
            return
        future.remarks.extend(worker.remarks)
        if moved:
            future.remarks.append(_stream_remark(moved))  # what it read is gone, so it cannot be computed again
        self.false_alarms = 0
        _fill(future, outcome, error)
        del error, future  # the error's traceback holds this frame, which would hold them

    def _again(self, worker: Worker, task: Task, number: int, remarks: list[Remark]) -> Any:
        """Compute a batch once more in the caller's thread, and find out whether it was the one that drew."""
        outcome, error, drew = self._alone(worker, task, number, remarks)
        if drew is False:
            self.false_alarms += 1
            if self.false_alarms >= FALSE_ALARMS:
                self.serial = True
                remarks.append(
                    "the training loop draws from the global generators of torch, random or numpy. Whether a batch "
                    "that was computed in a thread did so too shows only when it is computed twice, so from now on "
                    "batches are computed in the calling thread, one at a time. Give the loop generators of its own, "
                    'or use executor="process".'
                )
        if error is not None:
            try:
                raise error
            finally:
                del error  # which would hold this frame, and this frame it
        return outcome

    def _alone(
        self, worker: Worker, task: Task, number: int | None, remarks: list[Remark]
    ) -> tuple[Any, BaseException | None, bool | None]:
        """Compute a batch in the caller's thread, seeded if it is known to draw, or if it is seen to.

        Returns:
            The batch, or the error in its place, and whether it was seen to draw; None if that is known.
        """
        with InterruptsHeld() as held, _process.alone(held), self.as_worker(worker.worker_id):
            if number is None:
                number = worker.count()
            drew: bool | None = None
            said: list[Remark] = []
            if not self.serial:
                before = Generators()
                try:
                    with held.let():
                        outcome, error = _outcome(worker, partial(worker.run, task, number, seeded=False))
                    moved = before.moved()
                finally:
                    before.restore()
                self.tried = True
                drew = bool(moved)
                if moved and isinstance(task, StreamTask):
                    said.append(_stream_remark(moved))
                elif moved:
                    self.serial = True
                    how = "batches are computed one at a time from now on"
                    said.append(drawing_remark(moved, 'executor="thread"', how))
            if self.serial:
                with held.let():
                    outcome, error = _outcome(worker, partial(worker.run_inline, task, number))
            remarks[:] = said + worker.remarks  # not added: after an interrupt its turn comes again
        try:
            return outcome, error, drew
        finally:
            del error  # whose traceback holds this frame, which would hold it

    def compute_here(self, future: Future) -> None:
        """Compute a waiting job in the caller's thread: to try whether it draws, or since it does."""
        with InterruptsHeld() as held:
            with _process.lock:
                job = next((one for one in self.waiting if one.future() is future), None)
                if job is None:  # a thread has taken it just now
                    return
                self.waiting.remove(job)
            try:
                with held.let():
                    self._try(job, future, self.workers[job.worker or 0])
            finally:
                if not future.done():  # interrupted: its turn comes again
                    with _process.lock:
                        self.waiting.appendleft(job)
                        _process.tell()

    def _try(self, job: _Job, future: Future, worker: Worker) -> None:
        refusal = self.refusals[worker.worker_id]
        if refusal is not None:
            self.tried = True
            future.resolve(refusal)
            return
        outcome, error, _ = self._alone(worker, job.task, None, future.remarks)
        _fill(future, outcome, error)
        del error  # likewise

    @contextmanager
    def as_worker(self, worker_id: int) -> Iterator[None]:
        """Let `get_worker_info` tell in this thread that it is a worker."""
        before = _here.info
        _here.info = self.work.info(worker_id, self.size)
        try:
            yield
        finally:
            _here.info = before

    def close(self) -> None:
        """Let the threads end as soon as what they are computing is done."""
        if os.getpid() != self._owner:  # a forked child has none of them, and perhaps a lock that nobody will release
            return
        with InterruptsHeld(), _process.lock:
            self.closed = True
            self.waiting.clear()
            _process.tell()


class _ThreadPool(Pool):
    _crew: _Crew | None = None

    def __init__(self, work: Work, workers: int) -> None:
        self.work = work
        self.workers = workers
        crew = self._crew = _Crew(work, workers)
        _crews.add(crew)
        _prepare_process()
        with callers_generators_kept():  # the user's hooks tend to seed them
            # Threads that are no daemons would keep the interpreter from ending while a pool lives.
            for worker in range(workers):
                thread = threading.Thread(target=crew.serve, args=(worker,), name=f"{_NAME}{worker}", daemon=True)
                with InterruptsHeld():
                    thread.start()
            _process.wait_for(lambda: len(crew.refusals) == workers)

    def submit(self, task: Task, worker: int | None = None) -> Future:
        assert self._crew is not None
        future = Future(-1 if worker is None else worker)
        with _process.lock:
            waiting = self._crew.waiting
            for job in [job for job in waiting if job.future() is None]:  # of a pass that was abandoned
                waiting.remove(job)
            waiting.append(_Job(task, weakref.ref(future), worker))
            _process.tell()
        return future

    def wait(self, futures: Sequence[Future], timeout_s: float | None = None) -> bool:
        crew = self._crew
        assert crew is not None
        # A loader inside a worker's dataset cannot count on threads: they may have to wait for that worker.
        if crew.serial or not crew.tried or _here.computing or _here.alone:
            crew.compute_here(futures[0])
        return _process.wait_for(lambda: any(future.done() for future in futures), timeout_s)

    @property
    def owed(self) -> int:
        return 0 if self._crew is None else len(self._crew.waiting)

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()


def _where(worker_id: int) -> str:
    return f"in DataLoader worker thread {worker_id}"


def _outcome(worker: Worker, compute: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return what a computation returned or raised; a stream's collate_fn that raises StopIteration ends the stream.

    An interrupt of the caller's own thread is not the batch's.
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


def _fill(future: Future, outcome: Any, error: BaseException | None) -> None:
    if error is None:
        future.resolve(outcome)
    else:
        future.fail(error)


def _stream_remark(moved: Sequence[str]) -> str:
    return (
        f"the global generator of {' and '.join(moved)} was drawn from while threads read an IterableDataset: which "
        "batch got which numbers depends on chance. Draw from headrace.rng() or headrace.torch_rng(), or use "
        'executor="process".'
    )


@functools.cache
def _prepare_process() -> None:
    """Have torch's `get_worker_info` look for the thread's own info first, and threads end with the interpreter.

    Users import the function by name, long before, so its code is exchanged and not its name.
    """
    vars(torch_worker)["_headrace_info"] = _info
    torch_worker.get_worker_info.__code__ = _get_worker_info.__code__
    atexit.register(_let_all_end)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_threads)


def _forget_threads() -> None:
    """Begin anew in a forked process, which has none of them."""
    vars(_here).clear()
    _process.__init__()  # type: ignore[misc]


def _get_worker_info() -> Any:
    return _headrace_info(_worker_info)  # type: ignore[name-defined]  # noqa: F821 - torch's module has both


def _info(of_process: Any) -> Any:
    # Torch's collation asks in order to collate into shared memory, which a thread has no use for.
    asked_by = sys._getframe(2).f_globals.get("__name__")
    here = None if asked_by == default_collate.__module__ else _here.info
    return of_process if here is None else here


def _let_all_end() -> None:
    """Give threads the time to end that would otherwise be torn away in the middle of a batch."""
    for crew in _crews:
        crew.close()
    deadline = time.monotonic() + _EXIT_S
    for thread in threading.enumerate():
        if thread.name.startswith(_NAME):
            thread.join(max(0.0, deadline - time.monotonic()))
