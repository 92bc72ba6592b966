"""Local workers compared with torch's: moving batches, the rank's own CPU time, and starting."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
from torch.utils.data import DataLoader as Torch
from torch.utils.data import Dataset

from benchmarks.rows import Row, less_is_better
from headrace import DataLoader
from headrace.executors.process.pool import let_workers_end

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it calls what torch has deprecated
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

RUNS = 7
WARM_UP = 6
"""The first batches, which are not counted: workers start, slots are made."""


class Repeated(Dataset[Any]):
    """Samples made by a function without arguments, at no cost: moving batches is the only work."""

    def __init__(self, make: Callable[[], Any], length: int) -> None:
        self.make = make
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make()


def listed(samples: list[Any]) -> list[Any]:
    """Collate nothing."""
    return samples


def stacked(samples: list[Any]) -> Any:
    """Collate to one array."""
    return np.stack(samples)


def first(samples: list[Any]) -> Any:
    """Collate to the only sample."""
    return samples[0]


def per_batch(kind: Any, dataset: Dataset[Any], batch_size: int, workers: int, **options: Any) -> tuple[float, ...]:
    """Return the milliseconds per batch, and the rank's CPU microseconds per batch."""
    loader = kind(dataset, batch_size=batch_size, num_workers=workers, **options)
    reader = iter(loader)
    for _ in range(WARM_UP):
        next(reader)
    start, cpu = time.perf_counter(), time.process_time()
    count = sum(1 for _ in reader)
    return (time.perf_counter() - start) * 1e3 / count, (time.process_time() - cpu) * 1e6 / count


def beside_torch(
    name: str,
    make: Callable[[], Any],
    batches: int,
    batch_size: int,
    workers: int,
    rival: tuple[str, Any] = ("torch", Torch),
    **options: Any,
) -> list[Row]:
    """Compare with torch's loader, or another rival, on one dataset object, in turn."""
    dataset = Repeated(make, batches * batch_size)
    return less_is_better(
        {f"{name}, {workers} worker(s)": "ms", f"{name}, {workers} worker(s), rank CPU": "us"},
        lambda: per_batch(DataLoader, dataset, batch_size, workers, **options),
        lambda: per_batch(rival[1], dataset, batch_size, workers, **options),
        rival[0],
        RUNS,
    )


def copied(megabytes: float) -> tuple[float, ...]:
    """Return the milliseconds of copying this many bytes between two warm buffers: nothing can be faster."""
    source = np.ones(int(megabytes * 1e6), np.uint8)
    target = source.copy()
    start = time.perf_counter()
    for _ in range(10):
        np.copyto(target, source)
    return ((time.perf_counter() - start) * 1e3 / 10,)


def limits() -> Iterator[Row]:
    """Compare default collation with its lower limit: one copy of the batch, on one core."""
    for name, sample, batches, batch_size in (
        ("38 MB float32, default collation", torch.rand(3, 224, 224), 40, 64),
        ("4.8 MB uint8, default collation", torch.zeros(3, 224, 224, dtype=torch.uint8), 100, 32),
    ):
        dataset = Repeated(partial(torch.Tensor.detach, sample), batches * batch_size)
        megabytes = sample.nbytes * batch_size / 1e6
        yield from less_is_better(
            {f"{name}, 1 worker(s)": "ms"},
            partial(per_batch, DataLoader, dataset, batch_size, 1),
            partial(copied, megabytes),
            "a memcpy",
            RUNS,
        )


def transfer() -> Iterator[Row]:
    """Compare batches of several kinds and sizes."""
    image = torch.rand(3, 224, 224)
    digit = torch.rand(1, 28, 28)
    small = torch.zeros(3, 224, 224, dtype=torch.uint8)
    array = image.numpy()
    # Different objects: pickle sends an object that occurs twice only once.
    arrays, texts = cycle([array.copy() for _ in range(64)]), cycle([bytes([one]) * 602_112 for one in range(64)])
    blob = bytes(38_000_000)
    for workers in (1, 2):
        yield from beside_torch("38 MB float32, default collation", lambda: image, 40, 64, workers)
        yield from beside_torch("100 x 28x28, default collation", lambda: digit, 300, 100, workers)
        yield from beside_torch("38 MB as a list of arrays", lambda: next(arrays), 20, 64, workers, collate_fn=listed)
        yield from beside_torch("38 MB as one stacked array", lambda: array, 20, 64, workers, collate_fn=stacked)
        yield from beside_torch("38 MB as a list of bytes", lambda: next(texts), 20, 64, workers, collate_fn=listed)
        yield from beside_torch("38 MB as one bytes", lambda: blob, 20, 1, workers, collate_fn=first)
        stateful = "torchdata", StatefulDataLoader
        yield from beside_torch("38 MB float32, default collation", lambda: image, 20, 64, workers, stateful)
        yield from beside_torch("100 x 28x28, default collation", lambda: digit, 100, 100, workers, stateful)
    yield from beside_torch("38 MB float32, default collation", lambda: image, 40, 64, workers=0)
    yield from limits()
    for workers in (1, 2, 4):
        yield from beside_torch("4.8 MB uint8, default collation", lambda: small, 100, 32, workers)


def epochs(kind: Any, dataset: Dataset[Any], count: int) -> tuple[float, ...]:
    """Return the milliseconds per epoch of several in a row, each of ten batches by four new workers.

    Our workers end in the background. After the last epoch this is waited for, but not counted, so that it does not
    slow the rival's run; before that it overlaps the next epoch.
    """
    start = time.perf_counter()
    for _ in range(count):
        assert sum(1 for _ in kind(dataset, batch_size=4, num_workers=4)) == 10
    took_ms = (time.perf_counter() - start) * 1e3 / count
    let_workers_end(60)
    return (took_ms,)


class Collecting(Dataset[float]):
    """Yields a worker's own memory, in MiB, after it has collected garbage."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        gc.collect()
        return float(psutil.Process().memory_full_info().uss / 2**20)


def own_memory(kind: Any) -> tuple[float, ...]:
    """Return the MiB that a forked worker does not share, after a full garbage collection."""
    return tuple(kind(Collecting(), batch_size=None, num_workers=1, multiprocessing_context="fork"))


class Pairs(Dataset[int]):
    """1.3 million pairs of a path and a label."""

    def __init__(self) -> None:
        self.pairs = [(f"/data/train/class{one % 1000}/image{one}.jpg", one % 1000) for one in range(1_300_000)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> int:
        return self.pairs[index][1]


def spawned(kind: Any, dataset: Dataset[Any]) -> tuple[float, ...]:
    """Return the milliseconds to the first batch of four spawned workers."""
    loader = kind(dataset, batch_size=4, num_workers=4, multiprocessing_context="spawn")
    start = time.perf_counter()
    reader = iter(loader)
    next(reader)
    return ((time.perf_counter() - start) * 1e3,)


def start() -> Iterator[Row]:
    """Compare restarts, and the first batch of spawned workers with a large dataset."""
    tiny = Repeated(lambda: torch.zeros(4), 40)
    yield from less_is_better(
        {"10 batches, 4 new workers, fork": "ms"},
        lambda: epochs(DataLoader, tiny, 1),
        lambda: epochs(Torch, tiny, 1),
        "torch",
        3 * RUNS,
    )
    yield from less_is_better(
        {"the same ten times in a row": "ms"},
        lambda: epochs(DataLoader, tiny, 10),
        lambda: epochs(Torch, tiny, 10),
        "torch",
        RUNS,
    )
    yield from less_is_better(
        {"a forked worker's own memory after gc.collect()": "MiB"},
        lambda: own_memory(DataLoader),
        lambda: own_memory(Torch),
        "torch",
        RUNS,
    )
    pairs = Pairs()
    yield from less_is_better(
        {"first batch, 4 workers, spawn, 1.3 M pairs": "ms"},
        lambda: spawned(DataLoader, pairs),
        lambda: spawned(Torch, pairs),
        "torch",
        3,
    )
