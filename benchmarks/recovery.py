"""How long the next batch takes when a worker is killed: beside starting torch's loader again, and beside no kill."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader as Torch
from torch.utils.data import Dataset

from benchmarks.rows import Row, less_is_better
from headrace import DataLoader

RUNS = 21

WARM_UP = 12
"""Batches before the kill: the workers are up, and as far ahead as they may be."""

AFTER = 12
"""Batches after it: those that were asked for before are among them."""

TASK_S = 0.005


class Slow(Dataset[torch.Tensor]):
    """Samples that take a while."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(TASK_S)
        return torch.full((10_000,), index)


def read(reader: Iterator[Any], count: int) -> float:
    """Read so many batches; return the longest that one took, in milliseconds."""
    longest = 0.0
    for _ in range(count):
        began = time.perf_counter()
        next(reader)
        longest = max(longest, time.perf_counter() - began)
    return longest * 1e3


def recovered(start_method: str, kill: bool = True) -> tuple[float, ...]:
    """Return the longest that one batch takes after a worker is killed, or is not."""
    reader: Any = iter(DataLoader(Slow(), num_workers=2, seed=0, multiprocessing_context=start_method))
    read(reader, WARM_UP)
    if kill:
        os.kill(reader._workers[0].pid, signal.SIGKILL)
    return (read(reader, AFTER),)


def started_again(start_method: str) -> tuple[float, ...]:
    """Return how long it takes from a kill to torch's error and on to the first batch of another pass."""
    loader = Torch(Slow(), num_workers=2, multiprocessing_context=start_method)
    reader: Any = iter(loader)
    read(reader, WARM_UP)
    began = time.perf_counter()
    os.kill(reader._workers[0].pid, signal.SIGKILL)
    # The latter two where a batch of the dead one was on its way. Its traceback would keep the old workers.
    with suppress(RuntimeError, OSError, EOFError):
        read(reader, AFTER)
        raise AssertionError("torch's loader has survived the death of a worker")
    del reader
    next(iter(loader))
    return ((time.perf_counter() - began) * 1e3,)


def recovery() -> Iterator[Row]:
    """Compare by two start methods, and with the same where nobody is killed."""
    again = "torch, started again after its error"
    for start_method, runs in (("fork", RUNS), ("spawn", 3)):
        ours: Callable[[], tuple[float, ...]] = partial(recovered, start_method)
        name = f"a batch after a kill, 2 workers, {start_method}"
        yield from less_is_better({name: "ms"}, ours, partial(started_again, start_method), again, runs)
    yield from less_is_better(
        {"a batch after a kill, 2 workers, fork": "ms"},
        partial(recovered, "fork"),
        partial(recovered, "fork", kill=False),
        "nobody killed",
        RUNS,
    )
