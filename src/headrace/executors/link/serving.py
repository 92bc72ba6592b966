"""The worker's end of a link to the rank: tasks are answered with encoded batches, whatever carries them."""

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from torch.utils.data import default_collate

from headrace.errors import SlotTooLarge
from headrace.executors.future import Failure, Remarked
from headrace.executors.link.frames import JOINED_BYTES, frame, read_frames
from headrace.executors.link.wire import LIVENESS_S, TAIL, Request, Sent, task_of
from headrace.memory.codec import SlotWriter, slot_collate
from headrace.memory.pickling import decode
from headrace.memory.slots import Ring
from headrace.memory.unpicklable import unpicklable_part
from headrace.telemetry.stages import ENCODE, StageClock
from headrace.types import Remark, StreamTask, Task
from headrace.worker.work import Work
from headrace.worker.worker import start_worker


class Server:
    """A process set up as a worker.

    Args:
        work: What to do. It is changed in place: this process has a copy of its own, and another would cost memory. A
            `Failure` if there is none: it is the answer to every task.
        worker_id: The worker's number.
        workers: How many workers there are.
        ring: The slots for batches.
        where: Its name in errors, as in "Caught ValueError in DataLoader worker process 0", from "in" on.
        threads: How many threads torch may use.

    Attributes:
        writer: Writes batches into the slots.
        clock: Has the stage times of the last answer.
    """

    def __init__(
        self, work: Work | Failure, worker_id: int, workers: int, ring: Ring, where: str, threads: int = 1
    ) -> None:
        self.writer = SlotWriter(ring)
        self._where = where
        self.clock = StageClock()
        self._refusal: Failure | None = None
        if isinstance(work, Failure):
            self._refusal = work
            return
        if work.collate_fn is default_collate:
            work.collate_fn = slot_collate(self.writer, as_torch=not work.keyed)
            work.allocate = self.writer.empty
        try:
            self._worker = start_worker(work, worker_id, workers, threads)
            self.clock = self._worker.clock
        except Exception as error:  # noqa: BLE001 - it is raised in the rank, at the first fetch
            self._refusal = Failure.of(error, where)

    def answer_to(self, sent: Sent, number: int | None) -> list[memoryview]:
        """Unpack a task that was sent, and return the message that holds its batch; see `answer`."""
        try:
            task = task_of(sent)
        except Exception as error:  # noqa: BLE001 - it is raised in the rank
            self.clock.start()
            return self.writer.write(Failure.of(error, self._where))
        return self.answer(task, number)

    def answer(self, task: Task, number: int | None = None) -> list[memoryview]:
        """Return the message that holds a task's batch, or the error in its place."""
        message = self._answer(task, number)
        self.clock.lap(ENCODE)
        return message

    def _answer(self, task: Task, number: int | None) -> list[memoryview]:
        self.writer.begin()
        outcome: Any = self._refusal
        remarks: tuple[Remark, ...] = ()
        if self._refusal is not None:
            self.clock.start()
        else:
            outcome = self._outcome(task, number)
            remarks = tuple(self._worker.remarks)
        try:
            return self.writer.write(Remarked(remarks, outcome) if remarks else outcome)
        except Exception as error:  # noqa: BLE001 - it is raised in the rank
            if not isinstance(error, SlotTooLarge):
                error.add_note(f"headrace: the batch cannot be pickled: {unpicklable_part(outcome, 'batch', error)}")
            failure = Failure.of(error, self._where)
            return self.writer.write(Remarked(remarks, failure) if remarks else failure)

    def _outcome(self, task: Task, number: int | None) -> Any:
        try:
            return self._worker.run(task, number)
        except StopIteration as error:  # raised by collate_fn: with a stream, torch takes it for the stream's end
            return self._worker.end_stream() if isinstance(task, StreamTask) else Failure.of(error, self._where)
        except Exception as error:  # noqa: BLE001 - it is raised in the rank
            return Failure.of(error, self._where)


def serve(end: socket.socket, ring: Ring, server: Server, rank_lives: Callable[[], bool]) -> None:
    """Answer tasks until the rank hangs up or dies.

    Args:
        end: The socket to the rank.
        ring: The server's slots, which the rank gives back together with tasks.
        server: Answers the tasks.
        rank_lives: Tells whether the rank lives; called about once a second while no task comes.
    """
    held: list[memoryview] = []
    answers = 0
    for tasks, returned, dropped in _requests(end, rank_lives):
        for slot in returned:
            ring.release(slot)
        for slot in dropped:
            ring.forget(slot)
        for left, (sent, number) in zip(reversed(range(len(tasks))), tasks, strict=True):
            began_s = time.perf_counter()
            message = server.answer_to(sent, number)
            answers, clock = answers + 1, server.clock
            # The process is asked for each time: user code may have forked a copy that goes on as if it was the worker.
            tail = TAIL.pack(*clock.seconds, clock.wall_s - began_s, answers, os.getpid())
            held += frame([*message, memoryview(tail)])
            size = sum(map(len, held))
            if left and size <= JOINED_BYTES // 2:  # a larger one may still lie in the user's memory, which changes
                continue
            for part in [b"".join(held)] if len(held) > 1 and size <= JOINED_BYTES else held:
                end.sendall(part)
            held.clear()


def _requests(end: socket.socket, rank_lives: Callable[[], bool]) -> Generator[Request, None, None]:
    """Yield what `Wire.hand` sends."""
    received: deque[Request] = deque()
    frames = read_frames(lambda parts: received.append(decode(parts)))
    wanted = next(frames)
    arrival = select.poll()  # recv would also wake up whenever the rank reads, which costs the rank time
    arrival.register(end, select.POLLIN)
    while True:
        if arrival.poll(LIVENESS_S * 1000):
            count = end.recv_into(wanted)
            if not count:
                return
            wanted = frames.send(count)
            while received:
                yield received.popleft()
        elif not rank_lives():
            return
