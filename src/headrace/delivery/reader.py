"""Readers: the iterators that a loader returns. Futures wait in a bounded window, batches in a staging queue."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter
from typing import Any, NoReturn

import torch

from headrace.delivery.device.transfer import Transfer
from headrace.delivery.growth import Growth
from headrace.delivery.staging import StagingQueue
from headrace.delivery.window import Demand, Window
from headrace.executors.base import Pool
from headrace.memory.sized import batch_bytes
from headrace.progress.base import Observer, Pass
from headrace.system.interrupts import Droppable, InterruptsHeld
from headrace.system.user_warnings import warn_user
from headrace.telemetry.spans import profiled
from headrace.telemetry.stats import Meter
from headrace.types import Remark, Task
from headrace.worker.streams import Portion, StreamEnd
from headrace.worker.worker import Worker

_TWO_THREADS = (
    "two threads read from one iterator of a DataLoader at the same time, which would lose batches. Call next() "
    'under a lock, or give each thread a loader of its own. To load in several threads pass executor="thread".'
)


@dataclass(frozen=True)
class Delivery:
    """How batches reach the user.

    Attributes:
        demand: How they are asked for.
        transforms: Functions that turn a worker's batch into the user's, applied in this order.
        staged_ahead: Number of batches that are staged in addition to the one that is delivered next.
        remarks: Warnings about the delivery itself. They are shown when a batch was staged.
        growth: Changes the number of workers on the way; None if it stays.
    """

    demand: Demand = field(default_factory=Demand)
    transforms: tuple[Callable[[Any], Any], ...] = ()
    staged_ahead: int = 0
    remarks: list[Remark] = field(default_factory=list)
    growth: Growth | None = None


class Reader(Droppable, Iterator[Any]):
    """The iterator over one pass: it asks the workers for batches, stages them in order, and delivers them.

    Args:
        pool: Running workers; they end when nothing refers to the pool.
        reading: The pass.
        delivery: How the batches reach the user.
        meter: Counts batches, samples and waiting.
        keep_pool: Whether the pool stays open after the pass.
        transfer: Copies the batches to a device; None if they stay where they are.
    """

    def __init__(
        self,
        pool: Pool,
        reading: Pass,
        delivery: Delivery,
        meter: Meter,
        keep_pool: bool = False,
        transfer: Transfer | None = None,
    ) -> None:
        self._pool: Pool | None = pool
        self._delivery = delivery
        self._meter = meter
        self._keep_pool = keep_pool
        self._staging = StagingQueue(delivery.staged_ahead)
        self._observers: Sequence[Observer] = ()
        self._transfer: Transfer | None = None
        self._growth = delivery.growth
        self._thread = 0  # the thread that is in `next()`; 0 if none is
        self.restart(reading, transfer)

    def restart(self, reading: Pass, transfer: Transfer | None = None) -> None:
        """Begin a pass with the same workers; their unanswered tasks of the pass before are dropped."""
        self._end(finished=False)
        if self._transfer is not None:
            self._transfer.close()
        self._transfer = transfer
        self._transforms = self._delivery.transforms + (() if transfer is None else (transfer.start,))
        self._pass = reading
        self._size = reading.size
        self._observers = (reading, *reading.observers)
        self._may_move = True  # before the first batch, `set_epoch` still changes what is read
        self._delivered = 0
        self._last_s = 0.0
        if self._growth is not None and self._pool is not None:
            self._growth.begin(self._pool)
        self._prefetch(reading.tasks())

    def _prefetch(self, tasks: Iterator[Task]) -> None:
        assert self._pool is not None
        self._staging.clear()
        self._direct = self._pool.direct
        self._window = Window(self._pool, self._pass, tasks, self._delivery.demand, self._staging, self._meter)
        self._pool.launch()

    def __next__(self, recorded: bool = False) -> Any:  # noqa: PLR0915
        # One function, since a call takes a hundredth of the time of an in-memory batch.
        if not recorded and profiled():
            with torch.autograd.profiler.record_function(f"enumerate(DataLoader)#{type(self).__name__}.__next__"):
                return self.__next__(recorded=True)
        if self._thread and self._thread != get_ident():
            raise RuntimeError(_TWO_THREADS)
        started_s = perf_counter()
        direct = self._direct
        try:
            self._thread = get_ident()
            growth = self._growth
            if growth is not None and self._pool is not None:
                growth.step(started_s, self._pool)
            if self._may_move:
                with InterruptsHeld():
                    self._may_move = False
                    tasks = self._pass.revised()
                    if tasks is not None:
                        self._prefetch(tasks)
                        direct = self._direct
            transfer = self._transfer
            if transfer is not None:
                transfer.refuse_capture()
            staging = self._staging
            staged = staging.batches
            if direct is None:
                while len(staged) < staging.wanted:
                    self._await()
                if transfer is not None:
                    while staging.wanted and len(staged) <= transfer.ahead and self._window.has_next():
                        self._await()
            else:
                if direct.remarks:  # left over: a warnings filter made an earlier remark an error
                    self._heed(direct.remarks)
                if len(staged) < staging.wanted:
                    self._compute(direct)
            if not staged:
                self._finish()
            number, worker, samples, batch, resume, stages, future, task, error = staged[0]
            if future is not None and future.remarks:
                self._heed(future.remarks)
            if transfer is not None and error is None:
                batch = transfer.hand_over(batch)
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
            meter.last = self._pass, task
            if stages is not None:
                meter.count_stages(stages)
            if growth is not None:
                growth.delivers(stages)
            if future is not None:
                meter.received_bytes += future.size_bytes
                meter.transport_s += future.transport_s
                future.wait_s = perf_counter() - started_s
            staged.popleft()
            return batch
        finally:
            self._thread = 0
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
        staging, transforms, window = self._staging, self._transforms, self._window
        notes = self._delivery.remarks
        staged = staging.batches
        try:
            for task in window.tasks:  # faster than next()
                number, resume = window.number, None
                try:
                    outcome = direct.run_inline(task)
                    kind, samples = type(outcome), self._size(task)
                    if kind is Portion or (transforms and kind is not StreamEnd):
                        samples, outcome, resume = self._transformed(outcome, samples)
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt) and self._pass.repeatable:
                        raise
                    window.number = number + 1  # the next task follows, as in torch
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
                        staged.append((number, 0, samples, outcome, resume, stages, None, task, None))
                        window.number = number + 1
                    if direct.remarks:
                        self._heed(direct.remarks)
                    if notes:
                        self._heed(notes)
                if len(staged) >= staging.wanted:
                    return
            staging.end()
        except KeyboardInterrupt:  # it may have ended the iterator of tasks, or interrupted a task
            if self._pass.repeatable:
                window.number = max(window.number, staged[-1][0] + 1 if staged else 0)
                window.tasks = self._pass.tasks(window.number)
            raise

    def _await(self) -> None:
        """Wait for the next batch from the workers and stage it. Its future stays in the window until then."""
        window, delivery, growth = self._window, self._delivery, self._growth
        if growth is None:
            future = window.next_done()
        else:
            began_s = perf_counter()
            future = window.next_done()
            growth.waited(max(0.0, perf_counter() - began_s - (0.0 if future is None else future.transport_s)))
        if future is None:
            self._staging.end()
            return
        samples, resume = future.samples, None
        try:
            batch = future.result()
            kind = type(batch)
            if delivery.demand.share is not None:
                delivery.demand.share.note(future.size_bytes or batch_bytes(batch))
            if kind is Portion or (self._transforms and kind is not StreamEnd):
                samples, batch, resume = self._transformed(batch, samples)
        except BaseException as error:
            raises = True
            if future.raised(error):
                raises = self._replace_by(error, future.number, future.worker, future.samples)
                window.drop(future)
                future.clear()
                window.ask()
                self._heed(future.remarks)
            if raises:
                raise
            return
        if kind is StreamEnd:
            if future.remarks:
                self._heed(future.remarks)
            window.drop(future)
            if window.end_stream(future.worker):
                self._tell_end(future.worker, batch)
                window.ask()
            return
        number, worker, stages = future.number, future.worker, future.packed_stages
        try:
            window.ask(future, (number, worker, samples, batch, resume, stages, future, future.asked, None))
        except Exception as error:  # from the user's sampler: as in torch, it takes this batch's place
            window.drop(future)
            if self._replace_by(error, number, worker, future.samples):
                raise
        if delivery.remarks:
            self._heed(delivery.remarks)

    def _replace_by(self, error: BaseException, number: int, worker: int, samples: int) -> bool:
        """Put an error into the place of a batch; return True if it is due now: no staged batch comes before it."""
        staged = self._staging.batches
        if staged and isinstance(error, Exception):
            staged.append((number, worker, samples, None, None, None, None, None, error))
            return False
        self._tell_observers(number, worker, samples)
        return True

    def _transformed(self, outcome: Any, samples: int) -> tuple[int, Any, Any]:
        """Return the number of samples, the batch as the user gets it, and the place in the stream, if it has one."""
        resume = None
        if type(outcome) is Portion:
            samples, outcome, resume = outcome
        for transform in self._transforms:
            outcome = transform(outcome)
        return samples, outcome, resume

    def _heed(self, remarks: list[Remark]) -> None:
        """Issue each remark once, and remove it. If a warnings filter makes one an error, the batch comes next."""
        while remarks:
            remark = remarks.pop(0)
            if isinstance(remark, str):
                warn_user(remark)
            else:
                self._meter.record(remark)

    def _finish(self) -> NoReturn:
        self._end(finished=True)
        if self._transfer is not None:
            self._transfer.close()
        if not self._keep_pool:
            self._shutdown_workers()
        raise StopIteration

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
        if self._transfer is not None:
            self._staging.batches.clear()

    def _shutdown_workers(self) -> None:
        with InterruptsHeld():
            pool, self._pool = self._pool, None
            self._direct = None
            self._staging.end()
            vars(self).pop("_window", None)  # it refers to the pool
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
            try:
                with InterruptsHeld():
                    self._end(finished=False)
                if self._transfer is not None:
                    self._transfer.close()
            finally:
                self._shutdown_workers()
