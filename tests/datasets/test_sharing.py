"""Whether workers can be told of an epoch while they read their copies of a dataset."""

import ctypes
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from headrace.datasets.sharing import learns_of_epochs


class Holding:
    def __init__(self, held: Any) -> None:
        self.held = held


class Told:
    def set_epoch(self, epoch: int) -> None:
        """Take it in."""

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    "used",
    [
        Told(),
        Subset(Told(), [0]),
        ConcatDataset([Told()]),
        Holding({"transform": Told()}),
        Holding(torch.zeros(1).share_memory_()),
        Holding([multiprocessing.Value("i", 0)]),
        Holding(multiprocessing.Array("d", 3)),
        Holding(multiprocessing.RawValue("i", 0)),
        Holding(multiprocessing.RawArray(ctypes.c_double, 3)),
    ],
    ids=lambda used: type(used).__name__,
)
def test_it_can(used: Any) -> None:
    assert learns_of_epochs((used, None))


@pytest.mark.parametrize(
    "used",
    [
        [1, 2],
        TensorDataset(torch.zeros(3)),
        Holding(np.zeros(3)),
        Holding(torch.nn.Parameter(torch.zeros(1))),
        Holding(Told),
        Holding(Told().set_epoch),
    ],
    ids=lambda used: type(used).__name__,
)
def test_it_cannot(used: Any) -> None:
    assert not learns_of_epochs((used, None))
