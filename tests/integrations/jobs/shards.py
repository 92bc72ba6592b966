"""Two ranks of a group read a pipeline that splits itself by rank, in every executor."""

import os
import sys
from typing import Any

import torch.distributed as dist
import webdataset

from headrace import DataLoader, RayExecutor
from launch import report

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "process": {"num_workers": 1},
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},
    "thread": {"num_workers": 1, "executor": "thread"},
    "ray": {"num_workers": 1, "executor": RayExecutor(num_cpus=0.5, shared_memory=False)},
}


def seen(sample: Any) -> Any:
    return int(sample["__key__"]), [os.environ.get(name) for name in VARIABLES]


def main() -> None:
    folder, *shards = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, dict[str, Any]] = {"read": {}, "seen": {}, "refused": {}}
    for way, options in WAYS.items():
        # Threads are of this process; whoever is not sees what a worker is told.
        kept = {} if way in ("inline", "thread") else {name: os.environ.pop(name) for name in VARIABLES[:2]}
        splitting = webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=webdataset.split_by_node)
        plain = webdataset.WebDataset(shards, shardshuffle=False)
        read = list(DataLoader(splitting.map(seen), batch_size=None, **options))
        found["read"][way] = [key for key, _ in read]
        if way != "inline":
            (found["seen"][way],) = {tuple(places) for _, places in read}
        try:
            next(iter(DataLoader(plain, batch_size=None, distributed=False, **options)))
        except ValueError as error:
            found["refused"][way] = str(error)
        os.environ |= kept
    report(folder, rank, found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
