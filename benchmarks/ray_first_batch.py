"""The first batch of a process: workers on a running Ray cluster, against torch's workers. Both must import torch."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.ray_here import WORKERS, missing
from benchmarks.rows import Row, less_is_better

RUNS = 5

AWAY_S = 6.0
"""The time that a script takes between asking for workers and its first epoch, in seconds, as to build a model."""

PRELUDE = """
import os, time
import torch
if __name__ == "__main__":
    dataset = torch.utils.data.TensorDataset(torch.arange(2.0**16).reshape(1024, 64))
    {make}
    began = time.perf_counter()
    reader = iter(loader)
    next(reader)
    print((time.perf_counter() - began) * 1e3)
"""

MAKE_OURS = """
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
    import ray
    from headrace import DataLoader, RayExecutor
    ray.init("local", num_cpus={workers}, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    executor = RayExecutor(start_timeout_s=300)
    time.sleep({away_s})  # the processes that Ray starts with a cluster are up
    {before}
    loader = DataLoader(dataset, 32, shuffle=True, num_workers={workers}, executor=executor, seed=0)
"""

PRESTART = """
    executor.prestart({workers})
    time.sleep({away_s})
"""

MAKE_RIVAL = """
    from torch.utils.data import DataLoader
    loader = DataLoader(dataset, 32, shuffle=True, num_workers={workers}, multiprocessing_context="{method}")
"""


def measure(make: str, **values: object) -> tuple[float, ...]:
    """Return the milliseconds to the first batch, in a process of its own."""
    values = {"workers": WORKERS, "away_s": AWAY_S, "before": ""} | values
    script = PRELUDE.format(make=make.strip().format(**values))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"  # which torch's workers import
        path.write_text(script)
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    return (float(done.stdout.split()[-1]),)


def ray_first_batch() -> Iterator[Row]:
    """Compare the first batch on a cluster that runs and is joined, with and without actors that started before."""
    if missing("ray"):
        return
    before = PRESTART.strip().format(workers=WORKERS, away_s=AWAY_S)
    for name, options in {"first batch on Ray": {}, "the same, after prestart": {"before": before}}.items():
        yield from less_is_better(
            {f"{name}, {WORKERS} workers": "ms"},
            partial(measure, MAKE_OURS, **options),
            partial(measure, MAKE_RIVAL, method="forkserver"),
            "torch, forkserver",
            RUNS,
        )
