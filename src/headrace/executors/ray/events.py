"""Events from other threads for the rank's thread: answered Ray calls, and batches that were copied."""

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from headrace.executors.ray.actor import Answers, pieces_of
from headrace.memory.slots import BufferPool

_GET_TIMEOUT_S = 1.0
"""Time limit for getting a result that has arrived, in seconds: it may be lost along with its host."""

_CLOSE_TIMEOUT_S = 1.0
"""Time limit for the copying thread to finish when the pool closes, in seconds."""


class Event(NamedTuple):
    """Something that has happened.

    Attributes:
        label: The label that was given to `watch` or `copy`.
        outcome: The result.
        error: The exception if there is no outcome, or None.
        received_s: The time that the rank spent to receive the outcome, in seconds.
    """

    label: Any
    outcome: Any
    error: BaseException | None
    received_s: float = 0.0


class EventQueue:
    """A queue of events that wakes a selector.

    Attributes:
        end: The socket that the selector watches.
    """

    def __init__(self) -> None:
        self.end, self._waker = socket.socketpair()
        self.end.setblocking(False)
        self._waker.setblocking(False)
        self._events: deque[Event] = deque()

    def watch(self, call: Any, label: Any) -> None:
        """Put an event when a Ray call is answered or has failed."""
        call.future().add_done_callback(partial(self._put_answer, label))

    def _put_answer(self, label: Any, done: Any) -> None:
        error = done.exception()
        self.put(Event(label, None if error is not None else done.result(), error))

    def put(self, event: Event) -> None:
        """Add an event, from any thread."""
        self._events.append(event)
        with suppress(OSError):  # the queue is closed, or the socket is full and has woken the selector
            self._waker.send(b"\0")

    def drain(self) -> list[Event]:
        """Return and remove all events."""
        with suppress(BlockingIOError):
            while len(self.end.recv(4096)) == 4096:
                pass
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Drop all events; later ones are not announced."""
        self.end.close()
        self._waker.close()
        self._events.clear()


class Copier:
    """A thread that copies batches from Ray's store into the rank's own memory.

    Args:
        ray: The module, connected.
        events: Gets an event for each batch; its outcome is the memory of each slot.
        buffers: Supplies the memory.
    """

    def __init__(self, ray: Any, events: EventQueue, buffers: BufferPool) -> None:
        self._ray = ray
        self._jobs: queue.SimpleQueue[tuple[Any, Any, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_copy, args=(ray, self._jobs, events, buffers), name="headrace-ray-copy", daemon=True
        )

    def copy(self, answers: Answers, calls: Sequence[Any], label: Any) -> None:
        """Copy slots, or the pieces of slots that arrived with the answer, and drop all references to them."""
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put((answers, calls, label))

    def get_arrived(self, calls: Sequence[Any]) -> Sequence[Any]:
        """Return results that arrived with an answer, without waiting."""
        return _get(self._ray, calls)

    def close(self) -> None:
        """End the thread, and wait until it has made the copy that it is making.

        If it called Ray after Ray's shutdown, Ray would end the process.
        """
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)


def _copy(
    ray: Any, jobs: "queue.SimpleQueue[tuple[Any, Any, Any] | None]", events: EventQueue, buffers: BufferPool
) -> None:
    while (job := jobs.get()) is not None:
        answers, calls, label = job
        began_s = time.perf_counter() - answers.received_s
        try:
            event = Event(label, _copied(ray, answers, calls, buffers), None, time.perf_counter() - began_s)
        except Exception as error:  # noqa: BLE001 - the rank handles it
            event = Event(label, None, error)
        events.put(event)
        del job, answers, calls, label, event  # in this thread: Ray takes longer to free an object than to copy it


def _get(ray: Any, calls: Sequence[Any]) -> Sequence[Any]:
    results: Sequence[Any] = ray.get(list(calls), timeout=_GET_TIMEOUT_S)
    return results


def _copied(ray: Any, answers: Answers, calls: Sequence[Any], buffers: BufferPool) -> list[memoryview]:
    """Copy each slot into a buffer of the rank's."""
    whole = [[slot] for slot in answers.slots]
    if not whole:
        counts = [*map(pieces_of, answers.slot_sizes)]
        arrived = (np.frombuffer(piece, np.uint8) for piece in _get(ray, calls[1 : 1 + sum(counts)]))
        whole = [[*islice(arrived, count)] for count in counts]
    memories = [buffers.take(sum(piece.nbytes for piece in pieces)) for pieces in whole]
    for memory, pieces in zip(memories, whole, strict=True):
        np.concatenate(pieces, out=np.frombuffer(memory, np.uint8))
    return memories


class CopiedSlots:
    """The copied slots of the batches of one answer, one slot for each batch, in turn."""

    def __init__(self, memories: Any) -> None:
        self._memories = memories

    def borrow(self, slot: int) -> memoryview:
        """Return the memory of the next batch."""
        memory: memoryview = next(self._memories)
        return memory

    def forget(self, slot: int) -> None:
        """Do nothing: the rank holds no slots of these workers."""
