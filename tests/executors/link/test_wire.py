"""What the rank's ends of the sockets to its workers share: slots that one does not need make room for another's."""

import pickle
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.executors.link.frames import EMPTY_FRAME, frame, read_frames
from headrace.executors.link.lending import Lender
from headrace.executors.link.wire import TAIL, Assigned, Wire, task_of
from headrace.memory.codec import SlotWriter, lift
from headrace.memory.slots import Loans, Ring
from headrace.telemetry.stages import PACKED
from headrace.types import IndexTask, PlanTask, StreamTask, Task

TASKS: list[Task] = [
    *(PlanTask(1, 2, 3), IndexTask(5), IndexTask([5, 6]), IndexTask([]), IndexTask([True]), IndexTask(True)),
    *(IndexTask([np.int64(5)]), IndexTask((5, 6)), IndexTask([[5], "a"]), StreamTask(0, 1, [2, 3]), range(3)),
]


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_a_task_comes_as_it_was_sent(task: Task) -> None:
    came = task_of(pickle.loads(pickle.dumps(Assigned(task, 0).sent)))
    assert came == task
    assert type(came) is type(task)
    if isinstance(task, IndexTask):
        assert isinstance(came, IndexTask)
        assert type(came.index) is type(task.index)
        if isinstance(task.index, list):
            assert [*map(type, came.index)] == [*map(type, task.index)]


def test_a_sampler_may_go_on_with_its_list() -> None:
    indices = [5, 6]
    future = Assigned(IndexTask(indices), 0)
    indices.clear()
    assert task_of(future.sent) == IndexTask([5, 6])


# What a worker sends that is no answer.

PID = 5


class Rank:
    """The rank's end of a worker's sockets, with the tasks that it has, and the worker's ends of them."""

    def __init__(self, tasks: int = 1) -> None:
        (rank, self.worker), (descriptors, self.slots) = socket.socketpair(), socket.socketpair()
        self.wire = Wire(rank, descriptors, self._answer)
        self.owed = deque(Assigned(PlanTask(0, step), step) for step in range(tasks))
        self.sent, self._ends = 0, (rank, descriptors, self.worker, self.slots)

    def _answer(self, parts: list[bytearray]) -> None:
        if parts:
            self.wire.check(parts, PID)
            self.wire.land(self.owed[0], parts)
            self.owed.popleft()

    def said(self, sent: bytes) -> bool:
        """Tell whether the worker may have said that."""
        self.worker.sendall(sent)
        return self.wire.receive()

    def answer(self, *message: bytes, pid: int = PID, number: int | None = None) -> bytes:
        """Return the next answer, or what is like it."""
        self.sent += 1
        tail = TAIL.pack(*STAGES, 0.1, self.sent if number is None else number, pid)
        return b"".join(frame([memoryview(part) for part in (*message, tail)]))

    def close(self) -> None:
        self.wire.close()
        for end in self._ends:
            end.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    one = Rank(2)
    yield one
    one.close()


STAGES = [2.0**-place for place in range(8)]
HEAD = struct.pack("<2q", -1, 0)
VALUE = pickle.dumps(7)


def test_what_is_an_answer_lands(rank: Rank) -> None:
    first, _ = rank.owed
    assert rank.said(EMPTY_FRAME + rank.answer(HEAD, VALUE))
    assert (first.result(), len(rank.owed), rank.wire.garbled) == (7, 1, "")
    assert first.packed_stages == PACKED.pack(*STAGES)
    assert first.transport_s > 0


@pytest.mark.parametrize(
    ("message", "options", "why"),
    [
        ((HEAD, VALUE), {"pid": 6}, "it comes from process 6"),
        ((HEAD, VALUE), {"number": 2}, "answer number 2, where 1 is the next"),
        ((struct.pack("<2q", 3, 0), VALUE), {}, "there is no such slot"),
        ((struct.pack("<3q", 3, 9, 5), VALUE), {}, "there is no such slot"),
        ((b"head", VALUE), {}, ""),
        ((struct.pack("<6q", 0, 0, 0, 0, 0, -5), VALUE), {}, "there is no such slot"),
        ((), {}, ""),
    ],
)
def test_what_is_none_is_refused_and_the_task_still_owed(
    rank: Rank, message: tuple[bytes, ...], options: dict[str, int], why: str
) -> None:
    assert not rank.said(rank.answer(*message, **options))
    assert why in rank.wire.garbled
    assert [one.done() for one in rank.owed] == [False, False]
    assert not rank.said(rank.answer(HEAD, VALUE)), "nor is what follows taken for one"


def test_an_answer_that_nobody_asked_for_is_none(rank: Rank) -> None:
    assert rank.said(rank.answer(HEAD, VALUE) + rank.answer(HEAD, VALUE))
    assert not rank.said(rank.answer(HEAD, VALUE))
    assert "IndexError" in rank.wire.garbled


@pytest.mark.parametrize("word", [b"", b"is this a slot? "])
def test_what_is_no_slot_is_none(rank: Rank, word: bytes) -> None:
    """Which nobody waits for."""
    rank.slots.sendall(word)
    assert not rank.said(rank.answer(struct.pack("<2q", 0, 0), VALUE))
    assert "slot" in rank.wire.garbled


def test_a_slot_that_is_smaller_than_its_worker_says_is_none(rank: Rank) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        socket.send_fds(rank.slots, [struct.pack("<2Q", 0, 8192)], [file.fileno()])
        assert not rank.said(rank.answer(struct.pack("<2q", 0, 0), VALUE))
    assert "no slot" in rank.wire.garbled


@pytest.mark.parametrize("where", [0, 1, 5, 8, 16, 20, 40, -24, -1])
def test_what_is_written_in_the_middle_of_an_answer_is_found_out(rank: Rank, where: int) -> None:
    answer = rank.answer(HEAD, VALUE)
    at = where % len(answer)
    rank.said(answer[:at] + b"!" + answer[at:])
    rank.said(rank.answer(HEAD, VALUE))
    assert rank.wire.garbled
    assert len(rank.owed) == 2


@given(st.binary(min_size=16, max_size=300), st.booleans())
@example(EMPTY_FRAME[:8] + b"\xff" * 8, False)
@example(struct.pack("<Q", struct.unpack("<Q", EMPTY_FRAME[:8])[0] + 2**16 - 1) + b"\xff" * 8 * 3, False)
def test_no_bytes_raise_or_stand_for_an_answer(noise: bytes, after: bool) -> None:
    rank = Rank(2)
    try:
        if after:
            assert rank.said(rank.answer(HEAD, VALUE))
        rank.said(noise)
        assert len(rank.owed) == 2 - after
    finally:
        rank.close()


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_no_message_raises_or_is_waited_for(message: list[bytes]) -> None:
    """Framed well, and in its turn; its pickle is the user's."""
    rank = Rank()
    try:
        landed = rank.said(rank.answer(*message))
        assert landed == (not rank.owed) == (not rank.wire.garbled)
    finally:
        rank.close()


@given(st.lists(st.lists(st.binary(max_size=100), min_size=1, max_size=5), max_size=5), st.data())
def test_frames_come_as_they_were_sent_however_they_are_cut(frames: list[list[bytes]], data: st.DataObject) -> None:
    came: list[list[bytearray]] = []
    reading = read_frames(came.append)
    wanted = next(reading)
    left = b"".join(bytes(part) for one in frames for part in frame([memoryview(part) for part in one]))
    while left:
        count = data.draw(st.integers(1, min(len(left), len(wanted))))
        wanted[:count], left = left[:count], left[count:]
        wanted = reading.send(count)
    assert came == frames


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("together", [False, True])
def test_a_worker_that_gets_several_tasks_replaces_as_many_slots_of_another(together: bool, own: int) -> None:
    """All in one message, or one by one: what is mapped altogether stays the same."""
    ends = [socket.socketpair(), socket.socketpair()]
    wires = [cast("Wire", SimpleNamespace(loans=Loans(end))) for end, _ in ends]
    for wire, (_, worker), count in zip(wires, ends, (12, own), strict=True):
        writer, kept = SlotWriter(Ring(worker)), list[Any]()
        for _ in range(count):
            wire.loans.lend(1)
            writer.begin()
            message = writer.write(torch.zeros(10_000))
            kept.append(lift([bytearray(part) for part in message], wire.loans))
        kept.clear()
    busy, late = wires[0].loans, wires[1].loans
    assert (len(busy.spare), len(late.spare)) == (12, own)
    lender = Lender()
    for tasks in [8] if together else range(1, 9):
        lender.lend(wires[1], tasks, wires, 8 if together else 1)
    assert (len(busy.spare), len(late.spare), late.lent) == (12 - 8 + own, 0, own)
    for pair in ends:
        for end in pair:
            end.close()
    for wire in wires:
        wire.loans.close()
