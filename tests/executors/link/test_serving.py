"""What a worker does at its socket: answers that may come together do, unless they could change while they wait."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import pytest
import torch

from headrace.executors.future import Future
from headrace.executors.link.serving import Server, serve
from headrace.executors.link.wire import Assigned, Wire
from headrace.memory.codec import SlotWriter
from headrace.memory.slots import Ring
from headrace.telemetry.stages import StageClock
from headrace.types import PlanTask

LIMIT_S = 60


class Stub:
    """Answers each task with the same tensors, in which it writes the task's step before it waits for leave."""

    def __init__(self, ring: Ring, floats: int, parts: int = 1) -> None:
        self.writer, self.clock = SlotWriter(ring), StageClock()
        self.tensors = [torch.zeros(floats) for _ in range(parts)]
        self.begun, self.leave = threading.Semaphore(0), threading.Semaphore(0)

    def answer_to(self, sent: Any, number: int | None) -> list[memoryview]:
        """Answer when the test says so."""
        for tensor in self.tensors:
            tensor.fill_(sent[1])
        self.begun.release()
        assert self.leave.acquire(timeout=LIMIT_S)
        self.writer.begin()
        return self.writer.write(self.tensors)


def _serve(end: socket.socket, ring: Ring, server: Server) -> None:
    with suppress(BrokenPipeError):  # the rank hung up
        serve(end, ring, server, lambda: True)


class Rank:
    """The rank's end, and a worker in a thread at the other."""

    def __init__(self, floats: int, parts: int = 1) -> None:
        (end, far), (descriptors, far_descriptors) = socket.socketpair(), socket.socketpair()
        ring = Ring(far_descriptors)
        self.stub = Stub(ring, floats, parts)
        self.wire = Wire(end, descriptors, self._hear)
        self.asked: list[Assigned] = []
        self.heard: list[Future] = []
        server = cast("Server", self.stub)
        self._thread = threading.Thread(target=_serve, args=(far, ring, server), daemon=True)
        self._thread.start()
        self._far = far, far_descriptors

    def _hear(self, parts: list[bytearray]) -> None:
        future = self.asked[len(self.heard)]
        self.wire.land(future, parts[:-1])
        self.heard.append(future)

    def ask(self, count: int) -> None:
        """Send tasks that may be answered together."""
        self.asked = [Assigned(PlanTask(0, step), step) for step in range(count)]
        self.wire.hand(self.asked, ([], []))

    def let(self, count: int) -> None:
        """Let the worker do so many tasks, and wait until it is at the next one."""
        self.stub.leave.release(count)
        for _ in range(count):
            assert self.stub.begun.acquire(timeout=LIMIT_S)

    def values(self) -> list[float]:
        """Return the first number of each batch that has come."""
        self.wire.receive()
        return [future.result()[0][0].item() for future in self.heard]

    def close(self) -> None:
        """Hang up; the worker then ends."""
        self.wire.close()
        self.stub.leave.release(100)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        for end in self._far:
            end.close()


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    """A rank whose worker answers with tensors of so many floats."""
    one = Rank(*request.param)
    yield one
    one.close()


@pytest.mark.parametrize("rank", [(10,)], indirect=True)
def test_small_batches_come_together(rank: Rank) -> None:
    rank.ask(4)
    assert rank.stub.begun.acquire(timeout=LIMIT_S)
    rank.let(3)
    assert rank.values() == [], "the first three wait for the fourth"
    rank.stub.leave.release()
    rank.wire.end.settimeout(LIMIT_S)  # until the first bytes are there
    assert rank.wire.end.recv(1, socket.MSG_PEEK)
    rank.wire.end.setblocking(False)
    assert rank.values() == [0, 1, 2, 3]


@pytest.mark.parametrize("rank", [(4000, 5), (4000, 3)], indirect=True)
def test_large_batches_do_not_wait(rank: Rank) -> None:
    """Nor would they keep: their memory is what the next task writes into."""
    rank.ask(3)
    assert rank.stub.begun.acquire(timeout=LIMIT_S)
    for step in range(2):
        rank.let(1)
        assert rank.values() == [*map(float, range(step + 1))]
