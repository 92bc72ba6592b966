"""The rank's end of a socket to a worker on this machine: tasks one way, answers the other, slots as descriptors."""

import os
import pickle
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import cast

from headrace.errors import SlotTooLarge
from headrace.executors.dispatch.peer import Dispatched
from headrace.executors.future import Future
from headrace.executors.link.frames import JOINED_BYTES, frame_of_one, read_frames
from headrace.memory.codec import Slots, lift
from headrace.memory.pickling import Buffer, Pickler, decode, encode
from headrace.memory.slots import Loans
from headrace.telemetry.stages import NO_TIMES, PACKED, Packed
from headrace.types import IndexTask, PlanTask, Task

LIVENESS_S = 1
"""How often either side checks that the other still lives, in seconds, in case the closed socket does not tell."""

Sent = tuple[int, ...] | int | list[int] | list[bytearray]
"""A task as it is sent: the fields of a `PlanTask`; the index or indices of an `IndexTask`; or any task, pickled."""

Request = tuple[list[tuple[Sent, int | None]], list[int], list[int]]
"""A message to a worker: tasks to be answered together, each with the number that keys its random numbers or None; and
as in `Loan` the slots that come back, and the slots to forget."""

Loan = tuple[list[int], list[int]]
"""The slots that go back to a worker, and the slots that it is to forget."""

TAIL = struct.Struct(PACKED.format + "d2Q")
"""The last part of an answer: its `StageTimes`; the seconds that the task took, measured by the worker since the rank
may hear late; the number of answers that the worker has given, this one included; and the worker's process."""

_STAGES_BYTES = PACKED.size

_AFTER_STAGES = struct.Struct("<d2Q")
"""The end of a `TAIL`."""

_rank_ends: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""The rank's ends of all sockets. A forked process must close its copies, or no worker would see its rank die."""


def _close_rank_ends() -> None:
    for end in list(_rank_ends):
        end.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_rank_ends)


class Assigned(Dispatched):
    """The future of a task that is sent to a worker.

    Attributes:
        sent: The task as it is sent.
        key: The number from which its random generators are seeded; None where the task itself says that.
    """

    def __init__(self, task: Task, number: int, kind: type[Pickler] | None = None, key: int | None = None) -> None:
        super().__init__(task, number)
        self.sent = _to_send(task, kind)  # raises here if it cannot be pickled, before a worker has it
        self.key = key

    def land(self, message: Sequence[Buffer], slots: Slots, stages: Packed = NO_TIMES) -> None:
        """Fill in a `SlotWriter`'s message, unless another worker was faster: then its slot is given back.

        Args:
            message: The message.
            slots: Where its slot is.
            stages: What the worker spent, as packed `StageTimes`.
        """
        try:
            lifted = lift(message, slots)
            if not self._done:
                self.size_bytes = sum(map(len, lifted))
                self.packed_stages = stages
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
            return [*index]  # the user's sampler may change its list afterwards
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
        heard: Called with the parts of each message; it calls `check` and `land` if that is an answer.

    Attributes:
        loans: The worker's slots.
        outbox: Bytes that the socket has not taken yet.
        garbled: Why the worker's bytes are not an answer; "" as long as they are.
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
        self._before_s = 0.0  # how long the next message has been read, where it comes in several pieces
        self._landed: list[Future] = []  # their answers are in the bytes that are being received
        self._stages: Packed = NO_TIMES  # of the answer that was checked last
        self._answers = 0
        self._frames = read_frames(heard)
        self._wanted = next(self._frames)

    @property
    def open(self) -> bool:
        """Whether nobody has hung up."""
        return self.end.fileno() >= 0

    def hand(self, futures: Sequence[Assigned], slots: Loan) -> None:
        """Send tasks, to be answered together, and slots from a `Lender`."""
        request: Request = ([(future.sent, future.key) for future in futures], *slots)
        self.outbox.append(frame_of_one(pickle.dumps(request, 5)))
        self.send()

    def send(self) -> None:
        """Send as much of the outbox as the socket takes now: the rank never blocks on a busy worker."""
        outbox = self.outbox
        if len(outbox) > 1 and sum(map(len, outbox)) <= JOINED_BYTES:
            self.outbox = outbox = deque([memoryview(b"".join(outbox))])
        while outbox:
            part = outbox[0]
            try:
                sent = self.end.send(part)
            except BlockingIOError:
                return
            except OSError:  # the worker is gone; reading finds that out, and first reads its last answers
                outbox.clear()
                return
            if sent == len(part):
                outbox.popleft()
            else:
                outbox[0] = part[sent:]

    def receive(self) -> bool:
        """Read what has arrived; return False when the worker has closed its end, or its bytes are not an answer."""
        began_s, landed = perf_counter() - self._before_s, self._landed
        try:
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
                    # An interrupt in here loses bytes; the generator then ends, and the worker counts as lost.
                    self._wanted = self._frames.send(count)
                except StopIteration:
                    return False
                except Exception as error:  # noqa: BLE001 - such bytes can raise anything
                    self.garbled = str(error) if type(error) is ValueError else repr(error)
                    return False
                if not full:  # there was no more
                    return True
        finally:
            self._before_s = perf_counter() - began_s
            if landed:
                each_s, self._before_s = self._before_s / len(landed), 0.0
                for future in landed:
                    future.transport_s += each_s
                landed.clear()

    def check(self, parts: list[bytearray], pid: int | None) -> float:
        """Take the `TAIL` off an answer; return how long the task took, in seconds.

        Args:
            parts: The answer.
            pid: The worker's process.

        Raises:
            ValueError: It is not the worker's next answer.
        """
        tail = parts.pop()
        task_s: float
        task_s, number, by = _AFTER_STAGES.unpack(tail[_STAGES_BYTES:])
        self._answers += 1
        if by != pid:
            raise ValueError(f"it comes from process {by}")
        if number != self._answers:
            raise ValueError(f"it is the worker's answer number {number}, where {self._answers} is the next")
        self._stages = tail[:_STAGES_BYTES]
        return task_s

    def land(self, future: Assigned, parts: list[bytearray]) -> None:
        """Fill in the future of the answer that was checked last."""
        future.land(parts, self.loans, self._stages)
        self._landed.append(future)

    def close(self) -> None:
        """Hang up, and drop references that form cycles."""
        hang_up(self.end)
        self.descriptors.close()
        self._frames.close()
        self.loans.close()
        self._landed.clear()


def hang_up(end: socket.socket) -> None:
    """Close a socket for every process that may hold a copy of it: the worker reads an end of file."""
    with suppress(OSError):  # the worker hung up first
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def no_answer(why: str) -> str:
    """Word what a worker did whose bytes are not an answer, with the likely causes."""
    return (
        f"sent what is no answer ({why}): user code there has written to a descriptor that is not its own, or "
        "forked a copy that went on as if it was the worker"
    )
