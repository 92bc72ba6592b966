"""Workers on Ray that wait for their data: how near W of them come to W times the batches, beside Ray Data."""

import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.ray_here import STORE, Blocks, has_data, missing, on_ray, ray_here, warm
from benchmarks.rows import Row, compared, in_turn

RUNS = 3
SAMPLE_S, BATCH = 0.02, 16
ROUNDS = 6
"""How many batches each worker makes while the clock runs."""


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
    """Return the milliseconds per batch after the first ones: whole rounds, since all workers end one together."""
    reader = iter(loader)
    for _ in islice(reader, first):
        pass
    start = time.perf_counter()
    count = sum(1 for _ in reader)
    return ((time.perf_counter() - start) * 1e3 / count,)


def ray_scaling() -> Iterator[Row]:
    """Compare with the most that there could be, a batch's 320 ms over W; and with W tasks at a time in Ray Data."""
    if missing("ray"):
        return
    ray_here()
    with_data = has_data()
    for workers in (16, 8, 4, 2, 1):  # the largest first: the others find its actors
        first = max(2, workers)
        batches = first + ROUNDS * workers
        dataset = Remote(batches * BATCH)
        ways: dict[str, Any] = {"ours": warm(on_ray(dataset, BATCH, STORE, workers))}
        if with_data:
            ways["Ray Data"] = Blocks(dataset, batches, BATCH, workers, batches)
            per_batch(ways["Ray Data"], first)  # its worker processes start
        taken = in_turn({name: partial(per_batch, way, first) for name, way in ways.items()}, RUNS)
        del ways
        names = {f"16 samples of 20 ms, {workers} worker(s), Ray through its store": "ms"}
        yield from compared(names, taken["ours"], [(SAMPLE_S * BATCH * 1e3 / workers,)], f"320 ms / {workers}")
        if with_data:
            yield from compared(names, taken["ours"], taken["Ray Data"], "Ray Data")
