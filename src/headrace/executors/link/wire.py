"""The rank's end of a socket to a worker on this machine: frames both ways, and slots that come as descriptors."""

import os
import pickle
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import cast

import numpy as np

from headrace.errors import SlotTooLarge
from headrace.executors.base import Future
from headrace.memory.codec import Slots, lift
from headrace.memory.pickling import Buffer, Pickler, decode, encode
from headrace.memory.slots import Loans
from headrace.types import IndexTask, PlanTask, Task

LIVENESS_S = 1
"""How often either side looks whether the other still lives, should the closed socket not tell."""

MOST_DEATHS = 5
"""How many workers may die at one task before it is to blame.

Whoever kills workers at random hits some task each time, and the same one again only by chance: it goes to a worker
that is up, and can be hit while it is the one computed. Where that takes 5 ms, and each of two workers is killed five
times a second, the chance is one in forty for each further time, and below one in a million for four of them.
"""

MOST_FALSE_STARTS = 10
"""How many workers may die one after another before they are set up, at one place, before the pool gives up.

No task is to blame for those. More are allowed, since to start takes longer than a task, so that kills at random hit it
more often: at 20 ms and five kills a second one in ten, and all ten in a row hardly ever.
"""

_MOST_PARTS = 2**16
"""A frame has fewer parts: they take a byte each in a stream of `INLINE_BYTES`, or are `INLINE_PARTS`."""

_MARK = 0x68_65_61_64_72_61 * _MOST_PARTS
"""What the first word of every frame is, but for the number of its parts: what is no frame is found out."""

_WORD = struct.Struct("<Q")

_HEAD = struct.Struct("<2Q")
"""What every frame begins with: mark and number of parts, and how many bytes they have together. Their lengths follow.
"""

_ONE_PART = struct.Struct("<3Q")
"""What `frame` puts before a part that is alone."""

Sent = tuple[int, ...] | int | list[int] | list[bytearray]
"""A task on its way: what a `PlanTask` consists of; the index or indices of an `IndexTask`; or anything, pickled."""

Order = tuple[list[tuple[Sent, int | None]], list[int], list[int]]
"""What a worker is sent: tasks, to be answered together, each with its number where its random numbers hang on it; and
as `Loan` the slots that come back, and those that it is to forget."""

Loan = tuple[list[int], list[int]]
"""The slots that go back to a worker, and those that it is to forget."""

TAIL = struct.Struct("<d2Q")
"""The last part of an answer: what the task took the worker, in seconds, since the rank may hear late; how many answers
it has given, this one included; and which process it is."""

EMPTY_FRAME = _HEAD.pack(_MARK, 0)
"""A frame without parts: a word from a worker that is no answer."""

JOINED_BYTES = 2**16
"""Messages up to this size are sent in one piece."""

_SPARE_AFTER = 64
"""After how many tasks slots are dropped that none of them needed: they were for batches that the user held."""

_rank_ends: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""The rank's ends of all sockets: a forked process must not hold on to them, or no worker would see its rank die."""


def _close_rank_ends() -> None:
    for end in list(_rank_ends):
        end.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_rank_ends)


class Assigned(Future):
    """The future of a task that a worker was given.

    Attributes:
        task: What it is.
        sent: The task as it is sent.
        number: How many tasks were submitted before it.
        key: What its random numbers hang on: its number, or None.
        deaths: How many workers died while it was the one that they were at.
    """

    __slots__ = ("deaths", "key", "number", "sent", "task")

    def __init__(self, task: Task, number: int, kind: type[Pickler] | None = None, key: int | None = None) -> None:
        super().__init__(-1)
        self.task = task
        self.sent = _to_send(task, kind)  # raises where it cannot be pickled, before a worker is said to have it
        self.number = number
        self.key = key
        self.deaths = 0

    def land(self, message: Sequence[Buffer], slots: Slots) -> None:
        """Fill in what a `SlotWriter` wrote, unless another worker was faster: then what was lent is given back."""
        try:
            lifted = lift(message, slots)
            if not self.done():
                self.size_bytes = sum(map(len, lifted))
                self.resolve_later(partial(decode, lifted))
        except SlotTooLarge as error:
            if not self.done():
                self.fail(error)


def _to_send(task: Task, kind: type[Pickler] | None) -> Sent:
    if type(task) is PlanTask:
        return tuple(task)
    if type(task) is IndexTask:
        index = task.index
        if type(index) is int:
            return index
        if type(index) is list and {*map(type, index)} == {int}:
            return [*index]  # the user's sampler may go on with its list
    return [*map(bytearray, encode(task, kind))]


def task_of(sent: Sent) -> Task:
    """Return the task that was sent.

    Raises:
        Exception: Whatever pickle raises.
    """
    if isinstance(sent, tuple):
        return PlanTask(*sent)
    plain = isinstance(sent, int) or isinstance(sent[0], int)
    return IndexTask(sent) if plain else decode(cast(list[bytearray], sent))


class Wire:
    """The rank's two sockets to one worker: for messages, and for descriptors of slots.

    Args:
        end: For messages.
        descriptors: For slots.
        heard: Called with the parts of each message.

    Attributes:
        loans: The worker's slots.
        outbox: What the socket did not take yet.
        garbled: Why what the worker sent is no answer; "" while it is.
    """

    def __init__(
        self, end: socket.socket, descriptors: socket.socket, heard: Callable[[list[bytearray]], None]
    ) -> None:
        end.setblocking(False)
        _rank_ends.update((end, descriptors))
        self.end = end
        self.descriptors = descriptors
        self.loans = Loans(descriptors)
        self.outbox: deque[memoryview] = deque()
        self.garbled = ""
        self._answers = 0
        self._frames = read_frames(heard)
        self._wanted = next(self._frames)

    @property
    def open(self) -> bool:
        """Whether nobody has hung up."""
        return self.end.fileno() >= 0

    def hand(self, futures: Sequence[Assigned], slots: Loan) -> None:
        """Send tasks, to be answered together, and slots from a `Lender`."""
        order: Order = ([(future.sent, future.key) for future in futures], *slots)
        pickled = pickle.dumps(order, 5)
        self.outbox.append(memoryview(_ONE_PART.pack(_MARK + 1, len(pickled), len(pickled)) + pickled))
        self.send()

    def send(self) -> None:
        """Send as much of the outbox as the socket takes now: the rank never blocks on a busy worker."""
        if len(self.outbox) > 1 and sum(map(len, self.outbox)) <= JOINED_BYTES:
            self.outbox = deque([memoryview(b"".join(self.outbox))])
        while self.outbox:
            try:
                sent = self.end.send(self.outbox[0])
            except BlockingIOError:
                return
            except OSError:  # the worker is gone; reading finds that out, and what it had sent before
                self.outbox.clear()
                return
            if sent == len(self.outbox[0]):
                self.outbox.popleft()
            else:
                self.outbox[0] = self.outbox[0][sent:]

    def receive(self) -> bool:
        """Read what has arrived; return False when the worker has closed its end, or sent what is no answer."""
        while True:
            try:
                count = self.end.recv_into(self._wanted)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not count:
                return False
            full = count == len(self._wanted)
            try:
                # An interrupt in here would tear the stream; the generator then ends, and the worker counts as lost.
                self._wanted = self._frames.send(count)
            except StopIteration:
                return False
            except Exception as error:  # noqa: BLE001 - there is no end to what can be wrong with it
                self.garbled = str(error) if type(error) is ValueError else repr(error)
                return False
            if not full:  # there was no more
                return True

    def check(self, parts: list[bytearray], pid: int | None) -> float:
        """Take the `TAIL` off an answer; return how long the task took, in seconds.

        Args:
            parts: The answer.
            pid: The worker's process.

        Raises:
            ValueError: It is not the worker's next answer.
        """
        task_s, number, by = TAIL.unpack(parts.pop())
        self._answers += 1
        if by != pid:
            raise ValueError(f"it comes from process {by}")
        if number != self._answers:
            raise ValueError(f"it is the worker's answer number {number}, where {self._answers} is the next")
        return cast(float, task_s)

    def close(self) -> None:
        """Hang up, and let go of what only a reference cycle would keep."""
        hang_up(self.end)
        self.descriptors.close()
        self._frames.close()
        self.loans.close()


class Lender:
    """Decides which slots go back to the workers of a pool, and which are dropped."""

    def __init__(self) -> None:
        self._tasks = self._spare = 0  # tasks, and slots that none of the last few needed

    def lend(self, wire: Wire, tasks: int, wires: Sequence[Wire], new: int = 1) -> Loan:
        """Return the slots that go back to a worker with new tasks, and those that it is to forget.

        A slot that one worker has to make replaces one that another does not need, so that together they have no more
        than there are batches asked for, undelivered or held, and one each: a worker's turn comes when another's batch
        has just been let go, and to drop that slot each time would cost its pages. Slots that nobody needed for long
        are dropped, too.

        Args:
            wire: To the worker.
            tasks: How many tasks it has, those included.
            wires: To all workers.
            new: How many are new.
        """
        self._tasks += new
        back, dropped = wire.loans.lend(tasks, new)
        spare = 0
        for one in wires:
            spare += len(one.loans.spare)
        self._spare = min(self._spare, spare)
        surplus = spare - len(wires)
        if surplus > 0:
            surplus = min(surplus, new - len(back), tasks - wire.loans.lent)
        if self._tasks >= _SPARE_AFTER:
            surplus = max(surplus, self._spare)
            self._tasks, self._spare = 0, spare - surplus
        for _ in range(surplus):
            max(wires, key=lambda one: len(one.loans.spare)).loans.drop()
        return back, dropped


def hang_up(end: socket.socket) -> None:
    """Close a socket for every process that may hold a copy of it: the worker reads an end of file."""
    with suppress(OSError):  # the worker hung up first
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def no_answer(who: str, why: str) -> str:
    """Say that what a worker sent is no answer, and how that comes about."""
    return (
        f"{who} sent what is no answer ({why}): user code there has written to a descriptor that is not its own, or "
        "forked a copy that went on as if it was the worker"
    )


@lru_cache
def _numbers(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


def frame(parts: Sequence[memoryview]) -> list[memoryview]:
    """Put the number of parts and their lengths in bytes before the parts."""
    sizes = [*map(len, parts)]
    total = sum(sizes)
    head = _numbers(2 + len(sizes)).pack(_MARK + len(sizes), total, *sizes)
    if total <= JOINED_BYTES:  # to wake the other side once for each would cost more than the copy
        return [memoryview(b"".join((head, *parts)))]
    return [memoryview(head), *(part for part in parts if len(part))]


def _begin(head: Buffer) -> tuple[int, int]:
    """Return how many parts a frame has, and how many bytes they have together.

    Raises:
        ValueError: It is none.
    """
    count, total = _HEAD.unpack_from(head)
    if not 0 <= count - _MARK < _MOST_PARTS:
        raise ValueError("it does not begin as one")
    return count - _MARK, total


def _checked(sizes: Sequence[int], total: int) -> Sequence[int]:
    if sum(sizes) != total:
        raise ValueError("its parts are not as long as it says")
    return sizes


def _first_frame(rest: memoryview) -> tuple[list[bytearray], memoryview]:
    """Return the parts of a frame that has come as a whole, and what follows; no parts if it has not, or has none."""
    if len(rest) < _HEAD.size:
        return [], rest
    count, total = _begin(rest)
    end = _HEAD.size + _WORD.size * count
    if not count or len(rest) < end + total:
        return [], rest
    parts = []
    for size in _checked(_numbers(count).unpack_from(rest, _HEAD.size), total):
        start, end = end, end + size
        parts.append(bytearray(rest[start:end]))
    return parts, rest[end:]


def read_frames(deliver: Callable[[list[bytearray]], None]) -> Generator[memoryview, int, None]:
    """Yield the memory to be filled next, and be sent how much of it was, for ever; call `deliver` with frames' parts.

    What is small is read together, several frames at a time; what is large goes where it stays.

    Raises:
        ValueError: What came is no frame.
    """
    scratch = np.empty(JOINED_BYTES, np.uint8).data  # whose pages are not touched before they are needed
    rest = scratch[:0]

    def take(size: int) -> Generator[memoryview, int, bytearray]:
        """Return so many bytes when they have come."""
        nonlocal rest
        part = bytearray(size)
        missing = memoryview(part)
        while True:
            count = min(len(missing), len(rest))
            missing[:count] = rest[:count]
            missing, rest = missing[count:], rest[count:]
            if not missing:
                return part
            if len(missing) < len(scratch):
                rest = scratch[: (yield scratch)]
            else:
                missing = missing[(yield missing) :]

    while True:
        if not rest:
            rest = scratch[: (yield scratch)]
        parts, rest = _first_frame(rest)
        if not parts:
            count, total = _begin((yield from take(_HEAD.size)))
            words = yield from take(_WORD.size * count)
            for size in _checked([size for (size,) in _WORD.iter_unpack(words)], total):
                parts.append((yield from take(size)))
        deliver(parts)
        del parts  # the batch's memory belongs to the user now
