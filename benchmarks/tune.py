"""What `headrace tune` chooses, against the best of an exhaustive sweep over the same settings."""

import ctypes
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from benchmarks.rows import Row, in_turn
from headrace import DataLoader
from headrace.cli.tune.measuring import Step, Subject, Visitor
from headrace.system.limits import usable_cpus
from headrace.tuning.diagnosis import Machine
from headrace.tuning.search import Limits, Result, Search
from headrace.tuning.settings import INLINE, Grid, Setting

GRID = Grid(("process", "thread", INLINE), workers=(1, 2, 4), prefetch_factor=(2, 4), fetch_threads=(1, 4, 16))
SECONDS = 60.0
SWEEPS = 2
STARTS = 3
FINALISTS = 3
RUNS = 11
FINAL_S = 0.8
WITHIN = 1.1


class Samples(Dataset[Any]):
    """So many samples."""

    def __len__(self) -> int:
        return 100_000


class Stored(Samples):
    """Samples that come after 20 ms, as from an object store."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


class Computed(Samples):
    """Samples that Python computes in 0.3 ms, and then a function of C that keeps the GIL for 3 ms.

    That function sleeps, so that it takes as long on a machine whose CPUs others use, too.
    """

    def __getitem__(self, index: int) -> int:
        total = 0
        for number in range(3_000):
            total += number * number
        ctypes.PyDLL(None).usleep(3_000)  # a PyDLL's functions run with the GIL
        return total % 7


class Mixed(Samples):
    """Samples that come after 20 ms, and for which numpy computes about 0.2 ms without the GIL."""

    def __init__(self) -> None:
        self.angles = np.linspace(0, 1, 20_000)

    def __getitem__(self, index: int) -> float:
        time.sleep(0.02)
        return float(np.sin(self.angles).sum())


class Large(Samples):
    """Samples of 2 MB that are copied from memory."""

    def __init__(self) -> None:
        self.kept = np.ones((16, 1 << 19), np.float32)

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        chosen: NDArray[np.float32] = self.kept[index % len(self.kept)]
        return chosen.copy()


class Scanned(Samples):
    """Samples for which 8 MB are read from memory, more than the caches hold, and nothing large is allocated."""

    def __init__(self) -> None:
        self.kept = np.ones((16, 1 << 21), np.float32)

    def __getitem__(self, index: int) -> float:
        return float(self.kept[index % len(self.kept)].max())


WORKLOADS: dict[str, tuple[Callable[[], Dataset[Any]], int]] = {
    "storage, 20 ms a sample": (Stored, 16),
    "3.3 ms with the GIL": (Computed, 16),
    "20 ms of storage and 0.2 ms of numpy": (Mixed, 16),
    "8 MB a sample, read from memory": (Scanned, 8),
    "2 MB a sample, copied": (Large, 8),
}


@dataclass(frozen=True)
class Tuned:
    """One search.

    Attributes:
        start: Where it began.
        result: What it found.
        took_s: How long it took, in seconds.
    """

    start: Setting
    result: Result
    took_s: float


def _subject(make: Callable[[], Dataset[Any]], batch_size: int) -> Subject:
    return Subject(lambda: DataLoader(make(), batch_size=batch_size))


def tuned(subject: Subject, seed: int) -> Tuned:
    """Search from a random setting on."""
    settings = GRID.settings()
    start = settings[int(np.random.default_rng(seed).integers(len(settings)))]
    began_s = time.monotonic()
    search = Search(GRID, Visitor(subject, Step()), time.monotonic, Machine(usable_cpus()), SECONDS)
    return Tuned(start, search.run(start), time.monotonic() - began_s)


def swept(subject: Subject) -> list[Setting]:
    """Visit every setting, and every one again; return them, the fastest first."""
    visitor = Visitor(subject, Step())
    logs: dict[Setting, list[float]] = {setting: [] for setting in GRID.settings()}
    for _ in range(SWEEPS):
        for setting, found in logs.items():
            found.append(math.log(visitor(setting, Limits(math.inf)).seconds))
    return sorted(logs, key=lambda setting: fmean(logs[setting]))


def finals(subject: Subject, settings: Sequence[Setting]) -> dict[Setting, list[float]]:
    """Visit settings in turn, and return the seconds per batch of each visit."""
    visitor = Visitor(subject, Step(), FINAL_S)

    def visit(setting: Setting) -> tuple[float, ...]:
        return (visitor(setting, Limits(math.inf)).seconds,)

    ways = {setting: partial(visit, setting) for setting in settings}
    taken = in_turn({str(setting): way for setting, way in ways.items()}, RUNS)
    return {setting: [run[0] for run in taken[str(setting)]] for setting in settings}


def tune() -> Iterator[Row]:
    """Tune each workload from three random settings each; those chosen then run in turn with the best of a sweep."""
    good = count = 0
    threads = torch.get_num_threads()
    # As torchrun has it. With two threads of torch's, which wait for each other, a copy in the trainer's own thread
    # takes up to thirty times as long while another process uses one of two CPUs, and so tells about that process.
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about more workers than CPUs
        for name, (make, batch_size) in WORKLOADS.items():
            subject = _subject(make, batch_size)
            searches = [tuned(subject, seed) for seed in range(STARTS)]
            began_s = time.monotonic()
            best = swept(subject)[:FINALISTS]
            sweep_s = time.monotonic() - began_s
            chosen = [one.result.choice for one in searches]
            times = finals(subject, list(dict.fromkeys([*best, *chosen])))
            winner = min(best, key=lambda setting: median(times[setting]))
            for one in searches:
                own, rival = times[one.result.choice], median(times[winner])
                ours = median(own)
                # The median of ratios of visits in the same round, which the machine's load affects alike.
                ratio = median(theirs / mine for theirs, mine in zip(times[winner], own, strict=True))
                good, count = good + (ratio * WITHIN >= 1), count + 1
                label = f"{name}, from {one.start}: {one.result.choice}, found in {one.took_s:.0f} s"
                what = f"best of {len(GRID.settings())} in {sweep_s:.0f} s: {winner}"
                spread = (max(own) - min(own)) / ours
                yield Row(label, ours * 1e3, rival * 1e3, what, "ms", ratio, RUNS, spread)
                print(f"  limited by {one.result.diagnosis.limit.value}: {one.result.diagnosis.why}")
    torch.set_num_threads(threads)
    print(f"within {WITHIN - 1:.0%} of the best of the sweep: {good} of {count}")
