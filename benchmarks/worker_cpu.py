"""The CPU time of a worker whose samples are cheap, beside a plain loop in one process and a worker of torch's."""

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, default_collate

from benchmarks.rows import Row, compared, in_turn
from headrace import DataLoader
from headrace.plan import Plan, Shuffled

RUNS = 15
SAMPLES, BATCH_SIZE, SEED = 40_000, 100, 3
WARM_UP = 20
"""Batches that are not counted."""


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images of 28 × 28 bytes, scaled to 0 … 1, and labels; nothing is drawn."""

    def __init__(self) -> None:
        self.images = torch.randint(0, 256, (SAMPLES, 28, 28), dtype=torch.uint8)
        self.labels = torch.randint(0, 10, (SAMPLES,)).tolist()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index].float().div(255), self.labels[index]


_modes: list[torch.inference_mode] = []


def without_gradients(worker_id: int) -> None:
    """Have a worker record nothing for gradients, until it ends."""
    _modes.append(torch.inference_mode())
    _modes[-1].__enter__()


def of_worker(loader: Any) -> tuple[float, ...]:
    """Return the CPU microseconds that the only worker of a loader spends on a sample."""
    reader = iter(loader)
    for _ in range(WARM_UP):
        next(reader)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    clock = (~worker.pid << 3) | 2  # Linux's clock of another process
    begun_s = time.clock_gettime(clock)
    for _ in range(WARM_UP, len(loader)):
        next(reader)
    return ((time.clock_gettime(clock) - begun_s) * 1e6 / (SAMPLES - WARM_UP * BATCH_SIZE),)


def _loop(end: Connection, dataset: Images, steps: list[list[int]]) -> None:
    torch.set_num_threads(1)
    gc.freeze()
    begun_s = 0.0
    for number, step in enumerate(steps):
        if number == WARM_UP:
            begun_s = time.thread_time()
        default_collate([dataset[index] for index in step])
    end.send(time.thread_time() - begun_s)


def of_loop(dataset: Images, steps: list[list[int]]) -> tuple[float, ...]:
    """Return the CPU microseconds of a sample in a plain loop, in a process of its own as a worker has."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_loop, args=(theirs, dataset, steps))
    process.start()
    spent_s: float = ours.recv()
    process.join()
    return (spent_s * 1e6 / (SAMPLES - WARM_UP * BATCH_SIZE),)


def worker_cpu() -> Iterator[Row]:
    """Compare with a loop over the same samples in the same order, and with torch's worker."""
    dataset = Images()
    plan = Plan(Shuffled(), SAMPLES, BATCH_SIZE, seed=SEED)
    steps = [plan.batch(0, step).tolist() for step in range(SAMPLES // BATCH_SIZE)]

    def ours(**options: Any) -> tuple[float, ...]:
        return of_worker(DataLoader(dataset, BATCH_SIZE, shuffle=True, seed=SEED, num_workers=1, **options))

    ways: dict[str, Callable[[], tuple[float, ...]]] = {
        "ours": ours,
        "in inference mode": lambda: ours(worker_init_fn=without_gradients),
        "a plain loop": lambda: of_loop(dataset, steps),
        "torch": lambda: of_worker(TorchLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=1)),
    }
    taken = in_turn(ways, RUNS)
    name = "28 × 28 images, batches of 100, a worker's CPU for a sample"
    for rival in ("a plain loop", "torch"):
        yield from compared({name: "us"}, taken["ours"], taken[rival], rival)
    yield from compared(
        {f"{name}, in inference mode": "us"}, taken["in inference mode"], taken["a plain loop"], "a plain loop"
    )
