"""What happens in other threads, told to the rank's: Ray's calls that are answered, and batches that are copied."""

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
from headrace.memory.slots import Shelf

_THERE_S = 1.0
"""How long what has come may take to be found: where it was too large after all, it may be lost with its host."""

_MOMENT_S = 1.0
"""How long a pool that closes waits for what is being copied."""


class Event(NamedTuple):
    """What has happened.

    Attributes:
        what: What it is about, as whoever asked for it called it.
        outcome: What came of it.
        error: Why nothing came of it.
        received_s: What the rank spent to receive the outcome, in seconds.
    """

    what: Any
    outcome: Any
    error: BaseException | None
    received_s: float = 0.0


class Bell:
    """Wakes a selector when something has happened in another thread.

    Attributes:
        end: What the selector is to watch.
    """

    def __init__(self) -> None:
        self.end, self._rope = socket.socketpair()
        self.end.setblocking(False)
        self._rope.setblocking(False)
        self._events: deque[Event] = deque()

    def tell_of(self, call: Any, what: Any) -> None:
        """Ring when a Ray call is answered, or failed."""
        call.future().add_done_callback(partial(self._answered, what))

    def _answered(self, what: Any, done: Any) -> None:
        error = done.exception()
        self.ring(Event(what, None if error is not None else done.result(), error))

    def ring(self, event: Event) -> None:
        """Tell of an event, from any thread."""
        self._events.append(event)
        with suppress(OSError):  # nobody listens any more; or so many have rung that one more says nothing new
            self._rope.send(b"\0")

    def heard(self) -> list[Event]:
        """Return what has happened since this was asked before."""
        with suppress(BlockingIOError):
            while len(self.end.recv(4096)) == 4096:
                pass
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Fall silent."""
        self.end.close()
        self._rope.close()
        self._events.clear()


class Copier:
    """Copies what came through Ray into memory of the rank's own, in a thread beside the rank's.

    Args:
        ray: The module, connected.
        bell: Rung for each batch, its outcome the memory of each slot.
        shelf: Where the memory comes from.
    """

    def __init__(self, ray: Any, bell: Bell, shelf: Shelf) -> None:
        self._ray = ray
        self._jobs: queue.SimpleQueue[tuple[Any, Any, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_copy, args=(ray, self._jobs, bell, shelf), name="headrace-ray-copy", daemon=True
        )

    def copy(self, answers: Answers, calls: Sequence[Any], what: Any) -> None:
        """Copy slots, or the pieces of them that have come along; and let go of the references to all of it."""
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put((answers, calls, what))

    def found(self, calls: Sequence[Any]) -> Sequence[Any]:
        """Return at once what has come along with an answer."""
        return _found(self._ray, calls)

    def close(self) -> None:
        """Wait for a moment until the thread has done what it is at: coming to Ray too late ends the process."""
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_MOMENT_S)


def _copy(ray: Any, jobs: "queue.SimpleQueue[tuple[Any, Any, Any] | None]", bell: Bell, shelf: Shelf) -> None:
    while (job := jobs.get()) is not None:
        answers, calls, what = job
        began_s = time.perf_counter() - answers.received_s
        try:
            event = Event(what, _copied(ray, answers, calls, shelf), None, time.perf_counter() - began_s)
        except Exception as error:  # noqa: BLE001 - it is dealt with in the rank
            event = Event(what, None, error)
        bell.ring(event)
        del job, answers, calls, what, event  # here, since for Ray to forget an object takes longer than a copy


def _found(ray: Any, calls: Sequence[Any]) -> Sequence[Any]:
    found: Sequence[Any] = ray.get(list(calls), timeout=_THERE_S)
    return found


def _copied(ray: Any, answers: Answers, calls: Sequence[Any], shelf: Shelf) -> list[memoryview]:
    """Return a copy of each slot."""
    whole = [[slot] for slot in answers.slots]
    if not whole:
        counts = [*map(pieces_of, answers.slot_sizes)]
        found = (np.frombuffer(piece, np.uint8) for piece in _found(ray, calls[1 : 1 + sum(counts)]))
        whole = [[*islice(found, count)] for count in counts]
    memories = [shelf.take(sum(piece.nbytes for piece in pieces)) for pieces in whole]
    for memory, pieces in zip(memories, whole, strict=True):
        np.concatenate(pieces, out=np.frombuffer(memory, np.uint8))
    return memories


class Landed:
    """The memory that batches refer to which came through Ray: they have one slot each, in turn."""

    def __init__(self, memories: Any) -> None:
        self._memories = memories

    def borrow(self, slot: int) -> memoryview:
        """Return the next piece."""
        memory: memoryview = next(self._memories)
        return memory

    def forget(self, slot: int) -> None:
        """Do nothing: what the worker gives up is nowhere but there."""
