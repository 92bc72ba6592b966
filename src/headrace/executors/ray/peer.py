"""The rank's record of one Ray actor: its tasks, its speed, and whether it answers."""

import pickle
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from headrace.executors.base import name_task
from headrace.executors.link.wire import Assigned, Wire
from headrace.executors.ray.actor import PIECE_BYTES, Answers, SetupResult, pieces_of
from headrace.memory.codec import Slots, is_inline
from headrace.memory.pickling import Pickler
from headrace.types import Task
from headrace.worker.work import Work

_CREDIT = 2
"""The number of tasks that a worker may have: the present one, and the next, so that it does not wait for that."""

_BUSY_S = 0.01
"""A worker may have more short tasks: as many as keep it busy for this time, in seconds."""

_MESSAGE_S = 0.001
"""The least work, in seconds, that is sent to an idle worker in a message of its own while others are busy."""

_CALL_S = 0.003
"""The same for a Ray call, in seconds: about the CPU time that a call costs all processes together."""

_MOST_CREDIT = 64
"""The largest number of tasks that a worker may have."""

_MOST_BUNDLE = 32
"""The largest number of tasks in one message."""

_WEIGHT_SHORTER, _WEIGHT_LONGER = 0.5, 0.1
"""The weight of a new measurement of the task time, if it is shorter than the average, and if it is longer. Other
processes on a busy machine can only make a measurement longer. A longer average puts fewer tasks into a message, and
more messages would add to the load of that machine."""

_MOST_PIECES_PER_BATCH = 4
"""The largest number of pieces of one batch; a larger batch costs less as one object in Ray's store."""

_MOST_PIECES_PER_CALL = 8
"""The largest number of pieces that one call returns."""

OVERDUE_S = 0.25
_OVERDUE_MEDIANS = 2.0
"""A batch is overdue after `OVERDUE_S` seconds plus `_OVERDUE_MEDIANS` times the median time of a batch."""

_MOST_NAMED = 4
"""The largest number of tasks of a late worker that an error names."""

_DOUBTFUL = 2
"""After this many deaths at a task, the next worker gets it alone: another death is then certainly its fault."""


class RayFuture(Assigned):
    """The future of a task.

    Attributes:
        sent_s: When it was first assigned to a worker after it was last queued, in seconds; 0 while it is queued.
        holders: The workers that it is assigned to.
        bound: The only worker that may compute it, or None.
    """

    def __init__(self, task: Task, number: int, kind: type[Pickler], work: Work, worker: int | None) -> None:
        super().__init__(task, number, kind, number if work.by_number else None)
        self.bound = None if work.repeatable else worker
        self.sent_s = 0.0
        self.holders: list[RayPeer] = []

    def land_from_store(self, message: list[bytearray], slots: Slots, received_s: float) -> None:
        """Fill in a message that came through Ray; the rank spent `received_s` seconds to receive it."""
        self.land(message, slots, bytes(message.pop()))
        self.transport_s += received_s


class RayPeer:
    """The rank's record of one actor.

    Attributes:
        used: Whether the actor served another pool before; it may have died since.
        unanswered: Its tasks, oldest first.
        wire: The sockets to it, if it shares this host and has connected.
        first_call: The Ray call that set it up.
        call: The last Ray call, or the first one if the last is answered. Once it is answered the actor is idle.
        setup_result: The actor's answer to the call that set it up.
        up: Whether it takes tasks.
        lost: Whether it is gone, and another actor will take its place.
        task_s: The average time of its tasks, in seconds.
        last_answer_s: When it last answered, or got a task while it had none, in seconds.
        suspect: Whether the reader waited for one of its tasks until it was overdue; an answer clears this.
        credit: The number of tasks that it may have.
        bundle: The number of tasks in one message: several if they are short and their batches small.
        pieces: The number of pieces of a slot that Ray sends along with an answer; 0 if slots go through the store.
        fits: The number of batches without a slot that fit into one piece.
        min_message: The least number of tasks in a message to it while it is idle and others are busy.
        awaits_writable: Whether the rank waits until its socket accepts more bytes.
        unsent: Tasks that are assigned to it and not sent yet.
    """

    def __init__(self, worker: int, ident: int, actor: Any, used: bool, false_starts: int, ages: deque[float]) -> None:
        self.worker = worker
        self.ident = ident
        self.actor = actor
        self.used = used
        self.false_starts = false_starts
        self.unanswered: deque[RayFuture] = deque()
        self.unsent: list[RayFuture] = []
        self.wire: Wire | None = None
        self.first_call: Any = None
        self.call: Any = None
        self.setup_result: SetupResult | None = None
        self.up = self.suspect = self.lost = False
        self.task_s = self.last_answer_s = 0.0
        self.credit, self.bundle, self.min_message, self.pieces, self.fits = _CREDIT, 1, 1, 0, 1
        self.awaits_writable = False
        self._ages = ages

    def receive_answer(self, parts: list[bytearray]) -> None:
        """Receive an answer over the socket, which keeps their order."""
        assert self.wire is not None
        assert self.setup_result is not None
        task_s = self.wire.check(parts, self.setup_result.pid)
        self.note_speed(task_s, _MOST_BUNDLE if is_inline(parts) else 1)
        future = self.unanswered[0]
        was_done = future.done()
        # If the next line raises, the task stays unanswered.
        self.wire.land(future, parts)
        self.complete(future, was_done)

    def send_call(self, some: Sequence[RayFuture]) -> list[Any]:
        """Send tasks in one Ray call; return the references to its results: the answers, and pieces of batches."""
        tasks = [(one.sent, one.key) for one in some]
        pieces = self.pieces * len(some) or -(-len(some) // self.fits) - 1
        called = self.actor.run.options(num_returns=1 + pieces).remote(pickle.dumps((tasks, pieces), 5))
        calls = called if pieces else [called]
        self.call = calls[0]
        return list(calls)

    def receive_results(
        self, calls: Sequence[Any], outcome: Answers | bytes, get: Callable[[Sequence[Any]], Any]
    ) -> Answers:
        """Return the answers of a Ray call, and note how long their tasks took and how large their batches were.

        Args:
            calls: The references that `send_call` returned.
            outcome: The result of the first.
            get: Returns the results of other references, which have arrived with the first.
        """
        began_s = time.perf_counter()
        if calls[0] is self.call:
            self.call = self.first_call  # unlike this one, it keeps no batch in Ray's store
        answers: Answers = pickle.loads(outcome) if isinstance(outcome, bytes) else outcome
        pieces = max(map(pieces_of, answers.slot_sizes), default=0)
        self.pieces = pieces if pieces <= _MOST_PIECES_PER_BATCH else 0
        if pieces:
            self.note_speed(answers.task_s, _MOST_PIECES_PER_CALL // pieces, _CALL_S)
        else:
            assert isinstance(outcome, bytes)
            fits = PIECE_BYTES * len(answers.messages) // len(outcome)
            self.fits = max(1, fits)
            self.note_speed(answers.task_s, fits * _MOST_PIECES_PER_CALL, _CALL_S)
        for piece in get(calls[1 : 1 + answers.more_results]) if answers.more_results else ():
            answers.messages.extend(pickle.loads(piece))
        return answers._replace(received_s=time.perf_counter() - began_s)

    def complete(self, future: RayFuture, was_done: bool) -> bool:
        """Note that a task is answered; return whether it was still assigned to this worker.

        Args:
            future: The future of the task.
            was_done: Whether it already had an outcome.
        """
        now_s = time.monotonic()
        self.last_answer_s = now_s
        self.suspect = False
        if self not in future.holders:  # it was assigned to another worker meanwhile
            return False
        self.unanswered.remove(future)
        future.holders.remove(self)
        if not was_done:
            self._ages.append(now_s - future.sent_s)
        return True

    def note_speed(self, task_s: float, fits: int, message_s: float = _MESSAGE_S) -> None:
        """Note how long a task took and how large its batch was.

        Args:
            task_s: The time of the task, in seconds.
            fits: The number of such batches that fit into one message.
            message_s: The least work in one message, in seconds.
        """
        gain = _WEIGHT_SHORTER if task_s < self.task_s else _WEIGHT_LONGER
        self.task_s += gain * (task_s - self.task_s) if self.task_s else task_s
        each = max(self.task_s, 1e-6)
        self.credit = int(min(max(_CREDIT, _BUSY_S / each), _MOST_CREDIT))
        self.bundle = int(max(1, min(_BUSY_S / _CREDIT / each, _MOST_BUNDLE, fits)))
        self.min_message = max(1, min(self.bundle, int(message_s / each)))

    def accepts(self, future: RayFuture) -> bool:
        """Tell whether a task may be assigned to it now."""
        if self in future.holders:
            return False
        # Several tasks leave it open which one ended a worker, since an answer may be lost with it. One task does not.
        if self.unanswered and max(future.deaths, self.unanswered[0].deaths) >= _DOUBTFUL:
            return False
        return len(self.unanswered) < self.credit

    def may_hedge(self, future: RayFuture) -> bool:
        """Tell whether a task that other workers have may be assigned to it, too."""
        if not self.up or self.suspect or self in future.holders:
            return False
        return future.deaths < _DOUBTFUL or not self.unanswered

    def next_bundle(self) -> list[RayFuture]:
        """Remove and return the unsent tasks that go into the next message."""
        # A task at which workers died goes alone, so that another one's fault is not counted as its own.
        late = (place for place, one in enumerate(self.unsent[: self.bundle]) if one.deaths)
        count = next(late, self.bundle) or 1
        some, self.unsent = self.unsent[:count], self.unsent[count:]
        return some

    def name_tasks(self, work: Work) -> str:
        """Name its tasks, oldest first: short tasks are answered together, so any of them may be the late one."""
        named = " and ".join(name_task(work, one.task) for one in islice(self.unanswered, _MOST_NAMED))
        more = len(self.unanswered) - _MOST_NAMED
        return f"{named} and {more} more" if more > 0 else named

    @property
    def load(self) -> tuple[bool, int]:
        """Sorts workers: the one with the smallest load gets the next task."""
        return self.suspect, len(self.unanswered)

    def __str__(self) -> str:
        where = "" if self.setup_result is None else f" (pid {self.setup_result.pid} on {self.setup_result.host})"
        return f"worker {self.worker}{where}"


def overdue_after(ages: Sequence[float]) -> float:
    """Return the time after which a batch is overdue, in seconds, from the times of the last batches."""
    return OVERDUE_S + _OVERDUE_MEDIANS * statistics.median(ages)


def describe_end(peer: RayPeer, false_starts: int) -> str:
    """Return the text of the error about a worker's end."""
    if false_starts:
        return f"{false_starts} Ray actors in a row died as {peer} before they could do a task"
    return f"the Ray actor of DataLoader {peer} exited unexpectedly"
