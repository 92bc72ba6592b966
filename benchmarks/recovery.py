"""The time of the next batch when a worker is killed, compared with starting torch's loader again, and with no kill."""

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
"""Batches before the kill: the workers have started, and have prefetched all they may."""

AFTER = 12
"""Batches after the kill; those that were asked for before it are among them."""

TASK_S = 0.005


class Slow(Dataset[torch.Tensor]):
    """Samples that take a while."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(TASK_S)
        return torch.full((10_000,), index)


def read(reader: Iterator[Any], count: int) -> float:
    """Read a number of batches; return the longest time of one, in milliseconds."""
    longest = 0.0
    for _ in range(count):
        began = time.perf_counter()
        next(reader)
        longest = max(longest, time.perf_counter() - began)
    return longest * 1e3


def recovered(start_method: str, kill: bool = True) -> tuple[float, ...]:
    """Return the longest time of a batch after a worker is killed, or at the same place without a kill."""
    reader: Any = iter(DataLoader(Slow(), num_workers=2, seed=0, multiprocessing_context=start_method))
    read(reader, WARM_UP)
    if kill:
        os.kill(reader._workers[0].pid, signal.SIGKILL)
    return (read(reader, AFTER),)


def started_again(start_method: str) -> tuple[float, ...]:
    """Return the time from a kill, over torch's error, to the first batch of another pass."""
    loader = Torch(Slow(), num_workers=2, multiprocessing_context=start_method)
    reader: Any = iter(loader)
    read(reader, WARM_UP)
    began = time.perf_counter()
    os.kill(reader._workers[0].pid, signal.SIGKILL)
    # OSError and EOFError if a batch of the dead worker was on its way. A kept traceback would keep the old workers.
    with suppress(RuntimeError, OSError, EOFError):
        read(reader, AFTER)
        raise AssertionError("torch's loader has survived the death of a worker")
    del reader
    next(iter(loader))
    return ((time.perf_counter() - began) * 1e3,)


def recovery() -> Iterator[Row]:
    """Compare for two start methods, and with the same run without a kill."""
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
