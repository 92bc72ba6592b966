"""Transfer of batches from Ray workers, in shared memory or through Ray's store, compared with torch and Ray Data."""

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.local import WARM_UP, Repeated
from benchmarks.ray_here import PLANES, WORKERS, Blocks, clocked, has_data, missing, on_ray, on_torch, ray_here, warm
from benchmarks.rows import Row, Runs, compared, in_turn

RUNS = 7
SMALL = 1000
"""The number of small batches in an epoch."""

BLOCKS = 8
"""The number of Ray Data's tasks in an epoch: with one for each batch it takes two to four times as long."""


def measured(dataset: Repeated, batch_size: int | None, name: str, rival: Any, **options: Any) -> dict[str, Runs]:
    """Return the results of `clocked` for a rival, and for headrace on both planes.

    Args:
        dataset: The dataset of all.
        batch_size: The number of samples in a batch, or None if each sample is a batch.
        name: The name of the rival.
        rival: The rival's loader.
        options: Options of headrace's loader.
    """
    for _ in rival:  # its worker processes start
        pass
    ways = {name: rival}
    ways |= {plane: warm(on_ray(dataset, batch_size, executor, **options)) for plane, executor in PLANES.items()}
    taken = in_turn({way: partial(clocked, partial(iter, loader), WARM_UP) for way, loader in ways.items()}, RUNS)
    del ways
    gc.collect()
    return taken


def ray_transfer() -> Iterator[Row]:
    """Compare the time and the rank's CPU time of a batch; with Ray Data, the time of a whole epoch.

    Ray Data comes last: its idle workers keep a CPU busy for seconds after its epoch.
    """
    if missing("ray"):
        return
    ray_here()
    uint8, float32 = torch.zeros(3, 224, 224, dtype=torch.uint8), torch.rand(3, 224, 224)
    for what, sample, batches, batch_size in (
        ("4.8 MB uint8, default collation", uint8, 100, 32),
        ("38 MB float32, default collation", float32, 40, 64),
    ):
        dataset = Repeated(partial(torch.Tensor.detach, sample), batches * batch_size)
        taken = measured(dataset, batch_size, "torch", on_torch(dataset, batch_size))
        for plane in PLANES:
            name = f"{what}, {WORKERS} workers, {plane}"
            yield from compared({name: "ms", f"{name}, rank CPU": "us"}, taken[plane], taken["torch"], "torch")
    if has_data():
        dataset = Repeated(partial(torch.Tensor.detach, uint8), 3200)
        taken = measured(dataset, 32, "Ray Data", Blocks(dataset, 100, 32, WORKERS, BLOCKS))
        for plane in PLANES:
            ours, theirs = ([run[2:] for run in taken[way]] for way in (plane, "Ray Data"))
            name = f"4.8 MB uint8, default collation, {WORKERS} workers, {plane}, whole epoch"
            yield from compared({name: "ms"}, ours, theirs, "Ray Data")


def ray_small() -> Iterator[Row]:
    """Compare small batches that take no time to make, so that messages are all or most of the cost."""
    if missing("ray"):
        return
    ray_here()
    for size, floats, depth in (("10 KB", 2500, 2), ("10 KB", 2500, 32), ("128 KB", 32_000, 2)):
        dataset = Repeated(partial(torch.Tensor.detach, torch.zeros(floats)), SMALL)
        rival = on_torch(dataset, None, prefetch_factor=depth)
        taken = measured(dataset, None, "torch", rival, prefetch_factor=depth)
        del rival
        for plane in PLANES:
            name = f"{size}, {WORKERS} workers, prefetch_factor={depth}, {plane}"
            rates = {way: [(run[0] * 1e3, run[1]) for run in runs] for way, runs in taken.items()}
            yield from compared({name: "us", f"{name}, rank CPU": "us"}, rates[plane], rates["torch"], "torch")


def ray_second_epoch() -> Iterator[Row]:
    """Compare the time to the first batch of a second epoch."""
    if missing("ray"):
        return
    ray_here()
    dataset = Repeated(partial(torch.Tensor.detach, torch.zeros(1000)), 64)
    ways: dict[str, Any] = {}
    for plane, executor in PLANES.items():
        ways[f"{plane}, persistent_workers"] = warm(on_ray(dataset, 4, executor))
        ways[f"{plane}, new workers in idle actors"] = on_ray(dataset, 4, executor, persistent_workers=False)
    rivals: dict[str, Any] = {"torch": on_torch(dataset, 4)}
    if has_data():
        rivals["Ray Data"] = Blocks(dataset, 16, 4, WORKERS, BLOCKS)
    calls = {name: partial(clocked, partial(iter, way), 1) for name, way in (ways | rivals).items()}
    in_turn(calls, 2)  # not counted
    taken = {name: [run[3:] for run in runs] for name, runs in in_turn(calls, RUNS).items()}
    for way in ways:
        names = {f"first batch of a second epoch, {way}": "ms"}
        for rival in rivals:
            yield from compared(names, taken[way], taken[rival], rival)
