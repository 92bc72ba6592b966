"""Fabric and Accelerate saving the loader among their things, mid-epoch, and loading it into another."""

import sys
from typing import Any

import torch
from accelerate import Accelerator
from lightning.fabric import Fabric

from headrace import DataLoader
from headrace.testing import FakeDataset
from launch import report


def rows(batches: Any) -> list[Any]:
    return [row for batch in batches for row in zip(*(part.tolist() for part in batch.values()), strict=True)]


def loader() -> DataLoader[Any]:
    return DataLoader(FakeDataset(23), batch_size=4, shuffle=True, num_workers=1, seed=5)


outcomes = {}

fabric = Fabric(accelerator="cpu", devices=1)
first = loader()
wrapped = fabric.setup_dataloaders(first)
list(wrapped)
reader = iter(wrapped)
next(reader)
fabric.save(f"{sys.argv[1]}/fabric.ckpt", {"loader": first})
second = loader()
wrapped = fabric.setup_dataloaders(second)
fabric.load(f"{sys.argv[1]}/fabric.ckpt", {"loader": second})
# Its counter of epochs begins at 0 again, and it tells the sampler so.
outcomes["fabric"] = rows(wrapped) == rows(reader) and second.epoch == 2
outcomes["fabric, the next epoch"] = rows(wrapped) == rows(first) and second.epoch == 3

accelerator = Accelerator(cpu=True)
third = accelerator.prepare(loader())
accelerator.register_for_checkpointing(third)
reader = iter(third)
next(reader)
accelerator.save_state(f"{sys.argv[1]}/accelerate")
rest = rows(reader)
accelerator.load_state(f"{sys.argv[1]}/accelerate")
outcomes["accelerate"] = rows(third) == rest


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(14))


# Under Accelerate a stream is read a batch ahead; the state is the user's place all the same.
stream = accelerator.prepare(DataLoader(Stream(), batch_size=4, distributed=True))
reader = iter(stream)
got = next(reader).tolist()
state = stream.state_dict()
stream.load_state_dict(state)
outcomes["accelerate, a stream"] = (got, [batch.tolist() for batch in stream]) == (
    [0, 1, 2, 3],
    [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13]],
)
outcomes["accelerate, its end"] = stream.state_dict()["epoch"] == 1
report(sys.argv[1], 0, outcomes)
