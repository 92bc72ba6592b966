"""Readers: the iterators a loader hands out. A bounded window of futures; taking from its left is the ordering."""

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn, cast

import torch

from headrace.errors import DeliveryTimeout
from headrace.executors.base import Pool
from headrace.executors.future import Future
from headrace.system.interrupts import Droppable, InterruptsHeld
from headrace.telemetry.stats import Meter
from headrace.types import Remark, Task
from headrace.worker.streams import Portion, StreamEnd
from headrace.worker.worker import Worker

_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled


@dataclass(frozen=True)
class Delivery:
    """How batches reach the user.

    Attributes:
        ahead: Tasks handed out before the first batch is asked for, and kept outstanding: prefetch × workers;
            0 for inline work.
        in_order: Whether batches come in the order of their tasks, or as they are done.
        in_turn: Whether tasks go round the workers strictly, as torch deals them, or to the least loaded.
        streams: Whether each worker reads a copy of its own, so that a task is for whoever has some of it left.
        quick_tasks: Whether tasks come from our own code, at once, rather than from a sampler of the user's.
        timeout_s: How long a batch may take, in seconds; 0 for ever.
        transforms: What turns a worker's batch into the user's, applied in this order.
    """

    ahead: int = 0
    in_order: bool = True
    in_turn: bool = False
    streams: bool = False
    quick_tasks: bool = True
    timeout_s: float = 0
    transforms: tuple[Callable[[Any], Any], ...] = ()


class Observer:
    """What a reader tells about its progress; the methods do nothing unless overridden."""

    def delivering(self, nth: int, number: int, worker: int, samples: int, resume: Any) -> None:
        """A batch, or the error in its place, is about to be handed over. Interrupted, it comes again.

        Args:
            nth: How many that makes in the pass, from 1.
            number: Which of the pass's tasks it was, from 0.
            worker: Who computed it.
            samples: How many it holds.
            resume: The place after it in a worker's copy of an iterable dataset; None elsewhere, and after an error.
        """

    def exhausted(self, worker: int, of_dataset: Any) -> None:
        """A worker's copy of an iterable dataset is at its end, with this state of its own, if it keeps one."""

    def ended(self, finished: bool) -> None:
        """The pass is over: everything was delivered, or the reader was dropped before."""


class Reader(Droppable, Iterator[Any]):
    """One pass over an epoch.

    Args:
        pool: Running workers; the reader's reference keeps them alive.
        tasks: What to ask for, in order.
        delivery: How the batches reach the user.
        length: What `len()` of the reader is.
        keep_pool: Whether the pool outlives the pass.
        size: Counts the samples of a task's batch; those of an iterable dataset say it themselves.
        meter: Where batches, samples and waiting are counted.
        observers: Told of the progress.
        revise: Asked once, before the first batch: other tasks to do instead, or None.
        again: Where tasks may be asked for again: yields those from a number on.
        first_worker: Who gets the first task, where they go round.
    """

    def __init__(
        self,
        pool: Pool,
        tasks: Iterator[Task],
        delivery: Delivery,
        length: Callable[[], int],
        *,
        size: Callable[[Task], int],
        meter: Meter,
        keep_pool: bool = False,
        observers: Sequence[Observer] = (),
        revise: Callable[[], Iterator[Task] | None] | None = None,
        again: Callable[[int], Iterator[Task]] | None = None,
        first_worker: int = 0,
    ) -> None:
        self._pool: Pool | None = pool
        self._delivery = delivery
        self._length = length
        self._size = size
        self._meter = meter
        self._keep_pool = keep_pool
        self._again = again
        self._first_worker = first_worker
        self._observers: Sequence[Observer] = ()
        self.restart(tasks, observers, revise)
        self._first_worker = 0

    def restart(
        self,
        tasks: Iterator[Task],
        observers: Sequence[Observer],
        revise: Callable[[], Iterator[Task] | None] | None = None,
    ) -> None:
        """Begin a pass with the same workers; what they still owe of the pass before is thrown away."""
        self._end(finished=False)
        self._observers = observers
        self._revise = revise
        self._delivered = 0
        self._last = 0.0
        self._held: tuple[Task, Any] | None = None  # computed, but not handed over yet
        self._prefetch(tasks)

    def _prefetch(self, tasks: Iterator[Task]) -> None:
        assert self._pool is not None
        self._direct = self._pool.direct
        self._tasks = tasks
        self._task: Task | None = None
        self._window: deque[Future] = deque()
        self._streams = set(range(self._pool.workers))  # the workers that have something left to give
        self._turn = self._first_worker
        self._number = 0  # of the next task, handed out or computed here
        self._filled = False
        # Who begins pass after pass and reads none must not pile up tasks.
        if self._pool.owed <= self._delivery.ahead:
            self._fill()
        self._pool.launch()

    def _fill(self) -> None:
        self._filled = True
        for _ in range(self._delivery.ahead):
            self._submit_next()

    def __next__(self) -> Any:
        if _profiled():
            with torch.autograd.profiler.record_function(f"enumerate(DataLoader)#{type(self).__name__}.__next__"):
                return self._next()
        return self._next()

    def __len__(self) -> int:
        return self._length()

    def _next(self) -> Any:
        started = self._started_s = perf_counter()
        if self._revise is not None:
            with InterruptsHeld():
                tasks, self._revise = self._revise(), None
                if tasks is not None:
                    self._prefetch(tasks)
        try:
            return self._await() if self._direct is None else self._compute(self._direct)
        finally:
            meter, now = self._meter, perf_counter()
            meter.wait_s += now - started
            meter.elapsed_s += now - (self._last or started)
            self._last = now

    def _compute(self, direct: Worker) -> Any:
        """Compute the next batch in the caller's thread, with as little around it as can be."""
        held = self._held
        if held is None:
            try:
                for task in self._tasks:  # faster than next()
                    try:
                        outcome = direct.run_inline(task)
                    except BaseException as error:
                        if self._again is None or not isinstance(error, KeyboardInterrupt):  # torch goes on behind it
                            self._tell_observers(self._number, 0, self._size(task))
                            self._number += 1
                            self._heed(direct.remarks)
                        raise
                    if type(outcome) is not StreamEnd:
                        self._held = held = task, outcome
                    else:
                        self._tell_end(0, outcome)
                    break
            except KeyboardInterrupt:
                if self._again is not None:  # it may have ended the iterator of tasks, or a task's computation
                    self._tasks = self._again(self._number + (self._held is not None))
                raise
        if direct.remarks:
            self._heed(direct.remarks)
        if held is None:
            self._finish()
        task, batch = held
        number, resume = self._number, None
        try:
            samples = self._size(task)
            if type(batch) is Portion or self._delivery.transforms:
                samples, batch, resume = self._transformed(batch, samples)
        except Exception:
            self._tell_observers(number, 0, self._size(task))
            self._number, self._held = number + 1, None
            raise
        meter = self._meter
        meter.batches += 1
        meter.samples += samples
        meter.count_stages(direct.clock.seconds)
        nth = self._delivered + 1  # what `_tell_observers` does, without the call
        for observer in self._observers:
            observer.delivering(nth, number, 0, samples, resume)
        self._delivered = nth
        self._number = number + 1
        self._held = None
        return batch

    def _await(self) -> Any:
        """Wait for the next batch from the workers. It leaves the window last: until then its turn comes again."""
        if not self._filled:
            self._fill()
        while self._pool is not None:
            if not self._window:
                self._finish()
            future = self._next_done()
            try:
                outcome = future.result()
                if type(outcome) is not StreamEnd:
                    samples, batch, resume = self._transformed(outcome, future.samples)
            except BaseException as error:
                if future.raised(error):
                    self._tell_observers(future.number, future.worker, future.samples)
                    self._window.remove(future)
                    future.clear()
                    self._submit_next()
                    self._heed(future.remarks)
                raise
            if future.remarks:
                self._heed(future.remarks)
            if type(outcome) is not StreamEnd:
                try:
                    self._submit_next()
                except Exception:  # the user's sampler raised: with torch, too, its error takes this batch's place
                    self._window.remove(future)
                    self._tell_observers(future.number, future.worker, future.samples)
                    raise
                meter = self._meter
                meter.received_bytes += future.size_bytes
                meter.batches += 1
                meter.samples += samples
                future.wait_s = perf_counter() - self._started_s
                meter.transport_s += future.transport_s
                meter.count_stages(future.stage_s)
                self._tell_observers(future.number, future.worker, samples, resume)
                self._window.remove(future)
                return batch
            self._window.remove(future)
            if future.worker in self._streams:
                self._streams.remove(future.worker)
                self._tell_end(future.worker, outcome)
                self._submit_next()
        raise StopIteration

    def _transformed(self, outcome: Any, samples: int) -> tuple[int, Any, Any]:
        """Return how many samples a batch holds, the batch as the user gets it, and its dataset's state if any."""
        resume = None
        if type(outcome) is Portion:
            samples, outcome, resume = outcome
        for transform in self._delivery.transforms:
            outcome = transform(outcome)
        return samples, outcome, resume

    def _heed(self, remarks: list[Remark]) -> None:
        """Pass on what a worker has to say, each remark once. If a filter makes one an error, the batch comes next."""
        while remarks:
            remark = remarks.pop(0)
            if isinstance(remark, str):
                warnings.warn(remark, stacklevel=5)
            else:
                self._meter.record(remark)

    def _finish(self) -> NoReturn:
        self._end(finished=True)
        if not self._keep_pool:
            self._shutdown_workers()
        raise StopIteration

    def _submit_next(self) -> None:
        """Ask for the next batch, unless there is none, or no worker that could compute it."""
        pool, delivery = self._pool, self._delivery
        assert pool is not None
        # An interrupt would end a generator for good. What the user's sampler does may be interrupted all the same; a
        # task that it gave must not be lost by that.
        if not delivery.quick_tasks:
            self._draw()
        with InterruptsHeld():
            if delivery.quick_tasks:
                self._draw()
            task, self._task = self._task, None
            if task is None:
                return
            worker = None
            if delivery.in_turn:
                while (worker := self._turn % pool.workers) not in self._streams:
                    self._turn += 1
                self._turn += 1
            elif delivery.streams:
                worker = self._least_loaded()
            future = pool.submit(task, worker)
            future.worker = future.worker if worker is None else worker
            future.samples = self._size(task)
            future.number = self._number
            self._number += 1
            self._window.append(future)

    def _least_loaded(self) -> int:
        """Return the worker that has least to do of those whose streams have not ended; of several the next in turn."""
        owing = Counter(future.worker for future in self._window if not future.done())
        first, workers = self._turn, cast(Pool, self._pool).workers
        worker = min(self._streams, key=lambda one: (owing[one], (one - first) % workers))
        self._turn = worker + 1
        return worker

    def _draw(self) -> None:
        if self._task is None and self._streams:
            self._task = next(self._tasks, None)

    def _next_done(self) -> Future:
        """Wait for the next batch in the order agreed."""
        assert self._pool is not None
        candidates = [self._window[0]] if self._delivery.in_order else list(self._window)
        if not self._pool.wait(candidates, self._delivery.timeout_s or None):
            raise _late(self._delivery.timeout_s, self._pool.describe(self._window))
        return next(filter(Future.done, candidates))

    def _tell_observers(self, number: int, worker: int, samples: int, resume: Any = None) -> None:
        """Tell of the batch, or the error, that the user is about to get."""
        nth = self._delivered + 1
        for observer in self._observers:
            observer.delivering(nth, number, worker, samples, resume)
        self._delivered = nth

    def _tell_end(self, worker: int, end: StreamEnd) -> None:
        for observer in self._observers:
            observer.exhausted(worker, end.of_dataset)

    def _end(self, finished: bool) -> None:
        observers, self._observers = self._observers, ()
        for observer in observers:
            observer.ended(finished)

    def _shutdown_workers(self) -> None:
        with InterruptsHeld():
            pool, self._pool = self._pool, None
            self._direct = None
            self._window = deque()
            if pool is not None and not self._keep_pool:
                pool.close()
            del pool

    @property
    def broken(self) -> bool:
        """Whether its workers can no longer do all their work."""
        return self._pool is None or self._pool.broken

    @property
    def base_seed(self) -> int:
        """What its workers' torch seeds count from."""
        assert self._pool is not None
        return self._pool.work.base_seed

    @property
    def _workers(self) -> Sequence[Any]:
        return () if self._pool is None else self._pool.processes

    def __getstate__(self) -> NoReturn:
        raise NotImplementedError("{} cannot be pickled", type(self).__name__)

    def _dropped(self) -> None:
        if hasattr(self, "_delivered"):
            with InterruptsHeld():
                self._end(finished=False)
            self._shutdown_workers()


def _late(timeout_s: float, why: str) -> DeliveryTimeout:
    error = DeliveryTimeout(f"DataLoader timed out after {timeout_s} seconds")
    error.add_note(f"headrace: {why}")
    return error


class PromisedLength(Observer):
    """Warns, as torch does, when an iterable dataset yields more than its `len()` has said."""

    def __init__(self, dataset: Any, promised: int, processes: bool) -> None:
        self._dataset, self._promised, self._processes = dataset, promised, processes

    def delivering(self, nth: int, number: int, worker: int, samples: int, resume: Any) -> None:
        """Warn where the count exceeds the promise."""
        if nth <= self._promised:
            return
        message = (
            f"Length of IterableDataset {self._dataset} was reported to be {self._promised}"
            f"(when accessing len(dataloader)), but {nth} samples have been fetched. "
        )
        if self._processes:
            message += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
        warnings.warn(message, stacklevel=6)
