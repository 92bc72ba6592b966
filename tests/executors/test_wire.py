"""What the rank's ends of the sockets to its workers share: slots that one does not need make room for another's."""

import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from headrace.executors.wire import Lender, Wire
from headrace.memory.codec import SlotWriter, lift
from headrace.memory.slots import Loans, Ring


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
    assert (busy.spare, late.spare) == (12, own)
    lender = Lender()
    for tasks in [8] if together else range(1, 9):
        lender.lend(wires[1], tasks, wires, 8 if together else 1)
    assert (busy.spare, late.spare, late.lent) == (12 - 8 + own, 0, own)
    for pair in ends:
        for end in pair:
            end.close()
    for wire in wires:
        wire.loans.close()
