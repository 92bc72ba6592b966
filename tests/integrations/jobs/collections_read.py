"""Datasets, loaders and collation of other libraries, on two ranks: each read for three epochs, and once resumed."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader.dataloader import Collater
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

import datasets
from headrace import DataLoader, rng
from launch import report

SAMPLES, STREAMED = 23, 24  # what splits itself by shards gives ranks unequal shares of other numbers
TABLE = datasets.Dataset.from_dict({"number": range(SAMPLES)})
GRAPHS = [Data(x=torch.full((1 + number % 3, 1), float(number)), number=number) for number in range(SAMPLES)]

dist.init_process_group("gloo")


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["number"].tolist()]


def with_noise(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return columns | {"noise": [rng().random() for _ in columns["number"]]}


def stream() -> Any:
    """A stream that is shuffled anew in each epoch, if it is told of the epoch."""
    numbered = datasets.Dataset.from_dict({"number": range(STREAMED)})
    return numbered.to_iterable_dataset(num_shards=4).shuffle(seed=0, buffer_size=8)


def table() -> Any:
    return DataLoader(TABLE.with_format("torch"), batch_size=2, shuffle=True, num_workers=1)


def transformed() -> Any:
    noisy = TABLE.with_transform(with_noise)
    return DataLoader(noisy, batch_size=2, shuffle=True, num_workers=2, executor="thread")


def dealt() -> Any:
    return DataLoader(stream(), batch_size=2, distributed=True, num_workers=1)


def split() -> Any:
    return DataLoader(split_dataset_by_node(stream(), dist.get_rank(), 2), batch_size=2, seed=0)


def graphs() -> Any:
    return DataLoader(GRAPHS, batch_size=2, shuffle=True, collate_fn=Collater(GRAPHS), num_workers=1)


def nodes_above() -> Any:
    """A graph of torchdata's nodes that reads a loader of ours ahead."""
    return nodes.Loader(nodes.Prefetcher(nodes.IterableWrapper(table()), prefetch_factor=2))


def stateful() -> Any:
    """torchdata's loader, which needs a sampler, and to have it told of the epoch."""
    return StatefulDataLoader(TABLE.with_format("torch"), batch_size=2, sampler=DistributedSampler(TABLE))


def resumed(make: Callable[[], Any]) -> dict[str, list[int]]:
    """Return what was read in the middle of the second epoch, and how that goes on: for whoever began, and another."""
    first, second = make(), make()
    list(first)
    reader = iter(first)
    begun = numbers(next(reader) for _ in range(2))
    state = first.state_dict()
    going_on = numbers(reader) + numbers(first)
    second.load_state_dict(state)
    return {"begun": begun, "going on": going_on, "resumed": numbers(second) + numbers(second)}


found: dict[str, Any] = {}
for make in (table, transformed, dealt, split, graphs, nodes_above, stateful):
    loader = make()
    found[make.__name__] = {"epochs": [numbers(loader) for _ in range(3)], **resumed(make)}
batch = next(iter(graphs()))
found["a batch of graphs"] = [type(batch).__name__, batch.batch.tolist(), batch.x[:, 0].tolist(), numbers([batch])]
noisy = [[batch["noise"].tolist() for batch in loader] for loader in (transformed(), transformed())]
found["noise"] = [noisy[0] == noisy[1], len({number for batch in noisy[0] for number in batch})]
report(sys.argv[1], dist.get_rank(), found)
dist.barrier()
dist.destroy_process_group()
