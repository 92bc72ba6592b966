"""Iterable datasets that draw from every generator, and that keep their place."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

import headrace

LENGTH = 23


class Stream(IterableDataset[Any]):
    """Draws from every generator; each worker reads its share, the first a bit more."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(worker, LENGTH + 5 * (worker == 0), workers):
            yield number, random.random(), torch.rand(()).item(), np.random.rand(), headrace.rng().random()


class Keeping(Stream):
    """Keeps its own place, and counts what it reads."""

    def __init__(self) -> None:
        self.place = self.begin = self.read = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self.place, self.begin = self.begin, 0
        while worker + self.place * workers < LENGTH:
            self.place += 1
            self.read += 1
            yield worker + (self.place - 1) * workers, headrace.rng().random(), self.read

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["place"]
