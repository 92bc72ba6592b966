"""A batch to come, and the exception that may come in its place."""

import os
import pickle
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn

from torch._utils import ExceptionWrapper, KeyErrorMessage

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
    """An exception on its way from a worker.

    Attributes:
        wrapped: Its type, and its traceback as text, as torch sends them.
        notes: The notes that were added to it in the worker.
        pickled: The exception itself, pickled; empty if pickling would not give it back.
    """

    wrapped: ExceptionWrapper
    notes: tuple[str, ...] = ()
    pickled: bytes = b""

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
        return cls(wrapped, tuple(getattr(error, "__notes__", ())), _pickled(error))

    def reraise(self) -> NoReturn:
        """Raise `error`."""
        raise self.error()

    def error(self) -> Exception:
        """Return an exception of the same type, with the notes.

        Its text is torch's, which has the worker's traceback, and its attributes are those of the exception in the
        worker. Where a type cannot be made from a text, or does not keep it, that exception itself is returned, and
        torch's text is its cause. Where that cannot be pickled it is a `RuntimeError`.
        """
        wrapped = self.wrapped
        text = f"Caught {wrapped.exc_type.__name__} {wrapped.where}.\nOriginal {wrapped.exc_msg}"
        original = _unpickled(self.pickled, wrapped.exc_type)
        error = _made(wrapped.exc_type, text, original)
        if error is None or not _keeps(error, text):
            error = original or error or RuntimeError(text)
            if type(error) is wrapped.exc_type:
                error.__cause__ = RuntimeError(text)
        vars(error).pop("__notes__", None)  # a pickled exception brings them, too
        for one in self.notes:
            error.add_note(one)
        return error


_SLOTS = ("errno", "strerror", "filename", "filename2", "name", "path")
"""Attributes of Python's own exceptions that are not in their `__dict__`."""


def _pickled(error: BaseException) -> bytes:
    """Return an exception as bytes; none where they would not give back an exception of its type."""
    try:
        data = pickle.dumps(error)
    except Exception:  # noqa: BLE001 - its class, or what it holds, cannot be pickled
        return b""
    return b"" if _unpickled(data, type(error)) is None else data


def _unpickled(data: bytes, kind: type[BaseException]) -> Exception | None:
    """Return the exception of which these are the bytes; None if it is not of this type."""
    try:
        error = pickle.loads(data) if data else None
    except Exception:  # noqa: BLE001 - what unpickling user classes may raise
        return None
    return error if type(error) is kind and isinstance(error, Exception) else None


def _made(kind: type[Exception], text: str, original: Exception | None) -> Exception | None:
    """Return an exception of a type, made from a text as torch makes it; None where that cannot be.

    Args:
        kind: The type.
        text: The text.
        original: An exception whose attributes it gets.
    """
    message = KeyErrorMessage(text) if issubclass(kind, KeyError) else text
    error: Any = None
    with suppress(Exception):  # the user's class may raise anything
        error = kind(message)
    if type(error) is not kind:
        with suppress(Exception):  # torch's way where a class has an attribute `message`
            error = kind(message=text)  # type: ignore[call-arg]
    if type(error) is not kind:
        return None
    with suppress(Exception):
        for name in _SLOTS:
            if getattr(original, name, None) is not None:
                setattr(error, name, text if name == "strerror" else getattr(original, name))
        vars(error).update(vars(original) if original is not None else {})
    return error


def _keeps(error: Exception, text: str) -> bool:
    try:
        return text in str(error)
    except Exception:  # noqa: BLE001 - the user's class may raise anything
        return False


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
