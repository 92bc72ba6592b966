"""What the rank's ends of the sockets to its workers share: slots that one does not need make room for another's."""

import pickle
import socket
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from headrace.executors.wire import Assigned, Lender, Wire, task_of
from headrace.memory.codec import SlotWriter, lift
from headrace.memory.slots import Loans, Ring
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
