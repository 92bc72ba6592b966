"""Deferred datasets, and the executors that read them."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

import headrace
from headrace import DataLoader, Deferred, PackedList
from headrace.testing import FakeDataset

CELLS: dict[str, dict[str, Any]] = {
    "inline": {"executor": "inline"},
    "thread-2": {"executor": "thread", "num_workers": 2},
    "fork-2": {"num_workers": 2, "multiprocessing_context": "fork"},
}
LENGTH = 11


class Bulk(FakeDataset):
    """Returns samples in bulk, with draws in bulk."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, torch.rand(1).item(), headrace.rng().random()) for index in indices]


class OnlyBulk(Dataset[Any]):
    """Returns samples in bulk only; raises if one is broken."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        if 3 in indices:
            raise KeyError("broken")
        return indices


class Stream(IterableDataset[Any]):
    """Splits numbers over the workers, and has a state and an epoch."""

    def __init__(self) -> None:
        self.place = self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first + self.place * step, LENGTH, step):
            self.place += 1
            yield number, self.epoch, self.place
        self.place = 0


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(3 * LENGTH).view(LENGTH, 3), torch.arange(LENGTH))


def subset() -> Any:
    return Subset(FakeDataset(2 * LENGTH), range(LENGTH, 2 * LENGTH))


def in_bulk() -> Any:
    return Subset(Bulk(LENGTH), range(LENGTH))


def packed() -> Any:
    return PackedList(np.full(3, number) for number in range(LENGTH))


def drawing(make: Callable[[], Any]) -> Any:
    """Make a dataset, after draws from all generators."""
    torch.rand(1), random.random(), np.random.rand()
    headrace.rng().random(), torch.rand(1, generator=headrace.torch_rng())
    return make()


def deferred(make: Callable[[], Any], **options: Any) -> Any:
    return Deferred(partial(drawing, make), **options)


MAKERS: list[Callable[[], Any]] = [
    partial(FakeDataset, LENGTH),
    tensors,
    partial(Bulk, LENGTH),
    subset,
    in_bulk,
    packed,
]
WRAPPERS: list[Callable[[Any], Any]] = [
    lambda one: one,
    lambda one: Subset(one, list(range(LENGTH))[::-1]),
    lambda one: ConcatDataset([one, one]),
    lambda one: StackDataset(one, range(LENGTH)),
]


def seed_all() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def flat(batches: Any) -> Any:
    """Batches as comparable values."""
    if isinstance(batches, torch.Tensor):
        return batches.tolist()
    if isinstance(batches, dict):
        return {name: flat(value) for name, value in batches.items()}
    return [flat(one) for one in batches] if isinstance(batches, list | tuple | DataLoader) else batches
