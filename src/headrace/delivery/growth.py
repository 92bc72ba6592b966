"""Pools that grow and shrink by themselves: a reader notes what its batches took, and rules say how many workers."""

import weakref

from headrace.executors.base import Pool
from headrace.telemetry.stages import Packed, StageTimes
from headrace.tuning.growing import Growing


class Growth:
    """The number of workers of one loader, over all its epochs.

    Args:
        least: The smallest number.
        most: The largest number.
        cpus: CPUs that the workers may use together; infinite where they are not this machine's.
        ahead: How many batches are asked for in advance, for each worker.
        workers: The number to begin with.
    """

    def __init__(self, least: int, most: int, cpus: float, ahead: int, workers: int) -> None:
        self._pool: weakref.ref[Pool] | None = None  # of the pass that began last
        self._rules = Growing(least, most, cpus, self._room_for, workers, ahead)
        self._began_s = self._wait_s = 0.0
        self._stages: Packed | None = None

    @property
    def workers(self) -> int:
        """How many workers there should be."""
        return self._rules.workers

    def go_on_from(self, workers: int) -> None:
        """Have another number of workers, as the user says."""
        self._rules.go_on_from(workers)

    def begin(self, pool: Pool) -> None:
        """Note that a pass begins. Older passes that go on are left alone."""
        new_workers = self._pool is None or self._pool() is not pool
        self._pool = weakref.ref(pool)
        self._began_s = self._wait_s = 0.0
        self._stages = None
        self._rules.begin(new_workers)

    def waited(self, seconds: float) -> None:
        """Note that the trainer has waited for the workers."""
        self._wait_s += seconds

    def delivers(self, stages: Packed | None) -> None:
        """Note what a worker spent on the batch that is being delivered."""
        self._stages = stages

    def step(self, now_s: float, pool: Pool) -> None:
        """Note that the next batch is asked for, and start or end workers if there should be more or fewer.

        Args:
            now_s: The time, in seconds.
            pool: The workers.
        """
        if pool.broken or self._pool is None or self._pool() is not pool:
            return
        began_s, wait_s, stages = self._began_s, self._wait_s, self._stages
        self._began_s, self._wait_s, self._stages = now_s, 0.0, None
        if not began_s or stages is None:
            return
        step_s, times = now_s - began_s, StageTimes.unpacked(stages)
        wanted = self._rules.note(step_s, min(wait_s, step_s), sum(times[::2]), sum(times[1::2]), pool.up)
        if wanted != pool.workers:
            try:
                pool.resize(wanted)
            except OSError:  # the system refuses another process or descriptor
                self._rules.refuse()
                pool.resize(self._rules.workers)

    def _room_for(self, more: int) -> int:
        pool = None if self._pool is None else self._pool()
        return 0 if pool is None else pool.room_for(more)
