"""The accelerators that batches are copied to: streams, events, copies, and pinned memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch

from headrace.memory.pinned import CudaRegistrar, Registrar

_STAGED_BY_DRIVER = 65_536
"""A copy of up to so many bytes from memory that is not pinned does not wait for the device: the driver stages it."""


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Tell whether the work before it is done."""

    def synchronize(self) -> None:
        """Wait until the work before it is done."""


class Backend(Protocol):
    """What copying batches needs of an accelerator. Streams are opaque values."""

    def copy_stream(self) -> Any:
        """Return the stream for copies beside computation; None where the accelerator has only one stream."""

    def current_stream(self) -> Any:
        """Return the stream on which the caller's work is queued."""

    def queue_on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a block in which work is queued on a stream."""

    def record(self, stream: Any) -> Event:
        """Return an event after all work that is queued on a stream now."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let the work that is queued on a stream later begin after an event; the caller does not wait."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a tensor to the device, on the stream of the block; return the tensor there.

        The source must stay unchanged until the copy has ended.
        """

    def move(self, value: Any) -> Any:
        """Queue the copies of an object with a method `to`, on the stream of the block; return the object there."""

    def mark_used(self, tensor: torch.Tensor, stream: Any) -> None:
        """Note that work on another stream uses a tensor: its memory is reused after that work.

        Raises:
            NotImplementedError: The tensor is of a kind for which that cannot be noted.
        """

    def is_capturing(self) -> bool:
        """Tell whether the caller captures a graph, in which no other work may be queued."""

    def registrar(self) -> Registrar | None:
        """Return the driver's calls that pin existing memory; None where there are none."""


class TorchBackend:
    """An accelerator that torch knows, with streams and pinned memory.

    Args:
        device: With its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy_stream(self) -> Any:
        """Return the stream for copies."""
        return _copy_stream(self._device)

    def current_stream(self) -> Any:
        """Return the caller's stream."""
        return torch.accelerator.current_stream(self._device)

    def queue_on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a block in which work is queued on a stream."""
        block: AbstractContextManager[Any] = stream
        return block

    def record(self, stream: Any) -> Event:
        """Return an event after all work that is queued on a stream now."""
        event: Event = stream.record_event()
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Let a stream wait for an event."""
        stream.wait_event(event)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a tensor, from pinned memory if it is large."""
        if tensor.device.type != "cpu":
            if tensor.device != self._device:  # its contents may still be computed
                self.wait(self.current_stream(), self.record(torch.accelerator.current_stream(tensor.device)))
        elif tensor.layout is torch.strided and tensor.nbytes > _STAGED_BY_DRIVER and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def move(self, value: Any) -> Any:
        """Queue the copies of an object with a method `to`, from pinned memory if it has a method `pin_memory`."""
        pin = getattr(value, "pin_memory", None)
        if callable(pin):
            value = pin()
        try:
            return value.to(self._device, non_blocking=True)
        except TypeError:  # its `to` knows no such argument
            return value.to(self._device)

    def mark_used(self, tensor: torch.Tensor, stream: Any) -> None:
        """Note that work on another stream uses a tensor.

        Raises:
            NotImplementedError: The tensor is of a kind for which that cannot be noted.
        """
        tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        """Tell whether the caller captures a graph."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def registrar(self) -> Registrar | None:
        """Return CUDA's or ROCm's calls; None for other accelerators."""
        return CudaRegistrar(self._device.index) if self._device.type == "cuda" else None


@cache
def _copy_stream(device: torch.device) -> Any:
    """Return one stream for each device: memory that was allocated for one stream is not reused for another."""
    return torch.Stream(device)


class OneStreamBackend:
    """An accelerator with one stream and without pinned memory, such as Apple's. The caller waits for each copy.

    Args:
        device: With its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy_stream(self) -> None:
        """Return no stream."""

    def current_stream(self) -> None:
        """Return no stream."""

    def queue_on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a block in which nothing is different."""
        return nullcontext()

    def record(self, stream: Any) -> Event:
        """Return an event that has happened."""
        return _HAPPENED

    def wait(self, stream: Any, event: Any) -> None:
        """Do nothing: nobody has to wait."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor."""
        return tensor.to(self._device)

    def move(self, value: Any) -> Any:
        """Copy an object with a method `to`."""
        return value.to(self._device)

    def mark_used(self, tensor: torch.Tensor, stream: Any) -> None:
        """Do nothing: all work is on one stream."""

    def is_capturing(self) -> bool:
        """Return False."""
        return False

    def registrar(self) -> None:
        """Return None."""


class _Happened:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing."""


_HAPPENED = _Happened()


def _none(_: torch.device) -> None:
    """Return no backend: batches are where they should be."""


BACKENDS: dict[str, Callable[[torch.device], Backend | None]] = {"cpu": _none, "mps": OneStreamBackend}
"""How to make the backends of devices other than `TorchBackend`'s, by the device's type."""


def backend_of(device: torch.device) -> Backend | None:
    """Return the backend of a device; None for the CPU."""
    return BACKENDS.get(device.type, TorchBackend)(device)


def with_index(device: torch.device) -> torch.device:
    """Return a device with its index: without one, it is the current device of its type."""
    index: int | None = device.index
    if index is not None or device.type == "cpu":
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
