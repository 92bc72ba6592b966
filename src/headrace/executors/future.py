"""A batch to come, and the exception that may come in its place."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper

from headrace.errors import note
from headrace.memory.pickling import dump
from headrace.telemetry.stages import NO_TIMES, Packed, StageTimes
from headrace.types import Remark


def locate(error: BaseException, where: str) -> None:
    """Note on an exception the worker that raised it.

    Args:
        error: The exception.
        where: As in "Caught ValueError in DataLoader worker process 0", from "in" on.
    """
    note(error, f"{where} (pid {os.getpid()}) on {platform.node()}")


@dataclass(frozen=True)
class Failure:
    """An exception on its way from a worker, with the notes that were added to it there."""

    wrapped: ExceptionWrapper
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException, where: str) -> "Failure":
        """Wrap an exception that is being handled, and note where it was raised, in the words of `locate`."""
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

    def error(self) -> Exception:
        """Return what `reraise` raises."""
        try:
            self.reraise()
        except Exception as error:  # noqa: BLE001 - it is returned
            return error


@dataclass(frozen=True)
class Remarked:
    """A batch, or a `Failure`, on its way from a worker together with the worker's remarks."""

    remarks: tuple[Remark, ...]
    outcome: Any


class Future:
    """A batch to come. The pool fills it in; the reader that asked for it takes the result, once.

    Attributes:
        worker: The worker that computes it.
        samples: How many samples it will hold; set by the reader.
        number: The number of the reader's task; set by the reader.
        asked: The reader's task; set by the reader.
        size_bytes: How many bytes have come from another process for it.
        remarks: The worker's remarks; complete when the result was asked for.
        packed_stages: What the worker spent on each stage of the batch, packed; `stages` has it as numbers.
        transport_s: The time that the rank spent to receive and rebuild the batch, in seconds: reading its bytes once
            they are there, copying them out of Ray's store, mapping its slot, unpickling. 0 in the rank's own process.
        wait_s: The time that the caller waited for it inside `next()`, in seconds; set by the reader.
    """

    # Class attributes instead of slots: making a future then costs half as much.
    samples = number = size_bytes = 0
    packed_stages: Packed = NO_TIMES
    transport_s = wait_s = 0.0
    asked: Any = None
    _done = False
    _outcome: Any = None
    _error: BaseException | None = None
    _rebuild: Callable[[], Any] | None = None

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.remarks: list[Remark] = []

    @property
    def stages(self) -> StageTimes:
        """What the worker spent on each stage of the batch."""
        return StageTimes.unpacked(self.packed_stages)

    def done(self) -> bool:
        """Tell whether the outcome is there."""
        return self._done

    def resolve(self, outcome: Any) -> None:
        """Fill in the outcome: a batch, or a worker's `Failure`."""
        self._outcome = outcome
        self._done = True

    def resolve_later(self, rebuild: Callable[[], Any]) -> None:
        """Fill in a function that rebuilds the outcome: the user's classes run then, and may be interrupted."""
        self._rebuild = rebuild
        self._done = True

    def fail(self, error: BaseException) -> None:
        """Fill in an exception to raise in the batch's place."""
        self._error = error
        self._done = True

    def raised(self, error: BaseException) -> bool:
        """Tell whether an exception that `result` raised is the batch's own, and not an interrupt."""
        return error is self._error or not isinstance(error, KeyboardInterrupt)

    def clear(self) -> None:
        """Drop an exception that has been raised: its traceback refers to frames that refer to this object."""
        self._outcome = self._error = self._rebuild = None

    def result(self) -> Any:
        """Return the batch, or raise the work's exception. Call it when `done`, and again after an interrupt."""
        if self._rebuild is not None:
            began_s = perf_counter()
            self._outcome = self._rebuild()
            self._rebuild = None
            self.transport_s += perf_counter() - began_s
        outcome = self._outcome
        if isinstance(outcome, Remarked):
            self.remarks.extend(outcome.remarks)
            outcome = self._outcome = outcome.outcome
        if isinstance(outcome, Failure):
            outcome.reraise()
        if self._error is not None:
            raise self._error
        return outcome
