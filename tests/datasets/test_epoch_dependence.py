"""Whether the samples of a dataset may depend on the epoch."""

import ctypes
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from headrace.datasets.epoch_dependence import may_depend_on_epoch


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
def test_they_may(used: Any) -> None:
    assert may_depend_on_epoch((used, None))


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
def test_they_do_not(used: Any) -> None:
    assert not may_depend_on_epoch((used, None))
