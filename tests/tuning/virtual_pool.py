"""A pool of workers in virtual time, and a trainer that reads from it: how fast it is, and how many workers it has.

Tasks are dealt in order to the worker that is free first. A task waits for storage, then for one of the CPUs, then
computes there; and where storage serves only so many tasks at a time, it first waits for that, too.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.tuning.growing import Growing

PREFETCH = 2


@dataclass(frozen=True)
class Load:
    """What a batch costs, and what the trainer does between two.

    Attributes:
        sleep_s: Seconds of each batch without the CPU.
        cpu_s: CPU seconds of each batch.
        own_s: Seconds of each step of the trainer.
        cpus: CPUs that the workers share.
        channels: How many tasks storage serves at a time.
        up_s: Seconds until a new worker is up.
        cold: How many batches of a new worker take twice as long.
    """

    sleep_s: list[float]
    cpu_s: list[float]
    own_s: list[float]
    cpus: int = 10**6
    channels: int = 10**6
    up_s: float = 0.0
    cold: int = 3


@dataclass
class Run:
    """What happened.

    Attributes:
        ended_s: When each step ended.
        sizes: The number of workers at each step.
    """

    ended_s: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def step_s(self, first: int, last: int) -> float:
        """Return the mean seconds of the steps from one to another."""
        return (self.ended_s[last - 1] - self.ended_s[first - 1]) / (last - first)

    def moves(self, first: int = 0) -> list[tuple[int, int]]:
        """Return at which step, from one on, which number of workers came."""
        sizes = self.sizes
        return [(at, sizes[at]) for at in range(max(1, first), len(sizes)) if sizes[at] != sizes[at - 1]]


class VirtualPool:
    """The workers: each is free from a time on, and up from a time on."""

    def __init__(self, load: Load, workers: int, up_s: float = 0.0) -> None:
        self._load = load
        self._free = [up_s] * workers
        self._up = [up_s] * workers
        self._cold = [load.cold] * workers
        self._cpus = [0.0] * load.cpus if load.cpus < 10**6 else []
        self._channels = [0.0] * load.channels if load.channels < 10**6 else []
        self.workers = workers

    def up(self, now_s: float) -> int:
        return sum(one <= now_s for one in self._up)

    def resize(self, workers: int, now_s: float) -> None:
        del self._free[workers:], self._up[workers:], self._cold[workers:]
        for _ in range(workers - len(self._free)):
            self._free.append(now_s + self._load.up_s)
            self._up.append(now_s + self._load.up_s)
            self._cold.append(self._load.cold)
        self.workers = workers

    def submit(self, task: int, now_s: float) -> tuple[float, float, float]:
        """Return when a task is done, and the seconds and CPU seconds of its worker."""
        load, free = self._load, self._free
        worker = min(range(len(free)), key=free.__getitem__)
        began_s = at_s = max(now_s, free[worker])
        sleep_s, cpu_s = load.sleep_s[task], load.cpu_s[task]
        if self._cold[worker]:
            self._cold[worker] -= 1
            sleep_s, cpu_s = 2 * sleep_s, 2 * cpu_s
        for servers, takes_s in ((self._channels, sleep_s), (self._cpus, cpu_s)):
            if servers and takes_s:
                at_s = max(at_s, servers[0]) + takes_s
                heapq.heapreplace(servers, at_s)
            else:
                at_s += takes_s
        free[worker] = at_s
        return at_s, at_s - began_s, cpu_s


def run(
    load: Load,
    workers: int,
    growing: Growing | None = None,
    steps: int | None = None,
    watch: Callable[[int, VirtualPool], Any] | None = None,
) -> Run:
    """Read batches, with a fixed number of workers or one that is decided on the way.

    Args:
        load: The load.
        workers: The number of workers at the beginning.
        growing: What decides on their number.
        steps: How many steps; all that the load has if it is None.
        watch: Called at each step.
    """
    steps = len(load.own_s) if steps is None else steps
    pool, found = VirtualPool(load, workers), Run()
    window: deque[tuple[float, float, float]] = deque()
    now_s, asked = 0.0, 0
    if growing is not None:
        growing.begin(new_workers=True)
    for step in range(steps):
        while asked < len(load.sleep_s) and len(window) < PREFETCH * pool.workers:
            window.append(pool.submit(asked, now_s))
            asked += 1
        done_s, work_s, cpu_s = window.popleft()
        waited_s = max(0.0, done_s - now_s)
        ended_s = now_s + waited_s + load.own_s[step]
        # The next task is submitted as soon as the batch is there.
        if asked < len(load.sleep_s) and len(window) < PREFETCH * pool.workers:
            window.append(pool.submit(asked, now_s + waited_s))
            asked += 1
        step_s, now_s = ended_s - now_s, ended_s
        found.ended_s.append(now_s)
        found.sizes.append(pool.workers)
        if watch is not None:
            watch(step, pool)
        if growing is not None:
            wanted = growing.note(step_s, waited_s, work_s, cpu_s, pool.up(now_s))
            if wanted != pool.workers:
                pool.resize(wanted, now_s)
    return found


def times(draw: np.random.Generator, kind: str, mean_s: float, count: int) -> list[float]:
    """Return random times with a mean."""
    if kind == "constant":
        return [mean_s] * count
    if kind == "exponential":
        return list((draw.exponential(mean_s, count)).tolist())
    if kind == "lognormal":
        return list((mean_s * draw.lognormal(-0.5 * 0.6**2, 0.6, count)).tolist())
    assert kind == "bursts"  # one batch in twenty takes ten times as long
    return list((mean_s / 1.45 * np.where(draw.random(count) < 0.05, 10.0, 1.0)).tolist())
