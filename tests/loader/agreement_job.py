"""Real ranks call `verify` on loaders that agree, and on loaders of which the last rank's differs."""

import random
import sys
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler

from headrace import DataLoader, Subset, World
from headrace.errors import StateMismatch
from launch import report

N = 20


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(range(self.length))


class Batches:
    """Batches of a sampler that knows of no ranks."""

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)

    def __len__(self) -> int:
        return N // 2

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield self.draws.sample(range(N), 2)


class Unbuilt:
    def __len__(self) -> int:
        raise OSError("the file list is missing")

    def __getitem__(self, index: int) -> int:
        return index


def plan(**changed: Any) -> DataLoader[Any]:
    return DataLoader(**({"dataset": range(N), "batch_size": 2, "shuffle": True} | changed))


def at(epoch: int, **arguments: Any) -> DataLoader[Any]:
    loader = plan(**arguments)
    loader.set_epoch(epoch)
    return loader


def late() -> DataLoader[Any]:
    loader = plan()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        list(loader)
    return loader


def resumed(steps: int) -> DataLoader[Any]:
    reader, loader = plan(tail="exact"), plan(tail="exact")
    for _, _ in zip(range(steps), reader, strict=False):
        pass
    loader.load_state_dict(reader.state_dict())
    return loader


def begun(steps: int) -> DataLoader[Any]:
    loader = plan()
    loader.kept = iter(loader)
    for _ in range(steps):
        next(loader.kept)
    return loader


def distributed(length: int) -> DataLoader[Any]:
    return DataLoader(range(length), sampler=DistributedSampler(range(length)))


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    last = rank == size - 1
    cases: dict[str, Any] = {
        "agree": lambda: plan(),
        "agree in order": lambda: plan(shuffle=False, seed=3, tail="drop"),
        "agree, exact": lambda: plan(dataset=range(size * 2 + 1), batch_size=1, tail="exact"),
        "agree, all on every rank": lambda: plan(distributed=False),
        "agree, a world of their own": lambda: (
            plan(distributed=World(rank * 2 // size, 2)) if size % 2 == 0 else plan()
        ),
        "agree, sampler": lambda: distributed(N),
        "agree, parts": lambda: DataLoader(range(N + rank), sampler=RandomSampler(range(N)), distributed=False),
        "agree, own draws": lambda: DataLoader(range(N), batch_sampler=Batches(seed=rank)),
        "first_steps": lambda: DataLoader(range(N), batch_sampler=Batches(seed=0)),
        "rank, sampler": lambda: DataLoader(range(N), sampler=DistributedSampler(range(N), size, 0)),
        "agree, stream": lambda: DataLoader(Stream(N)),
        "agree, split stream": lambda: DataLoader(Stream(N), distributed=True),
        "agree, resumed": lambda: resumed(1),
        "agree, begun": lambda: begun(1),
        "samples": lambda: resumed(1 + last),
        "samples, begun": lambda: begun(1 + last),
        "dataset_length": lambda: plan(dataset=range(N + last)),
        "seed": lambda: plan(seed=5 if last else 4),
        "epoch": lambda: at(int(last)),
        "epoch, finished": lambda: late() if last else plan(),
        "batch_size": lambda: plan(batch_size=3 if last else 2),
        "tail": lambda: plan(tail="exact" if last else "drop"),
        "order": lambda: plan(shuffle=not last),
        "order, its numbers": lambda: plan(order=Subset([1, 3 if last else 2])),
        "world_size": lambda: plan(distributed=False if last else None),
        "rank": lambda: plan(distributed=World(0, size)),
        "mode": lambda: distributed(N) if last else plan(),
        "order, sampler": lambda: DataLoader(range(N), sampler=RandomSampler(range(N)) if last else list(range(N))),
        "dataset_length, sampler": lambda: distributed(N + size * last),
        "steps, sampler": lambda: DataLoader(range(N), sampler=RandomSampler(range(N - last))),
        "dataset_length, split stream": lambda: DataLoader(Stream(N + size * last), distributed=True),
        "steps, stream": lambda: DataLoader(Stream(N + last)),
        "error": lambda: plan(dataset=Unbuilt(), shuffle=None) if last else plan(),
    }
    told = {}
    for name, make in cases.items():
        loader = make()
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        epoch, known = loader._schedule.epoch, {key: repr(value) for key, value in vars(loader).items()}
        try:
            loader.verify()
        except StateMismatch as mismatch:
            told[name] = str(mismatch)
        else:
            told[name] = ""
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert torch.equal(before[0], after[0]), name
        assert before[1:] == after[1:], name
        assert loader._schedule.epoch == epoch, name
        assert {key: repr(value) for key, value in vars(loader).items()} == known, name
        if isinstance(loader.batch_sampler, Batches):
            fresh = Batches(rank if name.startswith("agree") else 0)
            assert [*loader.batch_sampler] == [*fresh], "a copy was asked"
    report(sys.argv[1], rank, told)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
