"""Fabric and Accelerate saving the loader among their things, mid-epoch, and loading it into another, on two ranks."""

import sys
from typing import Any

import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from noted import Noted, rows

from headrace import DataLoader
from launch import report


def loader() -> DataLoader[Any]:
    return DataLoader(Noted(23), batch_size=2, shuffle=True, num_workers=1, executor="thread", seed=5)


outcomes = {}

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
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
rest = rows(wrapped)
outcomes["fabric"] = len(rest) == 10 and rest == rows(reader) and second.epoch == 2
outcomes["fabric, the next epoch"] = rows(wrapped) == rows(first) and second.epoch == 3
outcomes["fabric, the executor"] = wrapped._dataloader is second and second.dataset.made_by_threads()

accelerator = Accelerator(cpu=True)
third = accelerator.prepare(loader())
accelerator.register_for_checkpointing(third)
reader = iter(third)
next(reader)
accelerator.save_state(f"{sys.argv[1]}/accelerate")
rest = rows(reader)
following = rows(third)
accelerator.wait_for_everyone()  # the first process alone writes the loader's state
accelerator.load_state(f"{sys.argv[1]}/accelerate")
outcomes["accelerate"] = len(rest) == 10 and rows(third) == rest
outcomes["accelerate, the next epoch"] = rows(third) == following
outcomes["accelerate, the executor"] = type(third) is DataLoader and third.dataset.made_by_threads()


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(28))


# Under Accelerate a stream is read a batch ahead; the state is the user's place all the same.
stream = accelerator.prepare(DataLoader(Stream(), batch_size=4, distributed=True))
whole = [batch.tolist() for batch in stream]
reader = iter(stream)
got = next(reader).tolist()
stream.load_state_dict(stream.state_dict())
outcomes["accelerate, a stream"] = [got, *(batch.tolist() for batch in stream)] == whole and len(whole) == 4
outcomes["accelerate, its end"] = stream.state_dict()["epoch"] == 2
report(sys.argv[1], fabric.global_rank, outcomes)
accelerator.end_training()
