"""The first shuffled batch of a huge dataset on one of eight ranks: time, and memory for the order."""

import subprocess
import sys
from collections.abc import Iterator

from benchmarks.rows import Row, less_is_better

RUNS = 3
OURS, RIVAL = 10**12, 10**8

PRELUDE = """
import resource, sys, time
import torch.utils.data
from torch.utils.data import DataLoader as Torch, DistributedSampler
from headrace import DataLoader, World
def make(n):
    {make}
next(iter(make(1000)))  # costs that only the first call in a process has
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
next(iter(make({length})))
print(time.perf_counter() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""

MAKE_OURS = "return DataLoader(range(n), batch_size=256, shuffle=True, distributed=World(3, 8))"
MAKE_RIVAL = "return Torch(range(n), batch_size=256, sampler=DistributedSampler(range(n), 8, 3, shuffle=True))"


def measure(make: str, length: int) -> tuple[float, ...]:
    """Return milliseconds to the first batch and MiB of growth, in a process of its own."""
    script = PRELUDE.format(make=make, length=length)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, mebibytes = map(float, done.stdout.split())
    return seconds * 1000, mebibytes


def first_batch() -> Iterator[Row]:
    """Compare the first batch of 10^12 samples with that of torch and DistributedSampler of 10^8."""
    yield from less_is_better(
        {"first batch of 10^12 shuffled, 8 ranks": "ms", "memory for it": "MiB"},
        lambda: measure(MAKE_OURS, OURS),
        lambda: measure(MAKE_RIVAL, RIVAL),
        "torch + DistributedSampler at 10^8",
        RUNS,
    )
