"""Four ranks, in a mesh of two data-parallel shares of two ranks each, and in a mesh of four shares."""

import sys
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import IterableDataset

from headrace import DataLoader, StateMismatch
from launch import report


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(11))


def verified(loader: DataLoader[Any]) -> str:
    try:
        loader.verify()
    except StateMismatch as error:
        return str(error)
    return ""


def read(loader: DataLoader[Any]) -> list[int]:
    return [index for batch in loader for index in batch.tolist()]


dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
shared: dict[str, Any] = {"batch_size": 2, "shuffle": True}
try:
    mesh["data"]
except KeyError as error:
    missing = str(error)
try:
    DataLoader(range(11), distributed=mesh)
except ValueError as error:
    whole = str(error)
report(
    sys.argv[1],
    rank,
    {
        "share": read(DataLoader(range(11), num_workers=1, distributed=mesh["dp"], **shared)),
        "stream": read(DataLoader(Stream(), batch_size=2, distributed=mesh["dp"])),
        "both": read(DataLoader(range(11), distributed=both["dp_replicate", "dp_shard"], **shared)),
        "all": read(DataLoader(range(11), distributed=both, **shared)),
        "world": [one.size for one in [DataLoader(range(11), distributed=mesh["dp"]).plan().world]],
        "verified": verified(DataLoader(range(11), distributed=mesh["dp"], **shared)),
        "seeds": verified(DataLoader(range(11), distributed=mesh["dp"], seed=int(rank == 3), **shared)),
        "lengths": verified(DataLoader(range(11 + (rank == 1)), distributed=mesh["dp"], **shared)),
        "missing": missing,
        "whole": whole,
    },
)
dist.destroy_process_group()
