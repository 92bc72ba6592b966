"""Accelerators without hardware, in the place of the CPU: one that copies on a thread, and one that is simulated."""

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headrace.delivery.device.backends import _HAPPENED
from waiting import LIMIT_S


class _Copy:
    """The copy of one tensor's bytes. Nothing in it keeps the source alive."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.size, self.source, self.target = source.nbytes, source.data_ptr(), target

    def __call__(self) -> None:
        ctypes.memmove(self.target.data_ptr(), self.source, self.size)


class ThreadStream:
    """A queue of copies that a thread makes in order, each as late as it may: a source that goes too early shows."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[_Copy] = deque()
        self._queued = self._allowed = self._done = 0
        threading.Thread(target=self._serve, name="fake-accelerator", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._done < self._allowed)
                copy = self._queue.popleft()
            copy()
            del copy
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    def add(self, copy: _Copy) -> None:
        with self._changed:
            self._queue.append(copy)
            self._queued += 1

    def record(self) -> "ThreadEvent":
        return ThreadEvent(self, self._queued)

    def allow(self, number: int) -> None:
        with self._changed:
            self._allowed = max(self._allowed, number)
            self._changed.notify_all()

    def wait_for(self, number: int) -> None:
        self.allow(number)
        with self._changed:
            assert self._changed.wait_for(lambda: self._done >= number, LIMIT_S)

    def has_done(self, number: int) -> bool:
        return self._done >= number


class ThreadEvent:
    """A place in a stream. Whoever asks twice whether it is reached lets the thread go on."""

    def __init__(self, stream: ThreadStream, number: int) -> None:
        self._stream, self._number, self._asked = stream, number, 0

    def query(self) -> bool:
        self._asked += 1
        if self._asked > 2:
            self._stream.allow(self._number)
        return self._stream.has_done(self._number)

    def synchronize(self) -> None:
        self._stream.wait_for(self._number)


class Locks:
    """A driver's calls that pin memory, noted."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.registered = 0

    def register(self, address: int, size: int) -> None:
        assert address not in self.held
        ctypes.string_at(address, size)  # it is mapped
        self.held[address] = size
        self.registered += 1

    def unregister(self, address: int) -> None:
        ctypes.string_at(address, self.held.pop(address))  # it still is


class ThreadBackend:
    """An accelerator whose memory is the host's, and whose copies are made by a thread.

    Args:
        device: Ignored.

    Attributes:
        copies: How many tensors were copied.
    """

    stream: ThreadStream | None = None  # of all, as each device has one
    locks = Locks()

    def __init__(self, device: torch.device) -> None:
        self.copies = 0
        self._current: Any = None

    def copy_stream(self) -> ThreadStream:
        ThreadBackend.stream = ThreadBackend.stream or ThreadStream()
        return ThreadBackend.stream

    def current_stream(self) -> None:
        """The caller's own thread is the stream: there what waits has to wait."""

    @contextmanager
    def queue_on(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record(self, stream: ThreadStream | None) -> Any:
        return _HAPPENED if stream is None else stream.record()

    def wait(self, stream: None, event: ThreadEvent) -> None:
        event.synchronize()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.copies += 1
        plain = tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.requires_grad
        if self._current is None or not plain or not tensor.nbytes:
            return tensor.clone()
        target = torch.empty_like(tensor)
        self.copy_stream().add(_Copy(tensor, target))
        return target

    def move(self, value: Any) -> Any:
        return value.to("cpu")

    def mark_used(self, tensor: torch.Tensor, stream: None) -> None:
        if tensor.layout is not torch.strided:
            raise NotImplementedError("as on a GPU")

    def is_capturing(self) -> bool:
        return False

    def registrar(self) -> Locks:
        return self.locks


@dataclass(eq=False)
class SimulatedEvent:
    """A point in the work of a simulated stream."""

    device: "SimulatedDevice"
    done: bool = False

    def query(self) -> bool:
        self.device.advance()
        return self.done

    def synchronize(self) -> None:
        self.device.advance(until=self)


@dataclass(eq=False)
class Block:
    """Memory of the simulated device, as its allocator knows it.

    Attributes:
        memory: Its contents: one number.
        stream: The stream that it was allocated on.
        used_on: Other streams with work on it.
    """

    memory: np.ndarray
    stream: str
    used_on: set[str] = field(default_factory=set)


class SimulatedDevice:
    """Two streams whose work is done in a random order that their rules allow, and a caching allocator as torch's.

    Memory goes back to its stream's list when its tensor dies, and is given out again at once. Only if it was marked as
    used on another stream, that stream's work so far must be done before.

    Args:
        seed: Decides on the order.

    Attributes:
        wrong: What went wrong: work that found other contents than it was queued for.
        blocks: How many blocks of memory were made.
    """

    def __init__(self, seed: int) -> None:
        self.wrong: list[str] = []
        self.blocks = 0
        self._draw = random.Random(seed)
        self._queues: dict[str, deque[Any]] = {"copies": deque(), "main": deque()}
        self._free: dict[str, list[Block]] = {"copies": [], "main": []}
        self._pending: list[tuple[Block, list[SimulatedEvent]]] = []
        self._current = "main"

    # What a test does.

    def kernel(self, tensor: torch.Tensor, expected: int) -> None:
        """Queue work on the main stream that reads a tensor."""
        memory = tensor.numpy()
        self._queues["main"].append(("reads", memory, expected))
        self.advance()

    def finish(self) -> None:
        """Do all work that is queued."""
        while any(self._queues.values()):
            self._do_some()

    def advance(self, until: SimulatedEvent | None = None) -> None:
        """Do some of the work that is queued."""
        for _ in range(self._draw.choice((0, 0, 1, 2, 4))):
            self._do_some()
        self.work(until)

    def work(self, until: SimulatedEvent | None) -> None:
        """Do the work that is queued until an event has happened; nothing without one."""
        while until is not None and not until.done:
            self._do_some()

    def _do_some(self) -> None:
        ready = [
            queue for queue in self._queues.values() if queue and not (queue[0][0] == "waits" and not queue[0][1].done)
        ]
        if not ready:
            assert not any(self._queues.values()), "all streams wait for each other"
            return
        what, *about = self._draw.choice(ready).popleft()
        if what == "records":
            about[0].done = True
        elif what == "reads" and int(about[0][0]) != about[1]:
            self.wrong.append(f"work on batch {about[1]} found {int(about[0][0])}")
        elif what == "copies":
            source, target, expected = about
            if int(source[0]) != expected:
                self.wrong.append(f"the source of batch {expected} was filled with {int(source[0])} before its copy")
            target[:] = source

    # What a backend does.

    def copy_stream(self) -> str:
        return "copies"

    def current_stream(self) -> str:
        return "main"

    @contextmanager
    def queue_on(self, stream: str) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record(self, stream: str) -> SimulatedEvent:
        event = SimulatedEvent(self)
        self._queues[stream].append(("records", event))
        return event

    def wait(self, stream: str, event: SimulatedEvent) -> None:
        self._queues[stream].append(("waits", event))
        self.advance()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        block = self._allocate(self._current)
        source = np.frombuffer((ctypes.c_int64 * 1).from_address(tensor.data_ptr()), np.int64)  # keeps nothing alive
        self._queues[self._current].append(("copies", source, block.memory, int(source[0])))
        self.advance()
        found = torch.from_numpy(block.memory)
        weakref.finalize(found, self._freed, block).atexit = False
        return found

    def move(self, value: Any) -> Any:
        return value.to("cpu")

    def mark_used(self, tensor: torch.Tensor, stream: str) -> None:
        block = next(block for block in self._all if block.memory.ctypes.data == tensor.data_ptr())
        if stream != block.stream:
            block.used_on.add(stream)

    def is_capturing(self) -> bool:
        return False

    def registrar(self) -> None:
        return None

    _all: "weakref.WeakSet[Block]"

    def _allocate(self, stream: str) -> Block:
        for block, events in list(self._pending):
            if all(event.done for event in events):
                self._pending.remove((block, events))
                self._free[block.stream].append(block)
        if self._free[stream]:
            return self._free[stream].pop()
        self.blocks += 1
        block = Block(np.zeros(1, np.int64), stream)
        self.__dict__.setdefault("_all", weakref.WeakSet()).add(block)
        return block

    def _freed(self, block: Block) -> None:
        used, block.used_on = block.used_on, set()
        if used:
            self._pending.append((block, [self.record(stream) for stream in used]))
        else:
            self._free[block.stream].append(block)


class HostSlots:
    """Host memory for batches that is filled again as soon as the last tensor over it dies.

    Args:
        count: How many batches there are; batch n holds the number n.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._slots: list[np.ndarray] = []

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self._count):
            slot = self._slots.pop() if self._slots else np.zeros(1, np.int64)
            slot[0] = number
            tensor = torch.from_numpy(slot)
            weakref.finalize(tensor, self._emptied, slot).atexit = False
            batch = {"data": [tensor], "number": number}
            del tensor
            yield batch
            del batch

    def _emptied(self, slot: np.ndarray) -> None:
        slot[0] = -1  # another batch is written there
        self._slots.append(slot)


def making(backend: Any) -> Callable[[torch.device], Any]:
    """Return a function that returns the backend, whatever the device."""
    return lambda device: backend
