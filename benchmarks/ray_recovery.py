"""The delay of a batch when a Ray worker is killed, or the node of half of the workers, compared with no kill."""

import gc
import importlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.ray_here import CPUS, PLANES, WORKERS, missing, on_ray, ray_here
from benchmarks.rows import Row, compared
from headrace import RayExecutor
from headrace.executors.ray.idle import IDLE_ACTORS

KILLS, NODE_KILLS = 10, 5

AFTER = 6 * WORKERS
"""The number of batches whose longest gap counts: those requested before a kill, and as many again."""


class Timed(Dataset[torch.Tensor]):
    """Samples that take some time; each is the id of the process that made it.

    Args:
        task_s: The time of a sample, in seconds.
    """

    def __init__(self, task_s: float) -> None:
        self.task_s = task_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.task_s)
        return torch.tensor(os.getpid())


class Stream:
    """An epoch that is read while workers die and start.

    Args:
        reader: The reader of a loader of `Timed`.
    """

    def __init__(self, reader: Iterator[Any]) -> None:
        self._reader = reader
        self._recent: deque[int] = deque(maxlen=2 * WORKERS)  # twice: a worker may make two batches in a row

    def _next(self) -> None:
        self._recent.append(int(next(self._reader)))

    def longest(self, event: Callable[[], object] | None = None) -> float:
        """Read batches after an event; return the longest time for a batch, in milliseconds."""
        longest, began = 0.0, time.perf_counter()
        if event is not None:
            event()
        for _ in range(AFTER):
            self._next()
            now = time.perf_counter()
            longest, began = max(longest, now - began), now
        return longest * 1e3

    def complete(self) -> None:
        """Read on until the last batches come from all workers."""
        while len(set(self._recent)) < WORKERS:
            self._next()

    def due(self) -> int:
        """Return the process whose last batch is the oldest: workers take turns, so the next batch is due from it."""
        return max(set(self._recent), key=[*reversed(self._recent)].index)


def rows(name: str, gaps: list[tuple[float, float]]) -> list[Row]:
    """Compare the longest gaps after kills with those before: their median, and the longest of all."""
    after, before = [(gap,) for gap, _ in gaps], [(gap,) for _, gap in gaps]
    found = compared({name: "ms"}, after, before, "nobody killed")
    return found + compared({f"{name}, longest of {len(gaps)}": "ms"}, [max(after)], [max(before)], "nobody killed")


def killed(executor: RayExecutor, task_s: float) -> list[tuple[float, float]]:
    """Kill workers, each time the one of the next batch; return the longest gaps after and before."""
    stream = Stream(iter(on_ray(Timed(task_s), 1, executor, seed=0)))
    gaps = []
    for _ in range(KILLS):
        stream.complete()
        before = stream.longest()
        stream.complete()
        gaps.append((stream.longest(lambda: os.kill(stream.due(), signal.SIGKILL)), before))
    return gaps


def node_killed(cluster: Any, executor: RayExecutor, task_s: float) -> list[tuple[float, float]]:
    """Kill the second node, with half of the workers, several times; return the longest gaps after and before."""
    executor = replace(executor, resources={"seat": 1})
    gaps = []
    for _ in range(NODE_KILLS):
        node = cluster.add_node(num_cpus=CPUS, resources={"seat": WORKERS // 2})
        stream = Stream(iter(on_ray(Timed(task_s), 1, executor, seed=0)))
        stream.complete()
        before = stream.longest()
        stream.complete()
        kill = threading.Thread(target=cluster.remove_node, args=(node,), kwargs={"allow_graceful": False})
        gaps.append((stream.longest(kill.start), before))
        kill.join()
        del stream
        gc.collect()
    return gaps


def ray_recovery() -> Iterator[Row]:
    """Compare the longest time of a batch after a kill with the longest before it in the same stream."""
    if missing("ray"):
        return
    ray = ray_here()
    for task_s in (0.05, 0.3):
        for plane, executor in PLANES.items():
            name = f"a batch after a worker's kill, {WORKERS} of {task_s * 1e3:.0f} ms, {plane}"
            yield from rows(name, killed(executor, task_s))
    IDLE_ACTORS.clear()
    ray.shutdown()
    cluster = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": CPUS, "resources": {"seat": WORKERS // 2}}
    )
    try:
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        for plane, executor in PLANES.items():
            name = f"a batch after a node's kill, {WORKERS} of 300 ms, {plane}"
            yield from rows(name, node_killed(cluster, executor, 0.3))
    finally:
        ray.shutdown()
        cluster.shutdown()
