"""Throughput of W Ray workers that wait for their data, compared with W times one worker's, and with Ray Data."""

import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.ray_here import PLANES, STORE, Blocks, has_data, missing, on_ray, ray_here, warm
from benchmarks.rows import Row, compared, in_turn

RUNS = 7
SAMPLE_S, BATCH = 0.02, 16
WORKERS = (16, 8, 4, 2, 1)
"""The largest first: the others use its actors again."""

ROUNDS = 6
"""The number of timed batches of each worker."""


class Remote(Dataset[torch.Tensor]):
    """Samples that come after 20 ms."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SAMPLE_S)
        return torch.full((1000,), index)


def per_batch(loader: Any, first: int) -> tuple[float, ...]:
    """Return the milliseconds per batch after the first ones, in whole rounds, which all workers end together."""
    reader = iter(loader)
    for _ in islice(reader, first):
        pass
    start = time.perf_counter()
    count = sum(1 for _ in reader)
    return ((time.perf_counter() - start) * 1e3 / count,)


def ideal(dataset: Remote, workers: int) -> tuple[float, ...]:
    """Return the time of a batch in a plain loop, some more than 320 ms, divided by W, in milliseconds."""
    start = time.perf_counter()
    for index in range(ROUNDS * BATCH):
        dataset[index]
    return ((time.perf_counter() - start) * 1e3 / ROUNDS / workers,)


def ray_scaling() -> Iterator[Row]:
    """Compare with the ideal, a batch's time divided by W, and with Ray Data with W tasks at a time.

    Ray Data comes last: its idle workers keep a CPU busy for seconds after its epoch.
    """
    if missing("ray"):
        return
    ray_here()
    ours: Any = None
    for workers in WORKERS:
        dataset, first = remote(workers)
        for plane, executor in PLANES.items():
            ours = None  # the next loader uses its actors
            ours = warm(on_ray(dataset, BATCH, executor, workers))
            ways = {"ours": partial(per_batch, ours, first), "ideal": partial(ideal, dataset, workers)}
            taken = in_turn(ways, RUNS)
            del ways
            names = {f"16 samples of 20 ms, {workers} worker(s), {plane}": "ms"}
            yield from compared(names, taken["ours"], taken["ideal"], f"a plain loop / {workers}")
    for workers in WORKERS if has_data() else ():
        dataset, first = remote(workers)
        ours = None
        ours = warm(on_ray(dataset, BATCH, STORE, workers))
        batches = len(dataset) // BATCH
        theirs = Blocks(dataset, batches, BATCH, workers, batches)
        per_batch(theirs, first)  # its worker processes start
        taken = in_turn({"ours": partial(per_batch, ours, first), "Ray Data": partial(per_batch, theirs, first)}, 3)
        names = {f"16 samples of 20 ms, {workers} worker(s), Ray through its store": "ms"}
        yield from compared(names, taken["ours"], taken["Ray Data"], "Ray Data")


def remote(workers: int) -> tuple[Remote, int]:
    """Return a dataset for this number of workers, and the number of its first batches that are not timed."""
    first = max(2, workers)
    return Remote((first + ROUNDS * workers) * BATCH), first
