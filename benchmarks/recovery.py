"""The time of the next batch when a worker is killed or hangs, compared with starting torch's loader again."""

import os
import select
import signal
import time
from collections.abc import Iterator
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

TIMEOUT_S = 5.0
"""The limit for a batch of torch's loader, in seconds: without one it waits for a worker that hangs for ever."""


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


def hang_on_signal(_worker: int) -> None:
    """Have a worker hang for ever when it gets SIGUSR2."""
    signal.signal(signal.SIGUSR2, lambda *_: select.select([], [], []))


def recovered(start_method: str, sent: signal.Signals | None = signal.SIGKILL) -> tuple[float, ...]:
    """Return the longest time of a batch after a worker gets a signal, or at the same place without one."""
    loader = DataLoader(
        Slow(), num_workers=2, seed=0, multiprocessing_context=start_method, worker_init_fn=hang_on_signal
    )
    reader: Any = iter(loader)
    read(reader, WARM_UP)
    if sent is not None:
        os.kill(reader._workers[0].pid, sent)
    return (read(reader, AFTER),)


def started_again(start_method: str, sent: signal.Signals = signal.SIGKILL) -> tuple[float, ...]:
    """Return the time from a signal, over torch's error, to the first batch of another pass."""
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": start_method}
    limit_s = TIMEOUT_S if sent == signal.SIGUSR2 else 0
    reader: Any = iter(Torch(Slow(), worker_init_fn=hang_on_signal, timeout=limit_s, **options))
    read(reader, WARM_UP)
    began = time.perf_counter()
    os.kill(reader._workers[0].pid, sent)
    # OSError and EOFError if a batch of the dead worker was on its way. A kept traceback would keep the old workers.
    with suppress(RuntimeError, OSError, EOFError):
        read(reader, AFTER)
        raise AssertionError("torch's loader has survived the end of a worker")
    del reader
    next(iter(Torch(Slow(), **options)))
    return ((time.perf_counter() - began) * 1e3,)


def recovery() -> Iterator[Row]:
    """Compare for two start methods, and with the same run without a kill."""
    hung = f"torch with timeout={TIMEOUT_S:.0f}, started again after its error"
    for start_method, runs in (("fork", RUNS), ("spawn", 3)):
        yield from less_is_better(
            {f"a batch after a kill, 2 workers, {start_method}": "ms"},
            partial(recovered, start_method),
            partial(started_again, start_method),
            "torch, started again after its error",
            runs,
        )
        yield from less_is_better(
            {f"a batch after a worker hangs, 2 workers, {start_method}": "ms"},
            partial(recovered, start_method, signal.SIGUSR2),
            partial(started_again, start_method, signal.SIGUSR2),
            hung,
            3,
        )
    for name, sent in {"a kill": signal.SIGKILL, "a worker hangs": signal.SIGUSR2}.items():
        yield from less_is_better(
            {f"a batch after {name}, 2 workers, fork": "ms"},
            partial(recovered, "fork", sent),
            partial(recovered, "fork", None),
            "nobody killed",
            RUNS,
        )
