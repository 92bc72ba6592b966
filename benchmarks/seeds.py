"""What seeding costs a sample whose dataset draws from torch alone, or from nothing."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.rows import Row, compared, in_turn
from headrace.plan import Plan, Sequential
from headrace.types import PlanTask
from headrace.worker import worker
from headrace.worker.seeding import Seeder
from headrace.worker.work import Work

RUNS = 9
SAMPLES = 50_000
WARM = 3
"""Batches that are not counted: in the first, all generators are seeded."""


class Cheap:
    """Samples that cost next to nothing."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Drawing(Cheap):
    """Samples that draw one number of torch's."""

    def __getitem__(self, index: int) -> int:
        torch.rand(())
        return index


def _kept(samples: Any) -> None:
    return None


def cpu(dataset: Cheap, batch_size: int, seeded: bool, shared: bool) -> float:
    """Return the CPU microseconds of a sample in a worker."""
    work = Work(dataset, _kept, batched=True, plan=Plan(Sequential(), SAMPLES, batch_size))
    one, steps = worker.Worker(work), SAMPLES // batch_size
    one._seeder = Seeder(shared)
    for step in range(WARM):
        one.run(PlanTask(0, step), step, seeded)
    begun = time.thread_time()
    for step in range(WARM, steps):
        one.run(PlanTask(0, step), step, seeded)
    return (time.thread_time() - begun) / (steps - WARM) / batch_size * 1e6


def cost(dataset: Cheap, batch_size: int, shared: bool) -> tuple[float, ...]:
    """Return the CPU microseconds that seeding takes of a sample."""
    return (cpu(dataset, batch_size, True, shared) - cpu(dataset, batch_size, False, shared),)


def seeds() -> Iterator[Row]:
    """Compare with seeding all three generators for each sample."""
    for dataset, draws in ((Cheap(), "nothing"), (Drawing(), "from torch")):
        for batch_size in (32, 100):
            ways = {name: partial(cost, dataset, batch_size, name == "all") for name in ("ours", "all")}
            taken = in_turn(ways, RUNS)
            name = f"seeds of a sample that draws {draws}, batches of {batch_size}, CPU"
            yield from compared({name: "us"}, taken["ours"], taken["all"], "all three generators seeded")
