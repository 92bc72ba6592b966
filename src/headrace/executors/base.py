"""The seam between the loader and everything that computes its batches.

An `Executor` is configuration, a value that may be copied, pickled and compared. Starting it gives a `Pool`:
running workers that take tasks. The loader knows nothing else, so that threads, shared memory and clusters
fit in without changing it.
"""

import os
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from headrace.executors.future import Future
from headrace.memory.slots import Mapping
from headrace.system.interrupts import Droppable
from headrace.types import IndexTask, PlanTask, StreamTask, Task
from headrace.worker.work import Work
from headrace.worker.worker import Worker


def name_task(work: Work, task: Task) -> str:
    """Word which samples a task covers, for an error message."""
    match task:
        case PlanTask():
            assert work.plan is not None
            samples = work.plan.batch(task.epoch, task.step, task.cursor).tolist()
            return f"step {task.step} of epoch {task.epoch} (samples {reprlib.repr(samples)})"
        case StreamTask():
            return "the next batch of an iterable dataset"
        case IndexTask(index):
            return f"the batch of samples {reprlib.repr(index)}"
        case _:
            return f"the batch of samples {reprlib.repr(list(task) if isinstance(task, range) else task.tolist())}"


class Pool(Droppable, ABC):
    """Running workers. It closes itself when the last reference to it is dropped, or when the interpreter ends.

    Attributes:
        work: What its workers do.
        workers: How many workers there are.
        broken: Whether it can no longer do all its work: a worker died, or its messages were torn.
        when_broken: Called when it breaks.
        when_restarted: Called when it has replaced a worker, with that one's end in a sentence; "" if it has not ended.
        direct: The worker that computes a task at once in the caller's thread; None where other threads or processes
            compute.
        early: Tasks of the next pass that were submitted before it began, with their futures.
        allows_early: Whether tasks of the next pass may be submitted before it begins.
    """

    work: Work
    workers: int
    broken: bool = False
    when_broken: Callable[[], None] | None = None
    direct: Worker | None = None
    early: Sequence[tuple[Task, Future]] = ()
    allows_early: bool = False
    _owner: int
    when_restarted: Callable[[str], None] | None = None

    @abstractmethod
    def submit(self, task: Task, worker: int | None = None) -> Future:
        """Hand a task to a worker: to the given one, or to the least loaded. Tasks of one worker run in order."""

    @abstractmethod
    def wait(self, futures: Sequence[Future], timeout_s: float | None = None) -> bool:
        """Wait until at least one of the futures is done; return whether one is, within the time allowed."""

    def poll(self) -> None:
        """Receive what has come from the workers, without waiting. Threads fill in their futures by themselves."""

    def launch(self) -> None:
        """Launch the workers, where starting the pool did not. They find the tasks that were submitted before."""

    def pin_slots(self, pin: Callable[[Mapping], None]) -> None:
        """Call a function with all memory that is mapped from now on, before a batch in it is delivered."""

    def limit_slots(self, limit: Callable[[], int]) -> None:
        """Keep no spare memory for batches where that which is mapped exceeds a limit.

        Args:
            limit: Returns the limit, in bytes.
        """

    def resize(self, workers: int) -> None:
        """Have another number of workers from now on, where the executor `resizes`."""
        raise NotImplementedError

    def room_for(self, more: int) -> int:
        """Return how many of `more` workers there is room for, such as memory, where that can be known."""
        return more

    @property
    def up(self) -> int:
        """How many workers can compute tasks now; the others start."""
        return self.workers

    def open_stream(self, number: int, epoch: int) -> None:
        """Begin pass `number` over an iterable dataset now, if the caller's thread reads it; workers begin it late."""

    @abstractmethod
    def close(self) -> None:
        """End the workers and release what they hold. Idempotent."""

    def _check_owner(self) -> None:
        """Raise in a forked copy of the rank, which inherited the object, not the workers."""
        if os.getpid() != self._owner:
            raise RuntimeError(f"the workers are those of process {self._owner}, of which this one is a forked copy")

    def breaks(self) -> None:
        """Note that it can no longer do all its work."""
        if not self.broken and self.when_broken is not None:
            self.when_broken()
        self.broken = True

    def note_restart(self, end: str = "") -> None:
        """Note that it has replaced a worker.

        Args:
            end: The worker and its end in a sentence; "" if it has not ended.
        """
        if self.when_restarted is not None:
            self.when_restarted(end)

    def describe(self, window: Sequence[Future]) -> str:
        """Describe why a reader waits long: the state of its first future that is not done, and of the others."""
        done = [future.done() for future in window]
        late = done.index(False)
        return f"of the {len(done) - late - 1} batches asked for after it {sum(done[late:])} are done"

    def stacks(self, window: Sequence[Future]) -> Sequence[str]:
        """Return the stacks of the workers that a reader waits for, each as a text, where they can be asked for."""
        return ()

    @property
    def owed(self) -> int:
        """How many tasks the workers have not answered, also where the reader has been dropped."""
        return 0

    @property
    def slots(self) -> tuple[int, int]:
        """How many slots of shared memory are mapped, and their bytes."""
        return 0, 0

    @property
    def processes(self) -> Sequence[Any]:
        """The workers' processes, where they are local processes."""
        return ()

    # Torch's own iterators have the same under these names.
    def _shutdown_workers(self) -> None:
        self.close()

    @property
    def _workers(self) -> Sequence[Any]:
        return self.processes

    def _dropped(self) -> None:
        self.close()


class Executor(ABC):
    """Configuration of where work runs, passed as `DataLoader(..., executor=...)`.

    Attributes:
        parity: Whether it can give torch's own batches, random draws included.
        copies: Whether its workers have copies of the dataset, which the caller's code does not change.
        by_number: Whether any worker may compute the batches of a sampler, with random numbers keyed by the task's
            number.
        local: Whether its workers take CPUs of this machine.
        prefetches: Whether its workers run while the caller does something else.
        resizes: Whether its pools can have another number of workers while they run.
        ignores: Which of the loader's arguments about workers mean nothing to it.
    """

    parity: bool = False
    copies: bool = True
    by_number: bool = False
    local: bool = True
    prefetches: bool = True
    resizes: bool = False
    ignores: tuple[str, ...] = ()

    def check_installed(self) -> None:  # noqa: B027 - most need only what the package itself needs
        """Check that its packages are installed, without importing them.

        Raises:
            MissingExtra: One is not.
        """

    @abstractmethod
    def start(self, work: Work, workers: int, context: Any = None) -> Pool:
        """Start workers.

        Args:
            work: What they do.
            workers: How many, >= 0.
            context: The user's multiprocessing context, or None for the default.
        """
