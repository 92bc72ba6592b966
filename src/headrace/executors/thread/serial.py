"""Batches computed one at a time for the caller: the first one, and those whose draws must be seeded."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from headrace.executors.future import Future
from headrace.executors.thread.compute_lock import DeadlinePassed, compute_lock
from headrace.executors.thread.delegated import DelegatedBatch, Outcome
from headrace.executors.thread.threads import Job, WorkerThreads, fill, outcome_of, stream_remark
from headrace.randomness import Generators, Lease, callers_generators_kept, thread_randomness
from headrace.system.interrupts import InterruptsHeld
from headrace.system.torch_threads import one_torch_thread
from headrace.types import Remark, StreamTask
from headrace.worker.fetch import drawing_remark
from headrace.worker.worker import Worker

FALSE_ALARMS = 8
"""After this number of batches in a row whose generators only the training loop moved, all batches are computed
serially: computing each one twice would cost more."""


class SerialComputing:
    """Computes batches for the caller while no other thread computes one.

    Args:
        threads: The worker threads of the pool.
    """

    def __init__(self, threads: WorkerThreads) -> None:
        self._threads = threads

    def compute(self, futures: Sequence[Future], deadline: float | None) -> bool:
        """Compute the caller's job, if there is one; return whether that was done by the deadline."""
        threads = self._threads
        with InterruptsHeld() as held:
            with compute_lock.mutex:
                job = threads.callers_job(futures)
                future = None if job is None else job.future()
                if job is None or future is None:  # a thread has just taken it
                    return True
                threads.queue.remove(job)
            try:
                with held.allowed():
                    self._compute(job, future, deadline)
            except DeadlinePassed:
                return False
            finally:
                if not future.done():  # the deadline has passed, or a Ctrl-C came: it is computed later
                    threads.put_back(job)
        return True

    def _compute(self, job: Job, future: Future, deadline: float | None) -> None:
        threads = self._threads
        worker = threads.workers[job.worker or 0]
        failure = threads.init_failures[worker.worker_id]
        if failure is not None:
            threads.probed = True
            future.resolve(failure)
            return
        (outcome, error), drew = self._exclusively(worker, job, future.remarks, deadline)
        future.packed_stages = worker.clock.packed()
        if job.again and drew is False:
            threads.false_alarms += 1
            if threads.false_alarms >= FALSE_ALARMS:
                threads.serial = True
                future.remarks.append(
                    "the training loop draws from the global generators of torch, random or numpy. Whether a batch "
                    "that was computed in a thread did so too shows only when it is computed twice, so from now on "
                    "batches are computed in the calling thread, one at a time. Give the loop generators of its own, "
                    'or use executor="process".'
                )
        fill(future, outcome, error)
        del error  # its traceback refers to this frame, which refers to it

    def _exclusively(
        self, worker: Worker, job: Job, remarks: list[Remark], deadline: float | None
    ) -> tuple[Outcome, bool | None]:
        """Compute a batch exclusively: unseeded first, then seeded if it draws; only seeded if it is known to draw.

        Returns:
            The outcome, and whether the batch was seen to draw; None if that was known before.

        Raises:
            DeadlinePassed: It is not done by the deadline.
        """
        threads = self._threads
        with InterruptsHeld() as held, compute_lock.exclusive(held, deadline), threads.as_worker(worker.worker_id):
            if job.number is None:
                job.worker, job.number = worker.worker_id, worker.count()
            drew: bool | None = None
            said: list[Remark] = []
            if not threads.serial:
                with held.allowed():
                    outcome, moved = self._watched(worker, job, deadline)
                threads.probed = True
                drew = bool(moved)
                if moved and isinstance(job.task, StreamTask):
                    said.append(stream_remark(moved))
                elif moved:
                    threads.serial = True
                    how = "batches are computed one at a time from now on"
                    said.append(drawing_remark(moved, 'executor="thread"', how))
            if threads.serial:
                with held.allowed():
                    outcome = self._seeded(worker, job, deadline)
            remarks[:] = said + worker.remarks  # assigned, not added: after a Ctrl-C the batch is computed again
        try:
            return outcome, drew
        finally:
            del outcome  # it may hold an error, whose traceback refers to this frame

    def _watched(self, worker: Worker, job: Job, deadline: float | None) -> tuple[Outcome, list[str]]:
        """Compute a batch unseeded; return the names of the generators that moved, too, after restoring them."""
        compute = partial(outcome_of, worker, partial(worker.run, job.task, job.number, seeded=False))
        if deadline is not None or worker.worker_id in self._threads.delegated:
            return self._delegate(worker, DelegatedBatch(job.task, compute, False, thread_randomness.lease), deadline)
        with one_torch_thread(), InterruptsHeld() as held:
            before = Generators()
            try:
                with held.allowed():
                    return compute(), before.moved()  # no variable: an error's traceback would refer to it
            finally:
                before.restore()

    def _seeded(self, worker: Worker, job: Job, deadline: float | None) -> Outcome:
        compute = partial(outcome_of, worker, partial(worker.run_inline, job.task, job.number))
        if deadline is not None or worker.worker_id in self._threads.delegated:
            return self._delegate(worker, DelegatedBatch(job.task, compute, True, Lease()), deadline)[0]
        return compute()

    def _delegate(self, worker: Worker, batch: DelegatedBatch, deadline: float | None) -> tuple[Outcome, list[str]]:
        """Let a worker's thread compute a batch, and wait for it.

        If the thread still computes a batch of an earlier call, it finishes that first; it may be the same batch.
        """
        delegated = self._threads.delegated
        running = delegated.get(worker.worker_id)
        if running is not None:
            running.wait(delegated, worker.worker_id, deadline)
            # After the caller took the generators back, a seeded batch may have drawn other numbers. A stream's batch
            # is used in any case: its samples cannot be read again.
            right = not (batch.seeded or running.seeded or running.moved) or isinstance(batch.task, StreamTask)
            del delegated[worker.worker_id]
            outcome = running.take()
            if running.task is batch.task and right:
                return outcome, running.moved
        with callers_generators_kept() if batch.seeded else nullcontext():
            batch.wait(delegated, worker.worker_id, deadline)
        del delegated[worker.worker_id]
        return batch.take(), batch.moved
