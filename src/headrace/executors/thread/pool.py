"""Workers as threads of this process: for decoders that release the GIL, and for Python without one.

Threads share the process's global generators. A batch is therefore computed without seeding them, and they are watched:
if they moved, the batch is computed again in the caller's thread, seeded sample by sample as everywhere else. If it was
the batch that drew, all further batches are computed like that; it may also have been the training loop. The first
batch is tried in the caller's thread to begin with, since most datasets that draw do so from the first sample on.

Where the caller waits with a limit, its worker's thread computes such a batch, and the caller keeps the generators for
it meanwhile. At the limit it takes them back: what that thread goes on to do must not set them any more.
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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker

from headrace.executors.base import Executor, Pool, name_task
from headrace.executors.future import Failure, Future, locate
from headrace.executors.thread.turns import Errand, Outcome, OverLimit, this_thread, turns
from headrace.randomness import Generators, Lease, callers_generators_kept
from headrace.randomness import here as work_here
from headrace.system.interrupts import InterruptsHeld, Living
from headrace.system.torch_threads import begin_with_torch_threads, one_torch_thread
from headrace.types import Remark, StreamTask, Task
from headrace.worker.fetch import drawing_remark
from headrace.worker.work import Work
from headrace.worker.worker import Worker

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

    ignores = ("multiprocessing_context",)

    def start(self, work: Work, workers: int, context: Any = None) -> Pool:
        """Start the threads; `context` means nothing to them."""
        return _ThreadPool(work, workers)


@dataclass(eq=False)
class _Job:
    """A task that waits to be computed, as long as somebody waits for it.

    Attributes:
        task: The task.
        future: What its asker holds.
        worker: Whose it is; None if any worker may take it.
        number: Which of that worker's tasks it is; None before it has begun.
        again: Whether the generators moved meanwhile, so that it is to be computed once more, alone.
    """

    task: Task
    future: "weakref.ref[Future]"
    worker: int | None
    number: int | None = None
    again: bool = False


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
        self.at: list[Task | None] = [None] * workers
        self.errands: dict[int, Errand] = {}  # by worker

    def serve(self, worker_id: int) -> None:
        """Compute jobs until the crew is closed; the body of a worker thread."""
        begin_with_torch_threads(1)
        with self.as_worker(worker_id):
            self._begin(worker_id)
            while (job := self._next_job(worker_id)) is not None:
                self.at[worker_id] = job.task
                if isinstance(job, Errand):
                    job.run()
                else:
                    with turns.counted():
                        self._compute(job, self.workers[worker_id])
                self.at[worker_id] = None
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
        with turns.lock:
            self.refusals[worker_id] = refusal
            turns.tell()

    def _next_job(self, worker_id: int) -> _Job | Errand | None:
        taken: list[_Job | Errand] = []

        def take() -> bool:
            errand = self.errands.get(worker_id)
            if errand is not None and not errand.begun:
                errand.begun = True
                taken.append(errand)
            elif self.tried and not self.serial and not turns.paused:
                free = (one for one in self.waiting if one.worker in (None, worker_id) and not one.again)
                job = next(free, None)
                if job is not None:
                    self.waiting.remove(job)
                    turns.running += 1
                    taken.append(job)
            return self.closed or bool(taken)

        turns.wait_for(take)
        return taken[0] if taken else None

    def _compute(self, job: _Job, worker: Worker) -> None:
        future, refusal = job.future(), self.refusals[worker.worker_id]
        if future is None:
            return
        if refusal is not None:
            future.resolve(refusal)
            return
        job.worker, job.number = worker.worker_id, worker.count()
        before = Generators()
        outcome, error = _outcome(worker, partial(worker.run, job.task, job.number, seeded=False))
        moved = before.moved()
        if moved and not isinstance(job.task, StreamTask):
            job.again = True
            with turns.lock:
                self.waiting.appendleft(job)
                turns.tell()
            del error  # whose traceback holds this frame, which would hold it
            return
        future.remarks.extend(worker.remarks)
        future.stage_s = worker.clock.seconds
        if moved:
            future.remarks.append(_stream_remark(moved))  # what it read is gone, so it cannot be computed again
        self.false_alarms = 0
        _fill(future, outcome, error)
        del error, future  # likewise

    def callers_job(self, futures: Sequence[Future]) -> _Job | None:
        """Return what the caller has to see to itself before any of some futures is done, if there is such a job."""
        # A loader inside a worker's dataset cannot count on threads: they may have to wait for that worker.
        every = self.serial or not self.tried or this_thread.computing or this_thread.alone
        waiting = {job.future(): job for job in self.waiting if every or job.again}
        return next((waiting[future] for future in futures if future in waiting), None)

    def compute_alone(self, futures: Sequence[Future], deadline: float | None) -> bool:
        """Have the caller's job computed while nothing else is; return whether that was done by the deadline."""
        with InterruptsHeld() as held:
            with turns.lock:
                job = self.callers_job(futures)
                future = None if job is None else job.future()
                if job is None or future is None:  # a thread has taken it just now
                    return True
                self.waiting.remove(job)
            try:
                with held.let():
                    self._try(job, future, deadline)
            except OverLimit:
                return False
            finally:
                if not future.done():  # given up, or interrupted: its turn comes again
                    with turns.lock:
                        self.waiting.appendleft(job)
                        turns.tell()
        return True

    def _try(self, job: _Job, future: Future, deadline: float | None) -> None:
        worker = self.workers[job.worker or 0]
        refusal = self.refusals[worker.worker_id]
        if refusal is not None:
            self.tried = True
            future.resolve(refusal)
            return
        outcome, error, drew = self._alone(worker, job, future.remarks, deadline)
        future.stage_s = worker.clock.seconds
        if job.again and drew is False:
            self.false_alarms += 1
            if self.false_alarms >= FALSE_ALARMS:
                self.serial = True
                future.remarks.append(
                    "the training loop draws from the global generators of torch, random or numpy. Whether a batch "
                    "that was computed in a thread did so too shows only when it is computed twice, so from now on "
                    "batches are computed in the calling thread, one at a time. Give the loop generators of its own, "
                    'or use executor="process".'
                )
        _fill(future, outcome, error)
        del error  # whose traceback holds this frame, which would hold it

    def _alone(
        self, worker: Worker, job: _Job, remarks: list[Remark], deadline: float | None
    ) -> tuple[Any, BaseException | None, bool | None]:
        """Compute a batch while no other is, seeded if it is known to draw, or if it is seen to.

        Returns:
            The batch, or the error in its place, and whether it was seen to draw; None if that is known.

        Raises:
            OverLimit: It is not done by the deadline.
        """
        with InterruptsHeld() as held, turns.alone(held, deadline), self.as_worker(worker.worker_id):
            if job.number is None:
                job.worker, job.number = worker.worker_id, worker.count()
            drew: bool | None = None
            said: list[Remark] = []
            if not self.serial:
                with held.let():
                    (outcome, error), moved = self._watched(worker, job, deadline)
                self.tried = True
                drew = bool(moved)
                if moved and isinstance(job.task, StreamTask):
                    said.append(_stream_remark(moved))
                elif moved:
                    self.serial = True
                    how = "batches are computed one at a time from now on"
                    said.append(drawing_remark(moved, 'executor="thread"', how))
            if self.serial:
                with held.let():
                    outcome, error = self._seeded(worker, job, deadline)
            remarks[:] = said + worker.remarks  # not added: after an interrupt its turn comes again
        try:
            return outcome, error, drew
        finally:
            del error  # likewise

    def _watched(self, worker: Worker, job: _Job, deadline: float | None) -> tuple[Outcome, list[str]]:
        """Compute a batch unseeded; return also which generators moved, which are put back."""
        compute = partial(_outcome, worker, partial(worker.run, job.task, job.number, seeded=False))
        if deadline is not None or worker.worker_id in self.errands:
            return self._elsewhere(worker, Errand(job.task, compute, False, work_here.lease), deadline)
        with one_torch_thread(), InterruptsHeld() as held:
            before = Generators()
            try:
                with held.let():
                    return compute(), before.moved()  # no variable: an error's traceback would hold it
            finally:
                before.restore()

    def _seeded(self, worker: Worker, job: _Job, deadline: float | None) -> Outcome:
        compute = partial(_outcome, worker, partial(worker.run_inline, job.task, job.number))
        if deadline is not None or worker.worker_id in self.errands:
            return self._elsewhere(worker, Errand(job.task, compute, True, Lease()), deadline)[0]
        return compute()

    def _elsewhere(self, worker: Worker, errand: Errand, deadline: float | None) -> tuple[Outcome, list[str]]:
        """Have a worker's thread run an errand, after what it runs already; that may be this very batch."""
        runs = self.errands.get(worker.worker_id)
        if runs is not None:
            runs.wait(self.errands, worker.worker_id, deadline)
            # What was seeded may have drawn after the caller took the generators back. A stream cannot be read again.
            right = not (errand.seeded or runs.seeded or runs.moved) or isinstance(errand.task, StreamTask)
            del self.errands[worker.worker_id]
            outcome = runs.take()
            if runs.task is errand.task and right:
                return outcome, runs.moved
        with callers_generators_kept() if errand.seeded else nullcontext():
            errand.wait(self.errands, worker.worker_id, deadline)
        del self.errands[worker.worker_id]
        return errand.take(), errand.moved

    @contextmanager
    def as_worker(self, worker_id: int) -> Iterator[None]:
        """Let `get_worker_info` tell in this thread that it is a worker."""
        before = this_thread.info
        this_thread.info = self.work.info(worker_id, self.size)
        try:
            yield
        finally:
            this_thread.info = before

    def close(self) -> None:
        """Let the threads end as soon as what they are computing is done."""
        if os.getpid() != self._owner:  # a forked child has none of them, and perhaps a lock that nobody will release
            return
        with InterruptsHeld(), turns.lock:
            self.closed = True
            self.waiting.clear()
            turns.tell()


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
            turns.wait_for(lambda: len(crew.refusals) == workers)

    def submit(self, task: Task, worker: int | None = None) -> Future:
        assert self._crew is not None
        future = Future(-1 if worker is None else worker)
        with turns.lock:
            waiting = self._crew.waiting
            for job in [job for job in waiting if job.future() is None]:  # of a pass that was abandoned
                waiting.remove(job)
            waiting.append(_Job(task, weakref.ref(future), worker))
            turns.tell()
        return future

    def wait(self, futures: Sequence[Future], timeout_s: float | None = None) -> bool:
        crew = self._crew
        assert crew is not None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def done() -> bool:
            return any(future.done() for future in futures)

        while turns.wait_for(lambda: done() or crew.callers_job(futures) is not None, deadline):
            if done():
                return True
            if not crew.compute_alone(futures, deadline):
                return False
        return False

    def describe(self, window: Sequence[Future]) -> str:
        crew = self._crew
        assert crew is not None
        at = [
            f"worker thread {worker} is at {name_task(self.work, task)}"
            for worker, task in enumerate(crew.at)
            if task is not None
        ]
        return f"{'; '.join(at) or 'no worker thread is at work'}; {super().describe(window)}"

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
    vars(this_thread).clear()
    turns.__init__()  # type: ignore[misc]


def _get_worker_info() -> Any:
    return _headrace_info(_worker_info)  # type: ignore[name-defined]  # noqa: F821 - torch's module has both


def _info(of_process: Any) -> Any:
    # Torch's collation asks in order to collate into shared memory, which a thread has no use for.
    asked_by = sys._getframe(2).f_globals.get("__name__")
    here = None if asked_by == default_collate.__module__ else this_thread.info
    return of_process if here is None else here


def _let_all_end() -> None:
    """Give threads the time to end that would otherwise be torn away in the middle of a batch."""
    for crew in _crews:
        crew.close()
    deadline = time.monotonic() + _EXIT_S
    for thread in threading.enumerate():
        if thread.name.startswith(_NAME):
            thread.join(max(0.0, deadline - time.monotonic()))
