"""Five million strings in a dataset: the memory that forked workers copy, and the cost of packing the strings."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.rows import Row, less_is_better

RUNS = 3
STRINGS = 5_000_000

PRELUDE = """
import sys, time
import psutil
from torch.utils.data import DataLoader as Torch, get_worker_info
from headrace import DataLoader, PackedList

WORKERS = 2

class Grown:
    "Collates to the worker and its own memory in bytes after the 10th and every 500th batch, to None otherwise."
    batches = 0
    def __call__(self, samples):
        self.batches += 1
        if self.batches == 10 or self.batches % 500 == 0:
            return get_worker_info().id, psutil.Process().memory_full_info().uss

strings = (f"/data/train/class{{one % 1000}}/image{{one}}.jpg" for one in range({strings}))
start = time.perf_counter()
dataset = {container}(strings)
built_s = time.perf_counter() - start
start = time.perf_counter()
first, last = {{}}, {{}}
loader = {loader}(
    dataset, batch_size=500, shuffle=True, num_workers=WORKERS, collate_fn=Grown(), multiprocessing_context="fork"
)
for worker, uss in filter(None, loader):
    first.setdefault(worker, uss)
    last[worker] = uss
epoch_s = time.perf_counter() - start
print(sum(last.values()) / WORKERS / 2**20 - sum(first.values()) / WORKERS / 2**20, built_s, epoch_s)
"""


def measure(loader: str, container: str) -> tuple[float, ...]:
    """Return MiB of growth per worker in an epoch after its tenth batch, and seconds to build and to read it all."""
    script = PRELUDE.format(loader=loader, container=container, strings=STRINGS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return tuple(map(float, done.stdout.split()))


def packed() -> Iterator[Row]:
    """Compare a PackedList in our loader, then a list in ours, with a list in torch's: forked, shuffled, one epoch."""
    for container in ("PackedList", "list"):
        what = f"5 M strings, {container}"
        yield from less_is_better(
            {
                f"{what}: growth per worker": "MiB",
                f"{what}: to build": "s",
                f"{what}: epoch, 2 workers": "s",
            },
            partial(measure, "DataLoader", container),
            partial(measure, "Torch", "list"),
            "torch, list",
            RUNS,
        )
