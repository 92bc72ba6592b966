"""Samples that take long: slow storage, and decoders that release the GIL."""

import random
import time
import warnings
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import DataLoader as Torch
from torch.utils.data import Dataset

from benchmarks.rows import Row, less_is_better
from headrace import DataLoader

RUNS = 7
DELAY_S = 0.005
WARM_UP = 2


class Remote(Dataset[int]):
    """Samples that come after 5 ms, as from an object store."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return 64 * 10

    def __getitem__(self, index: int) -> int:
        time.sleep(DELAY_S)
        if self.draws:
            random.random()
        return index


class Packed(Dataset[Any]):
    """Images of 600 KB that zlib unpacks in a few milliseconds; it releases the GIL."""

    def __init__(self) -> None:
        pixels = np.random.default_rng(0).integers(0, 8, (224, 224, 12), np.uint8)
        self.packed = zlib.compress(pixels.tobytes())

    def __len__(self) -> int:
        return 16 * 20

    def __getitem__(self, index: int) -> Any:
        return np.frombuffer(zlib.decompress(self.packed), np.uint8)[:1024].copy()


def per_batch(kind: Any, dataset: Dataset[Any], batch_size: int, **options: Any) -> tuple[float, ...]:
    """Return the milliseconds per batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about random draws, and more workers than CPUs
        reader = iter(kind(dataset, batch_size=batch_size, num_workers=2, **options))
        for _ in range(WARM_UP):
            next(reader)
        start = time.perf_counter()
        count = sum(1 for _ in reader)
    return ((time.perf_counter() - start) * 1e3 / count,)


def storage() -> Iterator[Row]:
    """Compare with torch's loader and the same two workers."""
    for name, dataset, options in (
        ("64 samples of 5 ms, fetch_threads=16", Remote(False), {"fetch_threads": 16}),
        ("64 samples of 5 ms, that draw, fetch_threads=16", Remote(True), {"fetch_threads": 16}),
        ("64 samples of 5 ms, 2 threads, fetch_threads=16", Remote(False), {"fetch_threads": 16, "executor": "thread"}),
    ):
        yield from less_is_better(
            {name: "ms"},
            partial(per_batch, DataLoader, dataset, 64, **options),
            partial(per_batch, Torch, dataset, 64),
            "torch",
            3,
        )
    unpacked = Packed()
    yield from less_is_better(
        {"16 images unpacked by zlib, 2 threads": "ms"},
        partial(per_batch, DataLoader, unpacked, 16, executor="thread"),
        partial(per_batch, Torch, unpacked, 16),
        "torch, 2 processes",
        RUNS,
    )
