"""Batches on their way to an accelerator: copies are queued beside computation, and nothing waits for them but streams.

The copy of a batch is queued on a stream of its own, and an event after it. When the batch is handed over, the caller's
stream waits for that event. The source, perhaps a slot that a worker fills again, is held until the event has happened.
The memory on the device was allocated on the stream for copies. It is marked as used on the caller's stream, so that it
is not filled again before the caller's work on it has ended.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from headrace.delivery.device.backends import Backend, Event
from headrace.delivery.device.nesting import Replacement, replaced
from headrace.telemetry.spans import span

_MOST_QUEUED = 8
"""The number of batches that the caller's queued work may use at a time: memory on the device is bounded by it."""


class Copied(NamedTuple):
    """A batch whose copy is queued.

    Attributes:
        batch: The batch on the device.
        tensors: Its tensors there.
        done: The event after the copy.
    """

    batch: Any
    tensors: list[torch.Tensor]
    done: Event


class Uncopied(NamedTuple):
    """A batch that is copied when it is handed over."""

    batch: Any


class _Source:
    """A batch in the host's memory, of which a copy is queued.

    Attributes:
        batch: The batch.
        tensors: Its tensors: a container may make them only when it is asked.
        stream: The stream with the copy.
        done: The event after the copy; None if an exception came before it was recorded.
    """

    __slots__ = ("batch", "done", "stream", "tensors")

    def __init__(self, batch: Any, stream: Any) -> None:
        self.batch = batch
        self.tensors: list[torch.Tensor] = []
        self.stream = stream
        self.done: Event | None = None


class Transfer:
    """Copies the batches of a loader to a device.

    Args:
        backend: The accelerator.
        device: The device.
        ahead: How many batches are copied ahead of the one that is handed over next.
        warn: Called with the text of a warning.

    Attributes:
        backend: The accelerator.
        device: The device.
        ahead: As given; 0 after memory on the device ran out, or where the accelerator has only one stream.
    """

    def __init__(self, backend: Backend, device: torch.device, ahead: int, warn: Callable[[str], None]) -> None:
        self.device = device
        self.ahead = ahead
        self.backend = backend
        self._warn = warn
        self._stream: Any = None
        self._opened = False
        self._sources: deque[_Source] = deque()
        self._handed: deque[Event] = deque()  # each after the caller's work on the batches before
        self._owner = os.getpid()

    def refuse_capture(self) -> None:
        """Check that no graph is captured.

        Raises:
            RuntimeError: One is.
        """
        if self.backend.is_capturing():
            raise RuntimeError(
                "a batch was asked for while a CUDA graph is captured, in which no copy to the device can be queued. "
                "Call next() before the capture, and copy each batch into the tensors that the graph reads."
            )

    def start(self, batch: Any) -> Copied | Uncopied:
        """Queue the copy of a batch."""
        self._release()
        if not self._opened:  # now, since workers must be forked before the device is used
            self._stream = self.backend.copy_stream()
            if self._stream is None:
                self.ahead = 0
            self._opened = True
        if self._stream is None:
            return Uncopied(batch)
        while len(self._handed) > _MOST_QUEUED:
            self._handed.popleft().synchronize()
        try:
            staged = self._copy(batch, self._stream)
        except torch.OutOfMemoryError as error:
            self._stream, self.ahead = None, 0
            self._warn(
                f"memory on {self.device} ran out while a batch was copied ahead ({error}): from now on each batch is "
                "copied when it is handed over. With device_prefetch=0 it is so from the start."
            )
            return Uncopied(batch)
        return staged if self._can_be_marked(staged.tensors) else Uncopied(batch)

    def hand_over(self, staged: Copied | Uncopied) -> Any:
        """Return a batch for work on the caller's stream. It may be called again, after an interrupt.

        Raises:
            torch.OutOfMemoryError: The batch does not fit.
        """
        backend = self.backend
        stream = backend.current_stream()
        if isinstance(staged, Uncopied):
            self._release()
            return self._copy(staged.batch, stream).batch
        backend.wait(stream, staged.done)
        for tensor in staged.tensors:
            backend.mark_used(tensor, stream)
        handed = self._handed
        while handed and handed[0].query():
            handed.popleft()
        handed.append(backend.record(stream))
        return staged.batch

    def close(self) -> None:
        """Wait until all copies have ended: their sources may then be unmapped."""
        if os.getpid() == self._owner:  # a forked process must not use the device
            while self._sources:
                self._done(self._sources[0]).synchronize()
                self._sources.popleft()

    def _copy(self, batch: Any, stream: Any) -> Copied:
        backend, made = self.backend, _Made(self.device)
        source = _Source(batch, stream)
        self._sources.append(source)  # before the first copy: an interrupt may come right after it
        copies: dict[int, torch.Tensor] = {}  # a tensor that comes twice is copied once

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                source.tensors.append(tensor)
                copies[id(tensor)] = made.note(backend.copy(tensor))
            return copies[id(tensor)]

        def moved(value: Any) -> Any:
            with made:
                return backend.move(value)

        with span("headrace: copy to the device"), backend.queue_on(stream):
            found = replaced(batch, Replacement(copied, moved))
        return Copied(found, made.tensors, self._done(source))

    def _can_be_marked(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Tell whether tensors can be marked as used, which is not so for sparse ones and others."""
        try:
            for tensor in tensors:
                self.backend.mark_used(tensor, self._stream)
        except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
            return False
        return True

    def _done(self, source: _Source) -> Event:
        """Return the event after a copy."""
        if source.done is None:
            source.done = self.backend.record(source.stream)
        return source.done

    def _release(self) -> None:
        """Drop sources whose copies have ended. They end in the order in which they were queued."""
        while self._sources and self._done(self._sources[0]).query():
            self._sources.popleft()


class _Made(TorchFunctionMode):
    """Notes the tensors on a device that are made in the block, whoever makes them.

    Args:
        device: The device.

    Attributes:
        tensors: The tensors.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.tensors: list[torch.Tensor] = []

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor; return it."""
        self.tensors.append(tensor)
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device == self._device:
            self.note(result)
        return result
