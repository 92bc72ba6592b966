"""One Ray actor as the rank sees it: the tasks that it has, how fast it is, and whether it can be counted on."""

import pickle
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from headrace.executors.base import name_task
from headrace.executors.link.wire import STAGES, Assigned, Wire
from headrace.executors.ray.actor import PIECE_BYTES, Answers, Begun, pieces_of
from headrace.memory.codec import Slots, is_inline
from headrace.memory.pickling import Pickler
from headrace.types import Task
from headrace.worker.work import Work

_CREDIT = 2
"""How many tasks a worker has at a time: one that it is at, and one that it need not wait for."""

_BUSY_S = 0.01
"""Where tasks are short a worker has more of them, so that it has this long to do."""

_MESSAGE_S = 0.001
"""So much work, in seconds, and more is worth a message of its own to whoever has nothing to do."""

_CALL_S = 0.003
"""So much is worth a call of Ray, which takes that long on all sides together."""

_MOST_CREDIT = 64
"""No more than so many, however short they are."""

_MOST_BUNDLE = 32
"""Nor more than so many in one message."""

_SOONER, _LATER = 0.5, 0.1
"""How much of a change in a task's time is believed at once. Other processes make tasks look long, nothing makes them
look short, and to send fewer at a time because the machine is busy would make it busier."""

_MOST_PIECES = 4
"""A batch of more pieces than this costs less as one object in Ray's store."""

_CARRIED = 8
"""No more pieces than these come of one call."""

OVERDUE_S = 0.25
_OVERDUE = 2.0
"""A batch is overdue after this time and so many times what the median batch takes."""

_NAMED = 4
"""So many of its tasks are named where a worker is late."""

_DOUBTFUL = 2
"""A task that so many workers died at, as it seemed, has the next one to itself."""


class Asked(Assigned):
    """The future of a task.

    Attributes:
        sent_s: When it was given to a worker first, or first since it was put back; 0 if to none.
        holders: The workers that have it.
        bound: The only worker that may compute it, or None.
    """

    __slots__ = ("bound", "holders", "sent_s")

    def __init__(self, task: Task, number: int, kind: type[Pickler], work: Work, worker: int | None) -> None:
        super().__init__(task, number, kind, number if work.by_number else None)
        self.bound = None if work.repeatable else worker
        self.sent_s = 0.0
        self.holders: list[RayPeer] = []

    def land_from_store(self, message: list[bytearray], slots: Slots, received_s: float) -> None:
        """Fill in a message that came through Ray's store, which the rank spent so many seconds to receive."""
        self.land(message, slots, STAGES.unpack(message.pop()), received_s)


class RayPeer:
    """One actor, as the rank sees it.

    Attributes:
        used: Whether the actor has served a pool before, and may have died since.
        unanswered: The tasks that it has, oldest first.
        wire: The sockets to it, if it shares this host and has connected.
        first_call: The Ray call that set it up.
        call: The one that was made last, or the first if that is answered, too; when it is the actor is idle.
        begun: What it said when it was set up.
        up: Whether it takes tasks.
        lost: Whether it is no more, and another is to take its place.
        task_s: What a task takes it, in seconds.
        heard_s: When it answered last, or was given a task when it had none.
        suspect: Whether a task of its is overdue.
        credit: How many tasks it may have: few, unless they are short.
        bundle: How many of them go into one message: several if they are short and their batches small.
        pieces: In how many pieces the slot of a batch comes through Ray, beside its store; 0 if it does not.
        fits: Of batches that need no slot so many fit into one piece.
        worth: How many of them are worth a message, whoever else has nothing to do.
        writes: Whether its socket had no room for all that it was sent.
        to_send: What it was given just now, on its way.
    """

    def __init__(self, worker: int, ident: int, actor: Any, used: bool, false_starts: int, ages: deque[float]) -> None:
        self.worker = worker
        self.ident = ident
        self.actor = actor
        self.used = used
        self.false_starts = false_starts
        self.unanswered: deque[Asked] = deque()
        self.to_send: list[Asked] = []
        self.wire: Wire | None = None
        self.first_call: Any = None
        self.call: Any = None
        self.begun: Begun | None = None
        self.up = self.suspect = self.lost = False
        self.task_s = self.heard_s = 0.0
        self.credit, self.bundle, self.worth, self.pieces, self.fits = _CREDIT, 1, 1, 0, 1
        self.writes = False
        self._ages = ages

    def hear(self, parts: list[bytearray]) -> None:
        """Take an answer that came over the socket: they come in order."""
        assert self.wire is not None
        assert self.begun is not None
        task_s = self.wire.check(parts, self.begun.pid)
        self.pace(task_s, _MOST_BUNDLE if is_inline(parts) else 1)
        future = self.unanswered[0]
        was_done = future.done()
        future.land(
            parts, self.wire.loans, self.wire.stage_s, self.wire.received_s
        )  # and is still owed where that is refused
        self.settle(future, was_done)

    def ask(self, some: Sequence[Asked]) -> list[Any]:
        """Send tasks through Ray; return its references to the answers and to what comes in pieces beside them."""
        tasks = [(one.sent, one.key) for one in some]
        pieces = self.pieces * len(some) or -(-len(some) // self.fits) - 1
        called = self.actor.run.options(num_returns=1 + pieces).remote(pickle.dumps((tasks, pieces), 5))
        calls = called if pieces else [called]
        self.call = calls[0]
        return list(calls)

    def heard(self, calls: Sequence[Any], outcome: Answers | bytes, get: Callable[[Sequence[Any]], Any]) -> Answers:
        """Note how long tasks took that were answered through Ray, and how large their batches were.

        Args:
            calls: What `ask` returned.
            outcome: Of the first.
            get: Returns what the others, which have come along, refer to.
        """
        began_s = time.perf_counter()
        if calls[0] is self.call:
            self.call = self.first_call  # which is answered as well, and keeps no batch in Ray's store
        answers: Answers = pickle.loads(outcome) if isinstance(outcome, bytes) else outcome
        pieces = max(map(pieces_of, answers.slot_sizes), default=0)
        self.pieces = pieces if pieces <= _MOST_PIECES else 0
        if pieces:
            self.pace(answers.task_s, _CARRIED // pieces, _CALL_S)
        else:
            assert isinstance(outcome, bytes)
            fits = PIECE_BYTES * len(answers.messages) // len(outcome)
            self.fits = max(1, fits)
            self.pace(answers.task_s, fits * _CARRIED, _CALL_S)
        for piece in get(calls[1 : 1 + answers.apart]) if answers.apart else ():
            answers.messages.extend(pickle.loads(piece))
        return answers._replace(received_s=time.perf_counter() - began_s)

    def settle(self, future: Asked, was_done: bool) -> bool:
        """Note that a task is answered; return whether the worker still had it.

        Args:
            future: The task's.
            was_done: Whether another worker has answered it before.
        """
        now_s = time.monotonic()
        self.heard_s = now_s
        self.suspect = False
        if self not in future.holders:  # it was taken away meanwhile
            return False
        self.unanswered.remove(future)
        future.holders.remove(self)
        if not was_done:
            self._ages.append(now_s - future.sent_s)
        return True

    def pace(self, task_s: float, fits: int, message_s: float = _MESSAGE_S) -> None:
        """Note how long a task took and how large its batch was.

        Args:
            task_s: What a task took, in seconds.
            fits: How many batches like its own fit into one message.
            message_s: So much work is worth one, in seconds.
        """
        gain = _SOONER if task_s < self.task_s else _LATER
        self.task_s += gain * (task_s - self.task_s) if self.task_s else task_s
        each = max(self.task_s, 1e-6)
        self.credit = int(min(max(_CREDIT, _BUSY_S / each), _MOST_CREDIT))
        self.bundle = int(max(1, min(_BUSY_S / _CREDIT / each, _MOST_BUNDLE, fits)))
        self.worth = max(1, min(self.bundle, int(message_s / each)))

    def takes(self, future: Asked) -> bool:
        """Tell whether it may be given a task now."""
        if self in future.holders:
            return False
        # The answer to the task before may be lost with a worker. Who dies with one task alone died of that.
        if self.unanswered and max(future.deaths, self.unanswered[0].deaths) >= _DOUBTFUL:
            return False
        return len(self.unanswered) < self.credit

    def helps(self, future: Asked) -> bool:
        """Tell whether it may be given a task that others have, too."""
        if not self.up or self.suspect or self in future.holders:
            return False
        return future.deaths < _DOUBTFUL or not self.unanswered

    def next_bundle(self) -> list[Asked]:
        """Take from what it was given what goes into one call."""
        # What workers died at goes alone, or it would take the blame for what goes with it.
        late = (place for place, one in enumerate(self.to_send[: self.bundle]) if one.deaths)
        count = next(late, self.bundle) or 1
        some, self.to_send = self.to_send[:count], self.to_send[count:]
        return some

    def named(self, work: Work) -> str:
        """Name its tasks, oldest first: short ones are answered together, and any of them may be the late one."""
        named = " and ".join(name_task(work, one.task) for one in islice(self.unanswered, _NAMED))
        more = len(self.unanswered) - _NAMED
        return f"{named} and {more} more" if more > 0 else named

    @property
    def load(self) -> tuple[bool, int]:
        """What the worker that gets the next task has the least of."""
        return self.suspect, len(self.unanswered)

    def __str__(self) -> str:
        where = "" if self.begun is None else f" (pid {self.begun.pid} on {self.begun.host})"
        return f"worker {self.worker}{where}"


def overdue_after(ages: Sequence[float]) -> float:
    """Return after how many seconds a batch is overdue, given what the last ones took."""
    return OVERDUE_S + _OVERDUE * statistics.median(ages)


def end_of(peer: RayPeer, false_starts: int) -> str:
    """Say how a worker ended."""
    if false_starts:
        return f"{false_starts} Ray actors in a row died as {peer} before they could do a task"
    return f"the Ray actor of DataLoader {peer} exited unexpectedly"
