"""What measuring the stages of each batch costs: the same code with the clocks, and without them."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import Dataset, TensorDataset

from benchmarks.rows import Row, less_is_better
from headrace import DataLoader
from headrace.executors import future
from headrace.executors.link import wire
from headrace.telemetry.stages import StageClock
from headrace.telemetry.stats import Meter
from headrace.worker import worker

RUNS = 15
BATCHES = 4_000
WARM_UP = 200

_CLOCKS = ("perf_counter", "thread_time")


class Ready(Dataset[torch.Tensor]):
    """Batches of 10 KB that are ready; some of them say how much CPU their process has used, in seconds."""

    def __init__(self, length: int = BATCHES) -> None:
        self.batch = torch.zeros(1, 2560)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in (WARM_UP, self.length - 1):
            return torch.full((1, 2560), time.process_time(), dtype=torch.float64)
        return self.batch


def _nothing(*_: Any) -> None:
    pass


def _zeros(clock: StageClock) -> None:
    clock.seconds, clock.wall_s = [0.0] * 8, 0.0


@contextmanager
def without_clocks() -> Iterator[None]:
    """Measure no stages, in this process and in those that it forks. The answers stay as long as they are."""
    changes: list[tuple[Any, str, Any]] = [
        *((StageClock, name, _nothing) for name in ("start", "lap")),
        (StageClock, "__init__", _zeros),
        (Meter, "count_stages", _nothing),
        *((module, name, float) for module in (future, wire, worker) for name in _CLOCKS if hasattr(module, name)),
    ]
    with ExitStack() as stack:
        for where, name, instead in changes:
            stack.enter_context(patch.object(where, name, instead))
        yield


def cpu_per_batch(workers: int) -> tuple[float, ...]:
    """Return the CPU microseconds that the rank and its workers together spend on a batch."""
    reader = iter(DataLoader(Ready(), batch_size=None, num_workers=workers))
    for _ in range(WARM_UP):
        next(reader)
    told_s = [next(reader)[0, 0].item()]  # by the worker
    began_s = time.process_time()
    last = deque(reader, maxlen=1)
    spent_s = time.process_time() - began_s
    if workers:
        spent_s += last.pop()[0, 0].item() - told_s.pop()
    return (spent_s * 1e6 / (BATCHES - WARM_UP),)


def gathered() -> tuple[float, ...]:
    """Return the CPU microseconds that a batch of an in-memory dataset takes in the caller's own process."""
    loader = DataLoader(TensorDataset(torch.zeros(64 * BATCHES, 4)), batch_size=64)
    began_s = time.process_time()
    for _ in loader:
        pass
    return ((time.process_time() - began_s) * 1e6 / BATCHES,)


def stage_times() -> Iterator[Row]:
    """Compare with the same code without clocks, over 60,000 batches each: many short runs in turn."""
    ways: dict[str, Callable[[], tuple[float, ...]]] = {
        "10 KB, 1 worker, CPU of both sides": lambda: cpu_per_batch(1),
        "10 KB, no workers, CPU": lambda: cpu_per_batch(0),
        "64 rows of 4 float32 in memory, in order, CPU": gathered,
    }
    for name, run in ways.items():

        def bare(run: Callable[[], tuple[float, ...]] = run) -> tuple[float, ...]:
            with without_clocks():
                return run()

        yield from less_is_better({name: "us"}, run, bare, "itself without stage times", RUNS)
