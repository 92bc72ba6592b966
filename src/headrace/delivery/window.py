"""The window: the futures of batches that were asked for in advance, in the order in which they are delivered."""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from headrace.delivery.budget import Share
from headrace.delivery.staging import Staged, StagingQueue
from headrace.errors import DeliveryTimeout, note
from headrace.executors.base import Pool
from headrace.executors.future import Future
from headrace.progress.base import Pass
from headrace.system.interrupts import InterruptsHeld
from headrace.telemetry.spans import profiled, span
from headrace.telemetry.stats import Meter
from headrace.types import IndexTask, Task


@dataclass(frozen=True)
class Demand:
    """How a reader asks for batches.

    Attributes:
        ahead: Number of tasks that are submitted before the first batch is asked for, and kept outstanding, for each
            worker; 0 for inline work.
        in_order: Whether batches are delivered in the order of their tasks, or as they are completed.
        in_turn: Whether tasks go to the workers round robin, as torch deals them, or to the least loaded worker.
        streams: Whether each worker reads its own copy of an iterable dataset: a worker whose copy is at its end gets
            no more tasks.
        quick_tasks: Whether tasks come from the package's own code rather than from the user's sampler.
        timeout_s: Time limit for a batch, in seconds; 0 for none.
        share: The loader's part of a budget for batches that are asked for in advance; None for no limit.
    """

    ahead: int = 0
    in_order: bool = True
    in_turn: bool = False
    streams: bool = False
    quick_tasks: bool = True
    timeout_s: float = 0
    share: Share | None = None


class Window:
    """Asks the workers for the batches of one pass, in advance, and waits for the next one.

    Args:
        pool: The workers.
        reading: The pass.
        tasks: Its tasks.
        demand: How batches are asked for.
        staging: The queue that batches leave the window for.
        meter: Counts batches that were not asked for in advance.

    Attributes:
        tasks: The tasks that were not submitted yet.
        number: The number of the next task that is submitted, or computed in the caller's thread.
    """

    def __init__(
        self, pool: Pool, reading: Pass, tasks: Iterator[Task], demand: Demand, staging: StagingQueue, meter: Meter
    ) -> None:
        self.number = 0
        self._pool = pool
        self._per_worker, self._in_order, self._in_turn = demand.ahead, demand.in_order, demand.in_turn
        self._workers = pool.workers
        self._of_streams, self._quick = demand.streams, demand.quick_tasks
        self._timeout_s, self._share = demand.timeout_s, demand.share
        self._staging = staging
        self._meter = meter
        self._size = reading.size
        self._turn = reading.first_worker
        self._streams = set(range(pool.workers))  # workers whose copy of an iterable dataset is not at its end
        self._task: Task | None = None
        self._futures: deque[Future] = deque()
        self._filled = False
        self._early_tasks = reading.early_tasks()
        self.tasks = self._take_early(reading, tasks)
        if demand.share is not None:
            demand.share.windows.add(self)
        # Passes that begin one after another without reading must not accumulate tasks.
        if pool.owed <= self._ahead:
            self._fill()

    def _take_early(self, reading: Pass, tasks: Iterator[Task]) -> Iterator[Task]:
        """Take in the futures of tasks that were submitted before the pass began; return the tasks that are left.

        If they are not the pass's first tasks, they are dropped: another epoch was chosen, or a state was loaded.
        """
        early, self._pool.early = self._pool.early, ()
        if not early or [task for task, _ in early] != [*islice(reading.tasks(), len(early))]:
            return tasks
        for task, future in early:
            self._append(future, task)
        return reading.tasks(len(early))

    @property
    def _ahead(self) -> int:
        return self._per_worker * self._pool.workers

    def _fill(self) -> None:
        self._filled = True
        for _ in range(self._ahead - len(self._futures) if self._share is None else 1):
            self.ask()

    def ask(self, done: Future | None = None, staged: Staged | None = None, least: int = 0) -> None:
        """Ask for the next batch; where a budget limits them, for as many as it allows.

        None is asked for where none is left, or no worker could compute it. Of the next pass the first batches may
        be asked for when all of this one were.

        Args:
            done: A future that then leaves the window; no interrupt comes between.
            staged: Its batch, which is staged at the same time.
            least: How many batches are asked for whatever the budget.
        """
        quick, count = self._quick, 1
        if self._pool.workers != self._workers:
            # As many for each worker as before; with fewer workers none, until those of the others are delivered.
            missing = self._ahead - len(self._futures) - len(self._pool.early) + (done is not None)
            count = max(0, missing)
            if missing > 0:
                self._workers = self._pool.workers
        if self._share is not None:
            count = max(least, self._room(self._share, done))
        # An interrupt ends a generator for good. The user's sampler may be interrupted all the same, but a task that it
        # has yielded must not be lost.
        if count and not quick:
            self._draw()
        with InterruptsHeld():
            for _ in range(count):
                if quick:
                    self._draw()
                task, self._task = self._task, None
                if task is not None:
                    self._submit(task)
                elif (task := next(self._early_tasks, None)) is not None:
                    self._pool.early = (*self._pool.early, (task, self._pool.submit(task)))
            if done is not None and staged is not None:
                self._futures.remove(done)
                done.clear()  # a worker that was slower may still hold it
                self._staging.batches.append(staged)

    def _draw(self) -> None:
        if self._task is None and self._streams:
            self._task = next(self.tasks, None)

    def _submit(self, task: Task) -> None:
        pool, worker = self._pool, None
        if self._in_turn:
            while (worker := self._turn % pool.workers) not in self._streams:
                self._turn += 1
            self._turn += 1
        elif self._of_streams:
            worker = self._least_loaded()
        future = pool.submit(task, worker)
        if worker is not None:
            future.worker = worker
        self._append(future, task)

    def _append(self, future: Future, task: Task) -> None:
        if not self._quick and type(task) is IndexTask and type(task.index) is list:
            task = IndexTask([*task.index])  # a sampler may fill its list anew
        future.asked = task
        future.samples = self._size(task)
        future.number = self.number
        self.number += 1
        self._futures.append(future)

    def _least_loaded(self) -> int:
        """Return the worker with the fewest open tasks whose stream has not ended; among equals, the next in turn."""
        owing = Counter(future.worker for future in self._futures if not future.done())
        first, workers = self._turn, self._pool.workers
        worker = min(self._streams, key=lambda one: (owing[one], (one - first) % workers))
        self._turn = worker + 1
        return worker

    def _room(self, share: Share, done: Future | None) -> int:
        """Count the batches that may be asked for now: by the budget, and as many as are kept outstanding."""
        early = [future for _, future in self._pool.early]
        wanted = self._ahead - len(self._futures) - len(early) + (done is not None)
        asked = [*early, *(future for window in share.windows for future in window.asked())]
        staged = sum(len(window.staged()) for window in share.windows)
        room, limited = share.room(wanted, len(asked) + staged, sum(not future.done() for future in asked))
        self._meter.held_back += limited and done is not None
        return room

    def asked(self) -> Collection[Future]:
        """Return the futures."""
        return self._futures

    def staged(self) -> Collection[Staged]:
        """Return the batches that have left the window and are not delivered."""
        return self._staging.batches

    def next_done(self) -> Future | None:
        """Wait until the next future to be delivered is done, and return it; None if there is none.

        Raises:
            DeliveryTimeout: It is not done within the time limit.
        """
        if not self._filled:
            self._fill()
        futures = self._futures
        if not futures:
            if self._share is not None:
                self.ask(least=1)
            if not futures:
                return None
        candidates = [futures[0]] if self._in_order else list(futures)
        if profiled():
            with span("headrace: wait for a batch"):
                came = self._pool.wait(candidates, self._timeout_s or None)
        else:
            came = self._pool.wait(candidates, self._timeout_s or None)
        if not came:
            raise _late(self._timeout_s, self._pool, futures)
        return candidates[0] if self._in_order else next(filter(Future.done, candidates))

    def has_next(self) -> bool:
        """Tell whether the next future to be delivered is done, without waiting for it."""
        candidates = [*islice(self._futures, 1 if self._in_order else None)]
        if candidates and not any(map(Future.done, candidates)):
            self._pool.poll()
        return any(map(Future.done, candidates))

    def drop(self, future: Future) -> None:
        """Remove a future whose batch is not staged."""
        self._futures.remove(future)

    def end_stream(self, worker: int) -> bool:
        """Note that a worker's copy of an iterable dataset is at its end; return False if that was known."""
        if worker not in self._streams:
            return False
        self._streams.remove(worker)
        return True


def _late(timeout_s: float, pool: Pool, futures: Sequence[Future]) -> DeliveryTimeout:
    error = DeliveryTimeout(f"DataLoader timed out after {timeout_s} seconds")
    for text in (pool.describe(futures), *pool.stacks(futures)):
        note(error, text)
    return error
