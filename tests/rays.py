"""What tests must know about the Ray that they share."""

import sys
from dataclasses import replace
from typing import Any

import psutil

from comparable import flat
from headrace import DataLoader, RayExecutor
from headrace.executors.ray.pool import RayPool

RAY = RayExecutor(num_cpus=0.5, idle_s=120)
"""What tests run on: its actors go from test to test, since each takes seconds to start."""

STORE = replace(RAY, shared_memory=False)
PLANES = {"slots": RAY, "store": STORE}
"""The two ways that a batch may take to the rank."""


def a_loader(dataset: Any, executor: RayExecutor = RAY, **options: Any) -> DataLoader[Any]:
    """Make a loader on Ray."""
    options = {"batch_size": 3, "num_workers": 2, "seed": 3, "executor": executor} | options
    return DataLoader(dataset, **options)


def undisturbed(dataset: Any, **options: Any) -> list[Any]:
    """Return what it is to yield."""
    return [
        flat(batch) for batch in DataLoader(dataset, **{"batch_size": 3, "seed": 3, "executor": "inline"} | options)
    ]


def ray_runs() -> bool:
    """Tell whether this process has joined a Ray."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def is_rays(process: psutil.Process) -> bool:
    """Tell whether a process is one of Ray's own, or of its workers."""
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
    """Return the processes of a reader's actors that are up."""
    pool = getattr(reader, "_pool", None)
    peers = list(pool._peers) if isinstance(pool, RayPool) else []
    return [peer.begun.pid for peer in peers if peer.up and peer.begun is not None]
