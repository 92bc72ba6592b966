"""What happens in Ray's threads, told to the rank's: calls that are answered, and batches fetched from other hosts."""

import queue
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from headrace.memory.slots import Shelf

_LOOK_S = 0.02
"""How often new fetches are looked for while one waits for an object that does not come."""


class Event(NamedTuple):
    """What has happened.

    Attributes:
        what: What it is about, as whoever asked for it called it.
        outcome: What came of it.
        error: Why nothing came of it.
    """

    what: Any
    outcome: Any
    error: BaseException | None


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


class Fetcher:
    """Copies objects from Ray's store into memory of the rank's own, in a thread beside the rank's.

    Args:
        ray: The module, connected.
        bell: Rung for each, its outcome the memory of each array.
        shelf: Where the memory comes from.
    """

    def __init__(self, ray: Any, bell: Bell, shelf: Shelf) -> None:
        self._jobs: queue.SimpleQueue[tuple[Any, Any] | None] = queue.SimpleQueue()
        self._start: threading.Thread | None = threading.Thread(
            target=_fetch, args=(ray, self._jobs, bell, shelf), name="headrace-ray-fetch", daemon=True
        )

    def fetch(self, slots: Any, what: Any) -> None:
        """Fetch an object that is, or will be, a list of arrays of bytes."""
        if self._start is not None:
            self._start.start()
            self._start = None
        self._jobs.put((slots, what))

    def close(self) -> None:
        """Let the thread end when it has done what it is at."""
        self._jobs.put(None)


def _fetch(ray: Any, jobs: "queue.SimpleQueue[tuple[Any, Any] | None]", bell: Bell, shelf: Shelf) -> None:
    waiting: dict[Any, Any] = {}
    job: Any
    there: Any
    reference: Any
    while True:
        if not waiting or not jobs.empty():
            job = jobs.get()
            if job is None:
                return
            waiting[job[0]] = job[1]
            continue
        # An object that was lost with its host must not keep the others waiting.
        try:
            there, _ = ray.wait(list(waiting), num_returns=1, timeout=_LOOK_S)
        except Exception as error:  # noqa: BLE001 - Ray was shut down
            while waiting:
                bell.ring(Event(waiting.popitem()[1], None, error))
            continue
        for reference in there:
            what = waiting.pop(reference)
            try:
                memories = _copied(ray.get(reference), shelf)
            except Exception as error:  # noqa: BLE001 - it is dealt with in the rank
                bell.ring(Event(what, None, error))
            else:
                bell.ring(Event(what, memories, None))
                del memories
        job = there = reference = what = None  # or this thread would keep the last batch


def _copied(arrays: Sequence[Any], shelf: Shelf) -> list[memoryview]:
    memories = []
    for array in arrays:
        memories.append(shelf.take(array.nbytes))
        np.copyto(np.frombuffer(memories[-1], np.uint8), array)
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
