"""Loaders to be tuned: all kinds that can be, and those that cannot."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data import DataLoader as TorchLoader

from headrace import DataLoader, LengthBucketed, ProcessExecutor, Subset, Weighted

N = 60


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return index


class Stored(Numbers):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.004)
        return index


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        raise ValueError("a torn file")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Once(IterableDataset[int]):
    def __init__(self) -> None:
        self.numbers = iter(range(N))

    def __iter__(self) -> Iterator[int]:
        return self.numbers


class Renamed(DataLoader[Any]):
    def __init__(self, dataset: Any, size: int) -> None:
        super().__init__(dataset, size)


class Named(DataLoader[Any]):
    def __init__(self, dataset: Any, label: str, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.label = label


def stored() -> Any:
    return DataLoader(Stored(), batch_size=6, shuffle=True, num_workers=1)


def plain() -> Any:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, drop_last=True)


def in_memory() -> Any:
    return DataLoader(TensorDataset(torch.arange(N)), batch_size=4)


def planned() -> Any:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, seed=3)


def weighted() -> Any:
    return DataLoader(Numbers(), batch_size=4, order=Weighted([1.0] * N))


def subset() -> Any:
    return DataLoader(Numbers(), batch_size=4, order=Subset(range(10, 40)), shuffle=True)


def bucketed() -> Any:
    return DataLoader(Numbers(), order=LengthBucketed([1 + index % 7 for index in range(N)], max_tokens=30))


def endless() -> Any:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, epoch_samples=50)


def unbatched() -> Any:
    return DataLoader(Numbers(), batch_size=None)


def sampled() -> Any:
    return DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), replacement=True), drop_last=True)


def batch_sampled() -> Any:
    return DataLoader(Numbers(), batch_sampler=BatchSampler(SequentialSampler(Numbers()), 4, drop_last=False))


def streamed() -> Any:
    return DataLoader(Stream(), batch_size=4)


def own_executor() -> Any:
    return DataLoader(Numbers(), batch_size=4, num_workers=1, executor=ProcessExecutor(), timeout=60)


def subclass() -> Any:
    return Named(Numbers(), "train", batch_size=4)


def two_batches() -> Any:
    return DataLoader(Eight(), batch_size=4)


class Eight(Numbers):
    def __len__(self) -> int:
        return 8


def broken() -> Any:
    return DataLoader(Broken(), batch_size=4)


def empty() -> Any:
    return DataLoader(TensorDataset(torch.arange(0)), batch_size=4)


def once() -> Any:
    return DataLoader(Once(), batch_size=4)


def sampled_once() -> Any:
    return DataLoader(Numbers(), batch_size=4, sampler=(index for index in range(N)))


def renamed() -> Any:
    return Renamed(Numbers(), 4)


def of_torch() -> Any:
    return TorchLoader(Numbers(), batch_size=4)


def of_numbers() -> Any:
    return 17


def failing() -> Any:
    raise OSError("no such bucket")
