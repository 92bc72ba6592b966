"""The rank's record of one Ray actor: what carries its tasks, and its answers through Ray."""

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.executors.dispatch.dispatcher import Dispatcher
from headrace.executors.dispatch.peer import Peer
from headrace.executors.dispatch.rules import MOST_BUNDLE
from headrace.executors.link.wire import Assigned, Wire
from headrace.executors.ray.actor import PIECE_BYTES, Answers, SetupResult, pieces_of
from headrace.memory.codec import Slots, is_inline
from headrace.memory.pickling import Pickler
from headrace.types import Task
from headrace.worker.work import Work

_CALL_S = 0.003
"""The least work, in seconds, that is sent to an idle worker in a Ray call of its own while others are busy: about the
CPU time that a call costs all processes together."""

_MOST_PIECES_PER_BATCH = 4
"""The largest number of pieces of one batch; a larger batch costs less as one object in Ray's store."""

_MOST_PIECES_PER_CALL = 8
"""The largest number of pieces that one call returns."""


class RayFuture(Assigned):
    """The future of a task."""

    def __init__(self, task: Task, number: int, kind: type[Pickler], work: Work, worker: int | None) -> None:
        super().__init__(task, number, kind, number if work.by_number else None)
        self.bound = None if work.repeatable else worker

    def land_from_store(self, message: list[bytearray], slots: Slots, received_s: float) -> None:
        """Fill in a message that came through Ray; the rank spent `received_s` seconds to receive it."""
        self.land(message, slots, bytes(message.pop()))
        self.transport_s += received_s


class RayPeer(Peer[RayFuture]):
    """The rank's record of one actor.

    Attributes:
        wire: The sockets to it, if it shares this host and has connected.
        first_call: The Ray call that set it up.
        call: The last Ray call, or the first one if the last is answered. Once it is answered the actor is idle.
        setup_result: The actor's answer to the call that set it up.
        pieces: The number of pieces of a slot that Ray sends along with an answer; 0 if slots go through the store.
        fits: The number of batches without a slot that fit into one piece.
        awaits_writable: Whether the rank waits until its socket accepts more bytes.
    """

    def __init__(
        self,
        worker: int,
        ident: int,
        actor: Any,
        used: bool,
        dispatcher: Dispatcher,
        false_starts: int = 0,
        patience_s: float | None = None,
    ) -> None:
        super().__init__(worker, false_starts, patience_s)
        self.ident = ident
        self.actor = actor
        self.used = used
        self.wire: Wire | None = None
        self.first_call: Any = None
        self.call: Any = None
        self.setup_result: SetupResult | None = None
        self.pieces, self.fits = 0, 1
        self.awaits_writable = False
        self._dispatcher = dispatcher

    def receive_answer(self, parts: list[bytearray]) -> None:
        """Receive an answer over the socket, which keeps their order."""
        assert self.wire is not None
        assert self.setup_result is not None
        task_s = self.wire.check(parts, self.setup_result.pid)
        self.note_speed(task_s, MOST_BUNDLE if is_inline(parts) else 1)
        future = self.unanswered[0]
        was_done = future.done()
        # If the next line raises, the task stays unanswered.
        self.wire.land(future, parts)
        self._dispatcher.answered(future, self, was_done)

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

    @property
    def name(self) -> str:
        """Its number, process and host."""
        where = "" if self.setup_result is None else f" (pid {self.setup_result.pid} on {self.setup_result.host})"
        return f"worker {self.worker}{where}"


def describe_end(peer: RayPeer, false_starts: int) -> str:
    """Return the text of the error about a worker's end."""
    if false_starts:
        return f"{false_starts} Ray actors in a row died as {peer} before they could do a task"
    return f"the Ray actor of DataLoader {peer} exited unexpectedly"
