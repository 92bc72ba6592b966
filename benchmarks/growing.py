"""A pool that grows by itself beside pools of each fixed size, and a pool that was resized beside fresh ones."""

import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.ray_here import HOST, missing, ray_here
from benchmarks.rows import Row, compared, in_turn
from headrace import DataLoader

RUNS = 3
MOST = 8
BATCH, SAMPLE_S = 4, 0.005
SETTLED = 30
"""The batches for each worker of the best fixed size, after which the time is taken."""

MEASURED = 160
STEPS_S = (0.0025, 0.006, 0.015)
"""The training loop's own time for a batch: a batch takes a worker 20 ms, so that 8, 4 and 2 workers keep up."""


class Remote(Dataset[torch.Tensor]):
    """Samples that come after 5 ms."""

    def __len__(self) -> int:
        return BATCH * 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SAMPLE_S)
        return torch.full((1000,), index)


class Computed(Remote):
    """Samples that take 5 ms of a CPU."""

    def __getitem__(self, index: int) -> torch.Tensor:
        until_s = time.thread_time() + SAMPLE_S
        while time.thread_time() < until_s:
            sum(range(1000))
        return torch.full((1000,), index)


class Reading:
    """A training loop that takes so many seconds for each batch.

    Args:
        step_s: Those seconds.
        dataset: What it reads.
        options: The loader's arguments.
    """

    def __init__(self, step_s: float, dataset: Dataset[torch.Tensor] | None = None, **options: Any) -> None:
        self.loader = DataLoader(dataset or Remote(), BATCH, **options)
        self.step_s = step_s
        self._batches = iter(self.loader)

    def per_batch_s(self, batches: int) -> float:
        """Read on, and return the seconds per batch."""
        began_s = time.perf_counter()
        for _ in range(batches):
            next(self._batches)
            time.sleep(self.step_s)
        return (time.perf_counter() - began_s) / batches


def fixed(step_s: float, workers: int, **options: Any) -> tuple[float, ...]:
    """Return the milliseconds per batch of a pool of fixed size, once all its workers have read some."""
    reading = Reading(step_s, num_workers=workers, **options)
    _warm(reading, workers)
    return (1e3 * reading.per_batch_s(MEASURED),)


def grown(step_s: float, settled: int, **options: Any) -> tuple[float, ...]:
    """Return the milliseconds per batch of a pool that grows from one worker, and its workers in the end."""
    reading = Reading(step_s, num_workers=1, max_workers=MOST, **options)
    reading.per_batch_s(settled)
    return 1e3 * reading.per_batch_s(MEASURED), reading.loader.stats().workers


def resized(workers: int, **options: Any) -> tuple[float, ...]:
    """Return the milliseconds per batch after the number of workers went from 1 to 4, and then to this one."""
    reading = Reading(0.0, num_workers=1, **options)
    for number in (4, workers) if workers != 4 else (4,):
        reading.loader.resize_workers(number)
        _warm(reading, number)
    return (1e3 * reading.per_batch_s(MEASURED),)


def _warm(reading: Reading, workers: int) -> None:
    """Read until all workers are up, and what was asked for before has come."""
    pool: Any = reading._batches._pool
    for batches in count():
        if pool.up == workers and batches > 6 * workers:
            return
        reading.per_batch_s(1)


def growing() -> Iterator[Row]:
    """Compare with the best fixed size of 1 to 8, in the same run, for local processes."""
    local: dict[str, Any] = {"seed": 0, "multiprocessing_context": "fork"}
    yield from _rows("batches of 20 ms", "processes", STEPS_S, local)
    yield from _beside_fixed("batches of 20 ms of a CPU", "processes", 0.0025, local | {"dataset": Computed()})


def ray_growing() -> Iterator[Row]:
    """Compare likewise for workers on Ray, in shared memory."""
    if not missing("ray"):
        ray_here()
        yield from _rows("batches of 20 ms", "Ray in shared memory", STEPS_S[1:2], {"seed": 0, "executor": HOST})


def _rows(work: str, where: str, steps_s: tuple[float, ...], options: dict[str, Any]) -> Iterator[Row]:
    for step_s in steps_s:
        yield from _beside_fixed(work, where, step_s, options)
    for workers in (4, 2):
        ways = {"ours": partial(resized, workers, **options), "fresh": partial(fixed, 0.0, workers, **options)}
        both = in_turn(ways, RUNS)
        way = "1 to 4" if workers == 4 else "1 to 4 to 2"
        name = f"{work}, resized from {way} workers, {where}"
        yield from compared({name: "ms"}, both["ours"], both["fresh"], f"a fresh pool of {workers}")


def _beside_fixed(work: str, where: str, step_s: float, options: dict[str, Any]) -> Iterator[Row]:
    """Compare with the smallest fixed size that is within 5 % of the fastest, each of them run once to find it."""
    ways = {f"{size} workers": partial(fixed, step_s, size, **options) for size in range(1, MOST + 1)}
    sizes = {name: runs[0][0] for name, runs in in_turn(ways, 1).items()}
    print({name: f"{ms:.2f} ms" for name, ms in sizes.items()}, flush=True)
    best, fewest = next(
        (name, size) for size, (name, ms) in enumerate(sizes.items(), 1) if ms <= min(sizes.values()) / 0.95
    )
    both = in_turn({"ours": partial(grown, step_s, SETTLED * fewest, **options), best: ways[best]}, RUNS)
    print(f"best: {best}; ours in the end: {[int(run[1]) for run in both['ours']]}", flush=True)
    name = f"{work}, steps of {1e3 * step_s:g} ms, max_workers={MOST}, {where}"
    yield from compared({name: "ms"}, both["ours"], both[best], f"the best of 1 to {MOST} workers")
