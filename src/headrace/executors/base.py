"""The seam between the loader and whatever computes its batches.

An `Executor` is configuration, a value that may be copied, pickled and compared. Starting it gives a `Pool`:
running workers that take tasks. The loader knows nothing else, so that threads, shared memory and clusters
fit in without touching it.
"""

import os
import platform
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper

from headrace.errors import note
from headrace.memory.pickling import dump
from headrace.system.interrupts import Droppable
from headrace.types import IndexTask, PlanTask, Remark, StreamTask, Task
from headrace.worker.work import Work, Worker


def locate(error: BaseException, where: str) -> None:
    """Note on an exception the worker that raised it; `where` is as in "Caught ValueError in DataLoader worker 0"."""
    note(error, f"{where} (pid {os.getpid()}) on {platform.node()}")


@dataclass(frozen=True)
class Failure:
    """An exception on its way from a worker, with the notes that were added to it there."""

    wrapped: ExceptionWrapper
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException, where: str) -> "Failure":
        """Wrap an exception that is being handled, and note where; that follows "Caught ValueError"."""
        locate(error, where)
        wrapped = ExceptionWrapper((type(error), error, error.__traceback__), where)  # type: ignore[no-untyped-call]
        try:
            dump(type(error))
        except Exception:  # noqa: BLE001 - a local class cannot travel; its message and traceback can
            wrapped.exc_type = RuntimeError
        return cls(wrapped, tuple(getattr(error, "__notes__", ())))

    def reraise(self) -> NoReturn:
        """Raise the same type of exception, as torch rebuilds it, with the notes."""
        try:
            self.wrapped.reraise()  # type: ignore[no-untyped-call]
        except Exception as error:
            for note in self.notes:
                error.add_note(note)
            raise
        raise AssertionError("torch's wrapper always raises")


@dataclass(frozen=True)
class Remarked:
    """A batch, or a `Failure`, on its way from a worker that has something to say besides."""

    remarks: tuple[Remark, ...]
    outcome: Any


class Future:
    """A batch to come. The pool fills it in; whoever asked for it takes the result, once.

    Attributes:
        worker: Who computes it.
        samples: How many samples it will hold; for whoever asked to note.
        number: Which of the asker's tasks it is for; likewise.
        size_bytes: What has come from another process for it, in bytes.
        remarks: What its worker has to say besides; complete when the result was asked for.
    """

    __slots__ = (
        "__weakref__",
        "_done",
        "_error",
        "_outcome",
        "_rebuild",
        "number",
        "remarks",
        "samples",
        "size_bytes",
        "worker",
    )

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.samples = self.number = self.size_bytes = 0
        self.remarks: list[Remark] = []
        self._done = False
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._rebuild: Callable[[], Any] | None = None

    def done(self) -> bool:
        """Tell whether the outcome is there."""
        return self._done

    def resolve(self, outcome: Any) -> None:
        """Fill in the outcome: a batch, or a worker's `Failure`."""
        self._outcome = outcome
        self._done = True

    def resolve_later(self, rebuild: Callable[[], Any]) -> None:
        """Fill in how to rebuild the outcome: the user's classes run then, and may be interrupted."""
        self._rebuild = rebuild
        self._done = True

    def fail(self, error: BaseException) -> None:
        """Fill in an exception to raise in the batch's place."""
        self._error = error
        self._done = True

    def raised(self, error: BaseException) -> bool:
        """Tell whether an exception that came out of `result` is the batch's own, rather than an interrupt of it."""
        return error is self._error or not isinstance(error, KeyboardInterrupt)

    def clear(self) -> None:
        """Let go of an exception that has been raised: its traceback would hold what holds this object."""
        self._outcome = self._error = self._rebuild = None

    def result(self) -> Any:
        """Return the batch, or raise what the work raised; to be called when `done`, again if interrupted."""
        if self._rebuild is not None:
            self._outcome = self._rebuild()
            self._rebuild = None
        outcome = self._outcome
        if isinstance(outcome, Remarked):
            self.remarks.extend(outcome.remarks)
            outcome = self._outcome = outcome.outcome
        if isinstance(outcome, Failure):
            outcome.reraise()
        if self._error is not None:
            raise self._error
        return outcome


def name_task(work: Work, task: Task) -> str:
    """Say what a task covers, for an error message."""
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
        workers: How many there are.
        broken: Whether it can no longer do all its work: a worker died, or its messages were torn.
        when_broken: Called when it breaks.
        when_restarted: Called when it has replaced a worker.
        direct: The worker that is the caller's thread itself, and computes a task at once; None where others compute.
    """

    work: Work
    workers: int
    broken: bool = False
    when_broken: Callable[[], None] | None = None
    direct: Worker | None = None
    _owner: int
    when_restarted: Callable[[], None] | None = None

    @abstractmethod
    def submit(self, task: Task, worker: int | None = None) -> Future:
        """Hand a task to a worker: to the given one, or to the least loaded. Tasks of one worker run in order."""

    @abstractmethod
    def wait(self, futures: Sequence[Future], timeout_s: float | None = None) -> bool:
        """Wait until at least one of the futures is done; return whether one is, within the time allowed."""

    def launch(self) -> None:
        """Launch the workers, if that is still to be done: tasks submitted before are there when they begin."""

    def open_stream(self, stream: int, epoch: int) -> None:
        """Begin a pass over an iterable dataset now, where the caller's own thread reads it; workers begin it later."""

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

    def note_restart(self) -> None:
        """Note that it has replaced a worker."""
        if self.when_restarted is not None:
            self.when_restarted()

    def describe(self, window: Sequence[Future]) -> str:
        """Say why a reader waits for so long: where the first of its futures is that is not done."""
        done = [future.done() for future in window]
        late = done.index(False)
        return f"of the {len(done) - late - 1} batches asked for after it {sum(done[late:])} are done"

    @property
    def owed(self) -> int:
        """How many tasks the workers have not answered, those included that nobody waits for any more."""
        return 0

    @property
    def slots(self) -> tuple[int, int]:
        """How many slots of shared memory are mapped, and their bytes."""
        return 0, 0

    @property
    def processes(self) -> Sequence[Any]:
        """The workers' local processes, if that is what they are."""
        return ()

    # The names under which torch's own iterators are asked for the same.
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
        by_number: Whether any worker may compute what a sampler draws, its random numbers keyed by the task's number.
        local: Whether its workers take CPUs of this machine.
        prefetches: Whether its workers run while the caller does something else.
        ignores: Which of the loader's arguments about workers mean nothing to it.
    """

    parity: bool = False
    by_number: bool = False
    local: bool = True
    prefetches: bool = True
    ignores: tuple[str, ...] = ()

    def check_installed(self) -> None:  # noqa: B027 - most need nothing that the package does not
        """See whether what it needs is installed, without importing it.

        Raises:
            MissingExtra: It is not.
        """

    @abstractmethod
    def start(self, work: Work, workers: int, context: Any = None) -> Pool:
        """Start workers.

        Args:
            work: What they do.
            workers: How many, >= 0.
            context: The user's multiprocessing context, or None for the default.
        """
