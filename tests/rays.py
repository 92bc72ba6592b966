"""Loaders on the Ray cluster that all tests share, and the processes of that cluster."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from comparable import flat
from headrace import DataLoader, RayExecutor
from headrace.executors.ray.pool import RayPool

RAY = RayExecutor(num_cpus=0.5, idle_s=120)
"""The tests' executor. Its actors serve one test after another, since each takes seconds to start."""

STORE = replace(RAY, shared_memory=False)
PLANES = {"slots": RAY, "store": STORE}
"""The two ways of a batch to the rank: in shared memory, and through Ray's object store."""


def ray_environment() -> dict[str, str]:
    """Return the variables with which a process starts Ray for tests.

    Workers must be able to import what tests hand them, and start as fast as can be.
    """
    path = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(path), "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


def a_loader(dataset: Any, executor: RayExecutor = RAY, **options: Any) -> DataLoader[Any]:
    """Make a loader on Ray."""
    options = {"batch_size": 3, "num_workers": 2, "seed": 3, "executor": executor} | options
    return DataLoader(dataset, **options)


def undisturbed(dataset: Any, **options: Any) -> list[Any]:
    """Return the batches that a loader of the dataset should yield, flattened."""
    return [
        flat(batch) for batch in DataLoader(dataset, **{"batch_size": 3, "seed": 3, "executor": "inline"} | options)
    ]


def ray_runs() -> bool:
    """Tell whether this process has joined a Ray cluster."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def is_rays(process: psutil.Process) -> bool:
    """Tell whether a process belongs to Ray, or was started by one that does."""
    family = [process, *process.parents()]
    return any(one.name() in ("raylet", "gcs_server") or "/ray/" in " ".join(one.cmdline()[:3]) for one in family)


def ray_actors() -> list[psutil.Process]:
    """Return the processes of headrace's actors."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("ray::Actor"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def pids_of(reader: Any) -> list[int]:
    """Return the process ids of a reader's workers that are up."""
    pool = getattr(reader, "_pool", None)
    peers = list(pool._peers) if isinstance(pool, RayPool) else []
    return [peer.setup_result.pid for peer in peers if peer.up and peer.setup_result is not None]
