"""What runs in a Ray actor: a worker that answers over a socket where it shares the rank's host, else through Ray."""

import importlib
import os
import pickle
import platform
import socket
import struct
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import note
from headrace.executors.future import Failure
from headrace.executors.link.serving import Server, serve
from headrace.executors.link.wire import STAGES
from headrace.memory.pickling import Pickler, decode, dump, pickle_with, whole
from headrace.memory.slots import Ring, keep_freed_memory
from headrace.memory.unpicklable import unpicklable_part
from headrace.version import __version__
from headrace.worker.work import Work

HELLO = struct.Struct("<QQ")
"""The first message over each socket: whose it is, and whether it is for descriptors."""

LARGE_BYTES = 64 * 2**20
"""A dataset that takes this much, pickled, is warned about."""

PIECE_BYTES = 96 * 2**10
"""Ray sends results of up to 100 KiB along with the answer; larger ones go through the store, at twice the cost."""

_PICKLED_BYTES = 10
"""So much longer each part of a message gets when it is pickled."""

_REACH_S = 2.0
"""How long a rank on the same host may take to accept a connection: the kernel does that for it."""


class Setup(NamedTuple):
    """What an actor must know to become a worker, beside the work.

    Attributes:
        ident: What the rank calls it.
        worker: Which worker it is to be.
        workers: How many there are.
        threads: How many threads torch may use.
        versions: What the rank runs.
        address: The rank's socket, which only a process on the same host can reach; "" if there is none.
    """

    ident: int
    worker: int
    workers: int
    threads: int
    versions: dict[str, str]
    address: str


class Begun(NamedTuple):
    """What has become of an actor that was to be a worker.

    Attributes:
        pid: Its process.
        host: Its host's name.
        versions: What it runs.
        near: Whether it has connected to the rank's socket.
        failure: Why it is no worker, if the work could not be unpickled.
    """

    pid: int
    host: str
    versions: dict[str, str]
    near: bool = False
    failure: Failure | None = None


class Answers(NamedTuple):
    """What came of some tasks.

    Attributes:
        messages: For each the message of a `SlotWriter`, and the task's `STAGES`.
        slots: The slots that some of them refer to, in turn, shape (bytes,) each; none if they come in pieces.
        slot_sizes: How large they are, in bytes.
        task_s: What each took, on average, in seconds.
        apart: How many results beside this one have the messages that follow.
        received_s: What the rank has spent to receive them, in seconds; noted there.
    """

    messages: list[list[bytearray]]
    slots: list[NDArray[np.uint8]]
    slot_sizes: list[int]
    task_s: float
    apart: int = 0
    received_s: float = 0.0


def versions() -> dict[str, str]:
    """Return what must be equal on both sides for code to travel and bits to be equal."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "torch": torch.__version__.partition("+")[0], "headrace": __version__}


def by_value() -> type[Pickler]:
    """Return a pickler that takes by value what another process could not import: lambdas, classes of `__main__`.

    What comes back to the process whose class it is becomes that very class again.
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
    """Return the work as bytes that workers can be made of; warn if they are many.

    Raises:
        Exception: Whatever pickle raises for work that cannot be pickled, with a note that names the culprit.
    """
    kind = by_value()
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
        warnings.warn(
            f"the dataset takes {size / 2**20:,.0f} MiB when it is pickled, which every worker holds a copy of. "
            "headrace.Deferred(factory) builds it in each worker, and can read the worker's own disk or store.",
            stacklevel=8,
        )
    return [np.frombuffer(part, np.uint8) for part in parts]


def pieces_of(size: int) -> int:
    """Return into how many pieces so many bytes are cut."""
    return -(-size // PIECE_BYTES)


class Actor:
    """A process that can be made a worker, of one pool after another."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._ends: list[socket.socket] = []
        self._lent: list[int] = []
        self._ring: Ring | None = None

    def begin(self, setup: Setup, parts: Sequence[NDArray[np.uint8]]) -> Begun:
        """Become a worker.

        Args:
            setup: Which one.
            parts: The pickled work, shape (bytes,) each.
        """
        self._let_go()
        where = f"in DataLoader worker actor {setup.worker}"
        begun = Begun(os.getpid(), platform.node(), versions())
        if begun.versions != setup.versions:
            return begun
        pickle_with(by_value())
        keep_freed_memory()
        try:
            # Ray's memory is shared and not to be written to; the dataset's tensors are the worker's own.
            work = decode([parts[0].data, *(bytearray(part.data) for part in parts[1:])])
        except Exception as error:  # noqa: BLE001 - it is raised in the rank
            note(error, "while unpickling the dataset, collate_fn and worker_init_fn")
            if isinstance(error, ImportError):
                note(
                    error,
                    'workers must be able to import what the rank does: ray.init(runtime_env={"py_modules": [...]})',
                )
            return begun._replace(failure=Failure.of(error, where))
        self._ends = _reach(setup)
        self._ring = Ring(self._ends[1] if self._ends else None)
        self._server = Server(work, setup.worker, setup.workers, self._ring, where, setup.threads)
        return begun._replace(near=bool(self._ends))

    def serve(self) -> None:
        """Answer tasks over the socket until the rank hangs up."""
        assert self._server is not None
        assert self._ring is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            serve(self._ends[0], self._ring, self._server, lambda: True)
        self._let_go()

    def run(self, asked: bytes) -> Answers | bytes | list[Any]:
        """Answer tasks.

        Ray moves `bytes` as they are, and pickles all else in Python, at ten times the cost.

        Args:
            asked: Pickled: the tasks, each as it is sent with its number; and how many results to return beside the
                answers: pieces of the slots, or messages, if they hold them.
        """
        assert self._server is not None
        assert self._ring is not None
        while self._lent:  # Ray has copied what it was given
            self._ring.release(self._lent.pop())
        tasks, pieces = pickle.loads(asked)
        messages, slots, began_s = [], [], time.perf_counter()
        for sent, number in tasks:
            message = [*map(bytearray, self._server.answer_to(sent, number))]
            messages.append([*message, bytearray(STAGES.pack(*self._server.stage_s))])
            if self._server.writer.filled is not None:
                slot, used = self._server.writer.filled
                self._lent.append(slot)
                slots.append(np.frombuffer(self._ring.memory(slot)[:used], np.uint8))
        sizes = [slot.nbytes for slot in slots]
        answers = Answers(messages, slots, sizes, (time.perf_counter() - began_s) / len(tasks))
        first: Answers | bytes = answers
        apart: list[bytes] = []
        if slots and sum(map(pieces_of, sizes)) <= pieces:
            first = pickle.dumps(answers._replace(slots=[]), 5)
            cut = [piece for slot in slots for piece in np.array_split(slot, pieces_of(slot.nbytes))]
            apart = [piece.tobytes() for piece in cut]
        elif not slots:
            some, *others = _packed(messages, 1 + pieces)
            first = pickle.dumps(answers._replace(messages=some, apart=len(others)), 5)
            apart = [pickle.dumps(other, 5) for other in others]
        return [first, *apart, *[b""] * (pieces - len(apart))] if pieces else first

    def _let_go(self) -> None:
        for end in self._ends:
            end.close()
        self._ends, self._lent, self._server, self._ring = [], [], None, None


def _packed(messages: list[list[bytearray]], most: int) -> list[list[list[bytearray]]]:
    """Divide messages up so that each part is a piece; leave them together where that is not possible."""
    parts: list[list[list[bytearray]]] = []
    room = 0
    for message in messages:
        size = sum(map(len, message)) + _PICKLED_BYTES * (1 + len(message))
        if size > room:
            parts.append([])
            room = PIECE_BYTES
        parts[-1].append(message)
        room -= size
        if room < 0:  # it is no piece
            return [messages]
    return parts if len(parts) <= most else [messages]


def _reach(setup: Setup) -> list[socket.socket]:
    """Connect to the rank twice, for messages and for descriptors; return nothing where it is on another host."""
    ends: list[socket.socket] = []
    if setup.address:
        try:
            for which in range(2):
                ends.append(socket.socket(socket.AF_UNIX))
                ends[-1].settimeout(_REACH_S)
                ends[-1].connect(setup.address)
                ends[-1].sendall(HELLO.pack(setup.ident, which))
                ends[-1].settimeout(None)
        except OSError:
            while ends:
                ends.pop().close()
    return ends
