"""Thousands of schedules of deaths, hangs, late answers and resizes, in virtual time; and rules that are wrong."""

from collections.abc import Callable
from typing import Any

import pytest

from executors.dispatch.simulation import HUNG_S, Schedule, SimulatedPeer, SimulatedPool, simulate
from headrace.executors.dispatch import rules
from headrace.executors.dispatch.dispatcher import Dispatcher
from headrace.executors.dispatch.peer import Dispatched, Peer

_EACH = 250


@pytest.fixture(autouse=True)
def _short_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_HUNG_S", HUNG_S)


@pytest.mark.parametrize("first", range(0, 2000, _EACH))
def test_the_reader_gets_the_same_whatever_happens(first: int) -> None:
    """In time, with at most two copies of a task, no credit exceeded, and no task or worker left over."""
    wrong = {seed: found for seed in range(first, first + _EACH) if (found := simulate(Schedule.of(seed)))}
    assert not wrong


def credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker takes whatever there is."""
    monkeypatch.setattr(Peer, "accepts", lambda peer, future, least=0: peer.takes and peer not in future.holders)


def no_hedge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody helps out a worker that hangs."""
    monkeypatch.setattr(Dispatcher, "hedge", lambda *_: None)


def more_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third worker gets a task that two have."""
    monkeypatch.setattr(rules, "MOST_COPIES", 3)


def blame_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest task of a worker is blamed for its death, not the oldest."""
    lose = Dispatcher.lose

    def wrong(dispatcher: Dispatcher, peer: Any, at_fault: bool) -> list[Dispatched]:
        if at_fault and peer.up and peer.unanswered:
            peer.unanswered[-1].deaths += 1
        return lose(dispatcher, peer, at_fault=False)

    monkeypatch.setattr(Dispatcher, "lose", wrong)


def forgive(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task is ever blamed."""
    lose = Dispatcher.lose
    monkeypatch.setattr(Dispatcher, "lose", lambda dispatcher, peer, _: lose(dispatcher, peer, at_fault=False))


def keep_the_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that hangs is never replaced."""
    monkeypatch.setattr(SimulatedPeer, "silent", lambda *_: False)


def replace_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead worker is not replaced."""
    monkeypatch.setattr(SimulatedPool, "_replace", lambda *_: None)


def leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that leaves takes its tasks along."""
    leave = SimulatedPool._leave

    def wrong(pool: SimulatedPool, peer: SimulatedPeer) -> None:
        leave(pool, peer)
        peer.drop_tasks()

    monkeypatch.setattr(SimulatedPool, "_leave", wrong)


def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has finished its tasks does not leave."""
    monkeypatch.setattr(SimulatedPool, "_dismiss", lambda _: None)


@pytest.mark.parametrize(
    "mutation",
    [credit, no_hedge, more_copies, blame_the_last, forgive, keep_the_silent, replace_no_one, leave_at_once, stay],
)
def test_a_wrong_rule_is_found(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    assert any(simulate(Schedule.of(seed)) for seed in range(1000))
