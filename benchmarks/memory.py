"""Data in memory, read without workers: the loader's own cost is the only cost."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader as Torch
from torch.utils.data import TensorDataset

from benchmarks.rows import Row, less_is_better
from headrace import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it calls what torch has deprecated
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

RUNS = 25
ROWS, COLUMNS, BATCH = 100_000, 20, 256


def seconds(read: Callable[[], Iterable[Any]]) -> tuple[float, ...]:
    """Return the milliseconds that one pass takes."""
    start = time.perf_counter()
    for _ in read():
        pass
    return ((time.perf_counter() - start) * 1e3,)


def sliced(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Read in order without a loader."""
    return (data[start : start + BATCH].clone() for start in range(0, ROWS, BATCH))


def permuted(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Read shuffled without a loader."""
    order = torch.randperm(ROWS)
    return (data[order[start : start + BATCH]] for start in range(0, ROWS, BATCH))


class Uncounted:
    """A reader of ours that counts nothing and reads no clock."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __iter__(self) -> "Uncounted":
        return self

    def __next__(self) -> Any:
        staged = self.reader._staging.batches
        self.reader._compute(self.reader._direct)
        if not staged:
            raise StopIteration
        return staged.popleft()[3]


def memory() -> Iterator[Row]:
    """Compare with slicing by hand, with torch's loader and with torchdata's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    data = torch.randn(ROWS, COLUMNS)
    dataset = TensorDataset(data)
    what = f"{ROWS:,} rows of {COLUMNS} float32"
    loaders: dict[str, tuple[dict[str, Any], Callable[[], Iterable[Any]], str]] = {
        "in order": ({}, partial(sliced, data), "slice and clone"),
        "shuffled": ({"shuffle": True}, partial(permuted, data), "x[perm[i:j]]"),
        "shuffled by a plan": ({"shuffle": True, "seed": 0}, partial(permuted, data), "x[perm[i:j]]"),
    }
    for how, (options, by_hand, name) in loaders.items():
        ours = DataLoader(dataset, BATCH, **options)
        yield from less_is_better(
            {f"{what}, {how}": "ms"}, partial(seconds, partial(iter, ours)), partial(seconds, by_hand), name, RUNS
        )
    for rival, kind in {"torch": Torch, "torchdata": StatefulDataLoader}.items():
        ours, theirs = (one(dataset, BATCH, shuffle=True) for one in (DataLoader, kind))
        yield from less_is_better(
            {f"{what}, shuffled": "ms"},
            partial(seconds, partial(iter, ours)),
            partial(seconds, partial(iter, theirs)),
            rival,
            3,
        )
    ours = DataLoader(dataset, BATCH)
    yield from less_is_better(
        {f"{what}, in order": "ms"},
        partial(seconds, partial(iter, ours)),
        partial(seconds, lambda: Uncounted(iter(ours))),
        "itself without stats()",
        RUNS,
    )
    torch.set_num_threads(threads)
