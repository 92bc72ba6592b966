"""Datasets that are told the epoch, at module level so that every start method can pickle them."""

from functools import partial
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from headrace import Deferred


class Told(Dataset[Any]):
    """Each sample is its index, the epoch, a number that `set_epoch` drew, and an attribute that the rank may change.

    Args:
        length: Samples.
        draws: Whether `set_epoch` draws, which threads cannot repeat.
    """

    def __init__(self, length: int, draws: bool = True) -> None:
        self.length, self.draws = length, draws
        self.epoch, self.drawn, self.size = -5, 0.0, 7
        self.calls: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.drawn = torch.rand(()).item() if self.draws else 0.0
        self.calls.append(epoch)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch, self.drawn, self.size


class Wrapped:
    """A wrapper of a user's, without torch's base class."""

    def __init__(self, held: Any) -> None:
        self.held = {"data": [held]}

    def __len__(self) -> int:
        return len(self.held["data"][0])

    def __getitem__(self, index: int) -> Any:
        return self.held["data"][0][index]


def deep(draws: bool) -> Any:
    """Return a dataset of 60 samples whose parts are told, deep inside of it."""
    built: Any = Deferred(partial(Told, 20, draws), length=20)
    parts = ConcatDataset([Told(30, draws), Wrapped(Told(20, draws)), built])
    return StackDataset(Subset(parts, range(5, 65)), range(60))
