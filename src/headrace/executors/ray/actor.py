"""The worker in a Ray actor: it answers over a socket if it is on the rank's host, and otherwise through Ray."""

import gc
import importlib
import os
import pickle
import platform
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import note
from headrace.executors.future import Failure
from headrace.executors.link.serving import Server, serve
from headrace.executors.link.stacks import write_when_asked
from headrace.memory.pickling import Pickler, decode, dump, pickle_with, whole
from headrace.memory.slots import Ring, keep_freed_memory
from headrace.memory.unpicklable import unpicklable_part
from headrace.system.user_warnings import warn_user
from headrace.version import __version__
from headrace.worker.work import Work

HELLO = struct.Struct("<QQ")
"""The first message over each socket: the actor's ident, and 0 for the socket of messages or 1 for descriptors."""

LARGE_BYTES = 64 * 2**20
"""The size of a pickled dataset, in bytes, above which a warning is given."""

PIECE_BYTES = 96 * 2**10
"""The largest piece of a batch, in bytes. Ray sends a result of up to 100 KiB along with the answer; a larger one goes
through the store, at twice the cost."""

_PICKLED_BYTES = 10
"""The bytes that pickling adds to each part of a message."""

_CONNECT_TIMEOUT_S = 2.0
"""Time limit for a connection to a rank on the same host, in seconds. The kernel accepts it for the rank."""


class Setup(NamedTuple):
    """What an actor needs to become a worker, besides the work.

    Attributes:
        ident: The rank's number for this actor.
        worker: The number of the worker.
        workers: The number of workers.
        threads: The number of threads that torch may use.
        versions: The versions that the rank runs.
        address: The name of the rank's listener, which only processes on its host can reach; "" if there is none.
    """

    ident: int
    worker: int
    workers: int
    threads: int
    versions: dict[str, str]
    address: str


class SetupResult(NamedTuple):
    """An actor's answer when it was asked to become a worker.

    Attributes:
        pid: The actor's process.
        host: The name of its host.
        versions: The versions that it runs.
        connected: Whether it has connected to the rank's socket.
        failure: The exception if it could not unpickle the work.
    """

    pid: int
    host: str
    versions: dict[str, str]
    connected: bool = False
    failure: Failure | None = None


class Answers(NamedTuple):
    """The answers to some tasks.

    Attributes:
        messages: For each task the message of a `SlotWriter`, and the task's packed `StageTimes`.
        slots: The slots that the messages refer to, in turn, shape (bytes,) each; none if they come in pieces.
        slot_sizes: The sizes of these slots, in bytes.
        task_s: The average time of a task, in seconds.
        more_results: The number of further results of the call that hold the remaining messages.
        received_s: The time that the rank spent to receive them, in seconds; filled in there.
    """

    messages: list[list[bytearray]]
    slots: list[NDArray[np.uint8]]
    slot_sizes: list[int]
    task_s: float
    more_results: int = 0
    received_s: float = 0.0


def versions() -> dict[str, str]:
    """Return the versions that must be equal on both sides: otherwise neither code nor bits would be the same."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "torch": torch.__version__.partition("+")[0], "headrace": __version__}


def by_value_pickler() -> type[Pickler]:
    """Return a pickler that sends by value what another process cannot import: lambdas, classes of `__main__`.

    When such an object returns to its own process, it has its original class again.
    """
    cloudpickle = importlib.import_module("ray.cloudpickle")

    class ByValue(Pickler, cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, value: Any) -> Any:
            reduced = Pickler.reducer_override(self, value)
            if reduced is not NotImplemented:
                return reduced
            return cloudpickle.Pickler.reducer_override(self, value)

    return ByValue


def pickled(work: Work) -> list[NDArray[np.uint8]]:
    """Return the pickled work; warn if it is large.

    Raises:
        Exception: Whatever pickle raises for work that cannot be pickled, with a note that names the part.
    """
    kind = by_value_pickler()
    try:
        parts = [whole(part) for part in dump(work, shared=True, kind=kind)]
    except Exception as error:
        error.add_note(
            "headrace: the dataset, collate_fn and worker_init_fn must be picklable to travel to Ray's workers, "
            f"but {unpicklable_part(work, '', error, kind)}; leave it out in __getstate__, or have the dataset built "
            "there: headrace.Deferred(factory)"
        )
        raise
    size = sum(map(len, parts))
    if size >= LARGE_BYTES:
        warn_user(
            f"the dataset takes {size / 2**20:,.0f} MiB when it is pickled, and every worker holds a copy. "
            "headrace.Deferred(factory) builds it in each worker instead, from the worker's own disk or store.",
        )
    return [np.frombuffer(part, np.uint8) for part in parts]


def pieces_of(size: int) -> int:
    """Return the number of pieces that hold `size` bytes."""
    return -(-size // PIECE_BYTES)


class Actor:
    """A process that is a worker of one pool after another. Ray has it inside of the class of `actor_class`."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._ends: list[socket.socket] = []
        self._lent: list[int] = []
        self._ring: Ring | None = None

    def set_up(self, setup: Setup, parts: Sequence[NDArray[np.uint8]]) -> SetupResult:
        """Become a worker.

        Args:
            setup: Its number and its place in the pool.
            parts: The pickled work, shape (bytes,) each.
        """
        self._release()
        where = f"in DataLoader worker actor {setup.worker}"
        result = SetupResult(os.getpid(), platform.node(), versions())
        if result.versions != setup.versions:
            return result
        pickle_with(by_value_pickler())
        keep_freed_memory()
        try:
            # Ray's memory is shared and read-only. The dataset's tensors must belong to the worker.
            work = decode([parts[0].data, *(bytearray(part.data) for part in parts[1:])])
        except Exception as error:  # noqa: BLE001 - it is raised in the rank
            note(error, "while unpickling the dataset, collate_fn and worker_init_fn")
            if isinstance(error, ImportError):
                note(
                    error,
                    "workers must be able to import the same modules as the rank: "
                    'ray.init(runtime_env={"py_modules": [...]})',
                )
            return result._replace(failure=Failure.of(error, where))
        finally:
            gc.enable()  # it was disabled for the imports of a new process
        self._ends = _connect(setup)
        self._ring = Ring(self._ends[1] if self._ends else None)
        self._server = Server(work, setup.worker, setup.workers, self._ring, where, setup.threads)
        return result._replace(connected=bool(self._ends))

    def serve(self) -> None:
        """Answer tasks over the socket until the rank closes it."""
        write_when_asked()
        assert self._server is not None
        assert self._ring is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            serve(self._ends[0], self._ring, self._server, lambda: True)
        self._release()

    def run(self, request: bytes) -> Answers | bytes | list[Any]:
        """Answer tasks.

        Ray moves `bytes` as they are. It pickles everything else in Python, at ten times the cost.

        Args:
            request: Pickled: the tasks, each as it is sent and with its key; and the number of results to return
                besides the answers. These hold the pieces of the slots, or further messages.
        """
        assert self._server is not None
        assert self._ring is not None
        while self._lent:  # Ray has copied the slots of the last call
            self._ring.release(self._lent.pop())
        tasks, pieces = pickle.loads(request)
        messages, slots, began_s = [], [], time.perf_counter()
        for sent, number in tasks:
            message = [*map(bytearray, self._server.answer_to(sent, number))]
            messages.append([*message, bytearray(self._server.clock.packed())])
            if self._server.writer.filled is not None:
                slot, used = self._server.writer.filled
                self._lent.append(slot)
                slots.append(np.frombuffer(self._ring.memory(slot)[:used], np.uint8))
        sizes = [slot.nbytes for slot in slots]
        answers = Answers(messages, slots, sizes, (time.perf_counter() - began_s) / len(tasks))
        first: Answers | bytes = answers
        more_results: list[bytes] = []
        if slots and sum(map(pieces_of, sizes)) <= pieces:
            first = pickle.dumps(answers._replace(slots=[]), 5)
            cut = [piece for slot in slots for piece in np.array_split(slot, pieces_of(slot.nbytes))]
            more_results = [piece.tobytes() for piece in cut]
        elif not slots:
            some, *others = _divide(messages, 1 + pieces)
            first = pickle.dumps(answers._replace(messages=some, more_results=len(others)), 5)
            more_results = [pickle.dumps(other, 5) for other in others]
        return [first, *more_results, *[b""] * (pieces - len(more_results))] if pieces else first

    def _release(self) -> None:
        for end in self._ends:
            end.close()
        self._ends, self._lent, self._server, self._ring = [], [], None, None


def _divide(messages: list[list[bytearray]], most: int) -> list[list[list[bytearray]]]:
    """Divide messages into parts of at most one piece each, or return one part if that takes more than `most` parts."""
    parts: list[list[list[bytearray]]] = []
    room = 0
    for message in messages:
        size = sum(map(len, message)) + _PICKLED_BYTES * (1 + len(message))
        if size > room:
            parts.append([])
            room = PIECE_BYTES
        parts[-1].append(message)
        room -= size
        if room < 0:  # this message alone is larger than a piece
            return [messages]
    return parts if len(parts) <= most else [messages]


def _connect(setup: Setup) -> list[socket.socket]:
    """Connect to the rank twice, for messages and for descriptors; return no sockets if it is on another host."""
    ends: list[socket.socket] = []
    if setup.address:
        try:
            for which in range(2):
                ends.append(socket.socket(socket.AF_UNIX))
                ends[-1].settimeout(_CONNECT_TIMEOUT_S)
                ends[-1].connect(setup.address)
                ends[-1].sendall(HELLO.pack(setup.ident, which))
                ends[-1].settimeout(None)
        except OSError:
            while ends:
                ends.pop().close()
    return ends
