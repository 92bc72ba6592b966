"""Readers: the iterators that a loader returns. Futures wait in a bounded window, batches in a staging queue."""

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn, cast

import torch

from headrace.delivery.staging import Staged, StagingQueue
from headrace.errors import DeliveryTimeout
from headrace.executors.base import Pool
from headrace.executors.future import Future
from headrace.progress.base import Observer, Pass
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
        ahead: Number of tasks that are submitted before the first batch is asked for, and kept outstanding:
            prefetch_factor × workers; 0 for inline work.
        in_order: Whether batches are delivered in the order of their tasks, or as they are completed.
        in_turn: Whether tasks go to the workers round robin, as torch deals them, or to the least loaded worker.
        streams: Whether each worker reads its own copy of an iterable dataset: a worker whose copy is at its end gets
            no more tasks.
        quick_tasks: Whether tasks come from the package's own code rather than from the user's sampler.
        timeout_s: Time limit for a batch, in seconds; 0 for none.
        transforms: Functions that turn a worker's batch into the user's, applied in this order.
        staged_ahead: Number of batches that are staged in addition to the one that is delivered next.
    """

    ahead: int = 0
    in_order: bool = True
    in_turn: bool = False
    streams: bool = False
    quick_tasks: bool = True
    timeout_s: float = 0
    transforms: tuple[Callable[[Any], Any], ...] = ()
    staged_ahead: int = 0


class Reader(Droppable, Iterator[Any]):
    """The iterator over one pass: it asks the workers for batches, stages them in order, and delivers them.

    Args:
        pool: Running workers; they end when nothing refers to the pool.
        reading: The pass.
        delivery: How the batches reach the user.
        meter: Counts batches, samples and waiting.
        keep_pool: Whether the pool stays open after the pass.
    """

    def __init__(self, pool: Pool, reading: Pass, delivery: Delivery, meter: Meter, keep_pool: bool = False) -> None:
        self._pool: Pool | None = pool
        self._delivery = delivery
        self._meter = meter
        self._keep_pool = keep_pool
        self._staging = StagingQueue(delivery.staged_ahead)
        self._observers: Sequence[Observer] = ()
        self.restart(reading)

    def restart(self, reading: Pass) -> None:
        """Begin a pass with the same workers; their unanswered tasks of the pass before are dropped."""
        self._end(finished=False)
        self._pass = reading
        self._size = reading.size
        self._observers = (reading, *reading.observers)
        self._may_move = True  # before the first batch, `set_epoch` still changes what is read
        self._delivered = 0
        self._last_s = 0.0
        self._prefetch(reading.tasks())

    def _prefetch(self, tasks: Iterator[Task]) -> None:
        assert self._pool is not None
        self._staging.clear()
        self._direct = self._pool.direct
        self._tasks = tasks
        self._task: Task | None = None
        self._window: deque[Future] = deque()
        self._streams = set(range(self._pool.workers))  # workers whose copy of an iterable dataset is not at its end
        self._turn = self._pass.first_worker
        self._number = 0  # of the next task that is submitted, or computed here
        self._filled = False
        # Passes that begin one after another without reading must not accumulate tasks.
        if self._pool.owed <= self._delivery.ahead:
            self._fill()
        self._pool.launch()

    def _fill(self) -> None:
        self._filled = True
        for _ in range(self._delivery.ahead):
            self._submit_next()

    def __next__(self, recorded: bool = False) -> Any:
        # One function, since a call takes a hundredth of the time of an in-memory batch.
        if not recorded and _profiled():
            with torch.autograd.profiler.record_function(f"enumerate(DataLoader)#{type(self).__name__}.__next__"):
                return self.__next__(recorded=True)
        started_s = perf_counter()
        if self._may_move:
            with InterruptsHeld():
                self._may_move = False
                tasks = self._pass.revised()
                if tasks is not None:
                    self._prefetch(tasks)
        direct = self._direct
        try:
            staging = self._staging
            staged = staging.batches
            if direct is None:
                while len(staged) < staging.wanted:
                    self._await()
            else:
                if direct.remarks:  # left over: a warnings filter made an earlier remark an error
                    self._heed(direct.remarks)
                if len(staged) < staging.wanted:
                    self._compute(direct)
            if not staged:
                self._finish()
            number, worker, samples, batch, resume, stages, future, error = staged[0]
            nth, last = self._delivered + 1, not staging.wanted and len(staged) == 1
            for observer in self._observers:
                observer.delivering(nth, number, worker, samples, resume, last)
            self._delivered = nth
            if error is not None:
                del error  # or its traceback, which refers to this frame, would keep itself alive
                self._raise_staged()
            meter = self._meter
            meter.batches += 1
            meter.samples += samples
            if stages is not None:
                meter.count_stages(stages)
            if future is not None:
                meter.received_bytes += future.size_bytes
                meter.transport_s += future.transport_s
                future.wait_s = perf_counter() - started_s
            staged.popleft()
            return batch
        finally:
            meter, now_s = self._meter, perf_counter()
            if direct is not None and direct.gathers:
                meter.gathered_s += now_s - started_s
            else:
                meter.wait_s += now_s - started_s
            meter.elapsed_s += now_s - (self._last_s or started_s)
            self._last_s = now_s

    def __len__(self) -> int:
        return self._pass.length()

    def _raise_staged(self) -> NoReturn:
        """Raise the error that is staged first."""
        error = self._staging.batches.popleft()[-1]
        assert error is not None
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def _compute(self, direct: Worker) -> None:
        """Compute as many batches in the caller's thread as are wanted, and stage them. Every microsecond counts."""
        staging, transforms = self._staging, self._delivery.transforms
        staged = staging.batches
        try:
            for task in self._tasks:  # faster than next()
                number, resume = self._number, None
                try:
                    outcome = direct.run_inline(task)
                    kind, samples = type(outcome), self._size(task)
                    if transforms or kind is Portion:
                        samples, outcome, resume = self._transformed(outcome, samples)
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt) and self._pass.repeatable:
                        raise
                    self._number = number + 1  # the next task follows, as in torch
                    raises = self._replace_by(error, number, 0, self._size(task))
                    self._heed(direct.remarks)
                    if raises:
                        raise
                else:
                    if kind is StreamEnd:
                        self._tell_end(0, outcome)
                        staging.end()
                    else:
                        stages = None if direct.gathers else direct.clock.packed()
                        staged.append((number, 0, samples, outcome, resume, stages, None, None))
                        self._number = number + 1
                    if direct.remarks:
                        self._heed(direct.remarks)
                if len(staged) >= staging.wanted:
                    return
            staging.end()
        except KeyboardInterrupt:  # it may have ended the iterator of tasks, or interrupted a task
            if self._pass.repeatable:
                self._number = max(self._number, staged[-1][0] + 1 if staged else 0)
                self._tasks = self._pass.tasks(self._number)
            raise

    def _await(self) -> None:
        """Wait for the next batch from the workers and stage it. Its future stays in the window until then."""
        if not self._filled:
            self._fill()
        if not self._window:
            self._staging.end()
            return
        future = self._next_done()
        samples, resume = future.samples, None
        try:
            batch = future.result()
            kind = type(batch)
            if kind is Portion or (self._delivery.transforms and kind is not StreamEnd):
                samples, batch, resume = self._transformed(batch, samples)
        except BaseException as error:
            raises = True
            if future.raised(error):
                raises = self._replace_by(error, future.number, future.worker, future.samples)
                self._window.remove(future)
                future.clear()
                self._submit_next()
                self._heed(future.remarks)
            if raises:
                raise
            return
        if future.remarks:
            self._heed(future.remarks)
        if kind is not StreamEnd:
            number, worker = future.number, future.worker
            try:
                self._submit_next(future, (number, worker, samples, batch, resume, future.packed_stages, future, None))
            except Exception as error:  # from the user's sampler: as in torch, it takes this batch's place
                self._window.remove(future)
                if self._replace_by(error, number, worker, future.samples):
                    raise
            return
        self._window.remove(future)
        if future.worker in self._streams:
            self._streams.remove(future.worker)
            self._tell_end(future.worker, batch)
            self._submit_next()

    def _replace_by(self, error: BaseException, number: int, worker: int, samples: int) -> bool:
        """Put an error into the place of a batch; return True if it is due now: no staged batch comes before it."""
        staged = self._staging.batches
        if staged and isinstance(error, Exception):
            staged.append((number, worker, samples, None, None, None, None, error))
            return False
        self._tell_observers(number, worker, samples)
        return True

    def _transformed(self, outcome: Any, samples: int) -> tuple[int, Any, Any]:
        """Return the number of samples, the batch as the user gets it, and the place in the stream, if it has one."""
        resume = None
        if type(outcome) is Portion:
            samples, outcome, resume = outcome
        for transform in self._delivery.transforms:
            outcome = transform(outcome)
        return samples, outcome, resume

    def _heed(self, remarks: list[Remark]) -> None:
        """Issue each remark of a worker once. If a warnings filter makes one an error, the batch comes next."""
        while remarks:
            remark = remarks.pop(0)
            if isinstance(remark, str):
                warnings.warn(remark, stacklevel=4)
            else:
                self._meter.record(remark)

    def _finish(self) -> NoReturn:
        self._end(finished=True)
        if not self._keep_pool:
            self._shutdown_workers()
        raise StopIteration

    def _submit_next(self, done: Future | None = None, staged: Staged | None = None) -> None:
        """Ask for the next batch, unless there is none or no worker that could compute it.

        Args:
            done: A future that then leaves the window; no interrupt comes between.
            staged: Its batch, which is staged at the same time.
        """
        delivery = self._delivery
        # An interrupt ends a generator for good. The user's sampler may be interrupted all the same, but a task that it
        # has yielded must not be lost.
        if not delivery.quick_tasks:
            self._draw()
        with InterruptsHeld():
            if delivery.quick_tasks:
                self._draw()
            task, self._task = self._task, None
            if task is not None:
                self._submit(task)
            if done is not None and staged is not None:
                self._window.remove(done)
                self._staging.batches.append(staged)

    def _submit(self, task: Task) -> None:
        pool, delivery = self._pool, self._delivery
        assert pool is not None
        worker = None
        if delivery.in_turn:
            while (worker := self._turn % pool.workers) not in self._streams:
                self._turn += 1
            self._turn += 1
        elif delivery.streams:
            worker = self._least_loaded()
        future = pool.submit(task, worker)
        if worker is not None:
            future.worker = worker
        future.samples = self._size(task)
        future.number = self._number
        self._number += 1
        self._window.append(future)

    def _least_loaded(self) -> int:
        """Return the worker with the fewest open tasks whose stream has not ended; among equals, the next in turn."""
        owing = Counter(future.worker for future in self._window if not future.done())
        first, workers = self._turn, cast(Pool, self._pool).workers
        worker = min(self._streams, key=lambda one: (owing[one], (one - first) % workers))
        self._turn = worker + 1
        return worker

    def _draw(self) -> None:
        if self._task is None and self._streams:
            self._task = next(self._tasks, None)

    def _next_done(self) -> Future:
        """Wait until the next future to be delivered is done, and return it."""
        assert self._pool is not None
        in_order = self._delivery.in_order
        candidates = [self._window[0]] if in_order else list(self._window)
        if not self._pool.wait(candidates, self._delivery.timeout_s or None):
            raise _late(self._delivery.timeout_s, self._pool.describe(self._window))
        return candidates[0] if in_order else next(filter(Future.done, candidates))

    def _tell_observers(self, number: int, worker: int, samples: int) -> None:
        """Tell the observers of an error that is about to be raised in the place of a batch."""
        nth = self._delivered + 1
        for observer in self._observers:
            observer.delivering(nth, number, worker, samples, None, False)
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
        """Whether its pool is closed or has lost a worker for good."""
        return self._pool is None or self._pool.broken

    @property
    def base_seed(self) -> int:
        """The base seed of its workers: torch's seed of worker i is base_seed + i."""
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
