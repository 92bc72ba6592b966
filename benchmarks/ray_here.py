"""Shared by the benchmarks on Ray: one cluster, loaders with persistent workers, and Ray Data on the same dataset."""

import importlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import DataLoader as Torch
from torch.utils.data import Dataset

from headrace import DataLoader, RayExecutor

CPUS = 16
"""The number of CPUs that the cluster is told: workers of these benchmarks mostly wait or move bytes."""

WORKERS = 4

HOST = RayExecutor(num_cpus=0.25, idle_s=600, start_timeout_s=300)
"""Workers that send batches in shared memory, as on the rank's own machine."""

STORE = RayExecutor(num_cpus=0.25, idle_s=600, start_timeout_s=300, shared_memory=False)
"""Workers that send batches through Ray's object store, as from another machine."""

PLANES = {"Ray in shared memory": HOST, "Ray through its store": STORE}


def ray_here() -> Any:
    """Return the module `ray`, connected. All benchmarks share one cluster, and its actors one after another."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    warnings.filterwarnings("ignore", r".*Ray workers have come up")  # `warm` waits for them
    ray = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init("local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    return ray


def missing(*modules: str) -> bool:
    """Tell whether one of the modules cannot be imported; if so, print that its rows are left out."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"rows that need {module} are left out: {error}")
            return True
    return False


def has_data() -> bool:
    """Tell whether Ray Data can be imported."""
    return not missing("pandas", "pyarrow")


def on_ray(
    dataset: Dataset[Any], batch_size: int | None, executor: RayExecutor, workers: int = WORKERS, **options: Any
) -> DataLoader[Any]:
    """Make a headrace loader whose workers stay from epoch to epoch."""
    given: dict[str, Any] = {"persistent_workers": True, "executor": executor} | options
    return DataLoader(dataset, batch_size, num_workers=workers, **given)


def on_torch(dataset: Dataset[Any], batch_size: int | None, **options: Any) -> Torch[Any]:
    """Make a torch loader on this machine. It uses a fork server, since a process that runs Ray must not fork."""
    given: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "forkserver"} | options
    return Torch(dataset, batch_size, num_workers=WORKERS, **given)


def warm(loader: Any) -> Any:
    """Read epochs until one began with all workers up, so that they have their slots; return the loader."""
    while True:
        reader = iter(loader)
        ready = sum(peer.up for peer in reader._pool._peers) == reader._pool.workers
        for _ in reader:
            pass
        if ready:
            return loader


class Blocks:
    """The same samples in Ray Data: each task reads and stacks one block, a batch at a time.

    Args:
        dataset: Its samples are arrays or tensors.
        batches: The number of batches.
        batch_size: The number of samples in a batch.
        workers: The number of tasks at a time.
        blocks: The number of all tasks.
    """

    def __init__(self, dataset: Any, batches: int, batch_size: int, workers: int, blocks: int) -> None:
        data = importlib.import_module("ray.data")
        data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        self.batch_size = batch_size
        numbers = data.range(batches * batch_size, override_num_blocks=blocks)
        self.blocks = numbers.map_batches(
            partial(stack, dataset), batch_size=batch_size, concurrency=workers, num_cpus=HOST.num_cpus
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.blocks.iter_torch_batches(batch_size=self.batch_size))


def stack(dataset: Any, rows: dict[str, Any]) -> dict[str, Any]:
    """Make a batch for Ray Data, as an array, which it moves faster than a tensor."""
    return {"batch": np.stack([np.asarray(dataset[int(index)]) for index in rows["id"]])}


def clocked(read: Callable[[], Iterator[Any]], uncounted: int) -> tuple[float, ...]:
    """Time an epoch.

    Args:
        read: Starts the epoch.
        uncounted: The number of first batches that the first two figures leave out.

    Returns:
        Milliseconds per batch; the rank's CPU microseconds per batch; milliseconds of the whole epoch with its start,
        divided by its batches; and milliseconds to the first batch.
    """
    began = time.perf_counter()
    reader = read()
    next(reader)
    first_s = time.perf_counter() - began
    for _ in range(uncounted - 1):
        next(reader)
    start, cpu = time.perf_counter(), time.process_time()
    count = sum(1 for _ in reader)
    end = time.perf_counter()
    return (
        (end - start) * 1e3 / count,
        (time.process_time() - cpu) * 1e6 / count,
        (end - began) * 1e3 / (count + uncounted),
        first_s * 1e3,
    )
