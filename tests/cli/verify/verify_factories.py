"""Loaders to be verified: good ones, and ones whose samples depend on more than their position."""

import functools
import itertools
import logging
import os
import random
import threading
import time
import uuid
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, RandomSampler, get_worker_info

import headrace
from headrace import DataLoader, LengthBucketed, Subset, Weighted
from headrace.testing import FakeDataset

N = 40
MODULES_OWN = np.random.default_rng(5)
OF_THREADS = threading.local()
NUMBERS = itertools.count()
ON_FIRST_USE: dict[str, float] = {}


class Base(Dataset[Any]):
    def __len__(self) -> int:
        return N


class Told(Base):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return self.epoch, index


class Private(Base):
    def __getitem__(self, index: int) -> Any:
        noise = np.random.default_rng().random()
        return {"image": torch.full((3,), noise), "label": index}


class PutBack(Base):
    def __getitem__(self, index: int) -> Any:
        before = random.getstate()
        drawn = random.random()
        random.setstate(before)
        return index, drawn


class Copied(Base):
    def __getitem__(self, index: int) -> Any:
        own = np.random.RandomState()
        own.set_state(np.random.get_state())
        return index, own.rand()


class Seeded(Base):
    """Draws from generators of its own making, but seeds them: as it should be."""

    def __getitem__(self, index: int) -> Any:
        drawn = [np.random.default_rng(index).random(), random.Random(index).random()]
        return drawn, torch.rand(1, generator=torch.Generator().manual_seed(index)), time.time() > 0


class OfPosition(Base):
    def __getitem__(self, index: int) -> Any:
        return index, headrace.rng().random(), torch.rand(2, generator=headrace.torch_rng())


class Kept(Base):
    def __init__(self, kept: Any) -> None:
        self.parts = {"noise": [kept]}

    def __getitem__(self, index: int) -> Any:
        rng = self.parts["noise"][0]
        return index, torch.rand((), generator=rng).item() if isinstance(rng, torch.Generator) else rng.random()


class OfModule(Base):
    def __getitem__(self, index: int) -> Any:
        return index, MODULES_OWN.random()


class ByWorker(Base):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, -1 if info is None else info.id


class ByProcess(Base):
    def __getitem__(self, index: int) -> Any:
        return index, os.getpid()


class ByHash(Base):
    def __getitem__(self, index: int) -> Any:
        return index, list({"a", "b", "c", "d", "e", "f", "g", "h"})


class OfThreads(Base):
    """Draws once in each thread, and gives that with every sample from then on."""

    def __getitem__(self, index: int) -> Any:
        if not hasattr(OF_THREADS, "drawn"):
            OF_THREADS.drawn = random.random()
        return index, OF_THREADS.drawn


class OnFirstUse(Base):
    """Draws once in each process, which workers that are forked from one that has drawn do not."""

    def __getitem__(self, index: int) -> Any:
        if "drawn" not in ON_FIRST_USE:
            ON_FIRST_USE["drawn"] = random.random()
        return index, ON_FIRST_USE["drawn"], drawn()


@functools.lru_cache
def drawn() -> float:
    return random.random()


class ByThread(Base):
    def __getitem__(self, index: int) -> Any:
        return index, threading.current_thread() is threading.main_thread()


class Clock(Base):
    def __getitem__(self, index: int) -> Any:
        return [index, time.time()]


class Identified(Base):
    def __getitem__(self, index: int) -> Any:
        return index, uuid.uuid4().hex


class Counting(Base):
    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> Any:
        logging.makeLogRecord({})  # reads the clock, which is no concern of the sample's
        self.count += 1
        return index, self.count


class CountingInClass(Base):
    count = 0

    def __getitem__(self, index: int) -> Any:
        CountingInClass.count += 1
        return index, self.count


class CountingInModule(Base):
    def __getitem__(self, index: int) -> Any:
        global fetched
        fetched += 1
        return index, fetched


class Numbering(Base):
    def __getitem__(self, index: int) -> Any:
        return index, next(NUMBERS)


class Seldom(Base):
    """Changes with every 30th sample that is fetched: the same if fetched twice, mostly."""

    def __getitem__(self, index: int) -> Any:
        return index, next(NUMBERS) // 30


class Remembering(Base):
    """Gives with each sample the largest index seen before: the same if fetched twice."""

    def __init__(self) -> None:
        self.largest = 0

    def __getitem__(self, index: int) -> Any:
        self.largest = max(self.largest, index)
        return index, self.largest


class Built(Base):
    def __init__(self) -> None:
        self.table = np.random.default_rng().random(N)

    def __getitem__(self, index: int) -> Any:
        return index, self.table[index]


class Rounding(Base):
    """Adds up what as many threads add up as torch has."""

    def __getitem__(self, index: int) -> Any:
        return index, 1 / torch.get_num_threads()


class InBulk(Base):
    def __getitem__(self, index: int) -> Any:
        return index, np.random.rand()

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Broken(Base):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise ValueError("a torn file")
        return index


class BrokenInWorkers(Base):
    def __getitem__(self, index: int) -> Any:
        if index == 7 and get_worker_info() is not None:
            raise ValueError("no such file")
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(N))


class Fixed(DataLoader[Any]):
    def __init__(self, extra: int) -> None:
        super().__init__(FakeDataset(extra))


class Passing(DataLoader[Any]):
    def __init__(self, dataset: Any, scale: int = 1, **rest: Any) -> None:
        self.scale = scale
        super().__init__(dataset, **rest)


class Forgetting(DataLoader[Any]):
    def __init__(self, root: str, dataset: Any, **rest: Any) -> None:
        super().__init__(dataset, **rest)


def loader(dataset: Any, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **({"batch_size": 4, "shuffle": True, "num_workers": 2} | arguments))


def torn(batch: Any) -> Any:
    raise TypeError("samples of different shapes")


def failing() -> Any:
    raise FileNotFoundError("/data is not mounted")


not_callable = 3
fetched = 0
good = lambda: loader(FakeDataset(N), seed=3)
seeded = lambda: loader(Seeded())
of_position = lambda: loader(OfPosition())
unbatched = lambda: loader(FakeDataset(N), batch_size=None)
dropping = lambda: loader(FakeDataset(N - 1), drop_last=True, batch_size=64, prefetch_factor=3, persistent_workers=True)
exact = lambda: loader(FakeDataset(N - 1), tail="exact", pin_memory=False, timeout=30)
subset = lambda: loader(FakeDataset(N), order=Subset(range(3, 30)))
weighted = lambda: loader(FakeDataset(N), shuffle=None, order=Weighted(range(N)))
bucketed = lambda: loader(
    FakeDataset(N), batch_size=1, order=LengthBucketed([3 + index % 7 for index in range(N)], max_tokens=21)
)
epoch_samples = lambda: loader(FakeDataset(N), epoch_samples=N + 9)
subclass = lambda: Passing(FakeDataset(N), scale=2, batch_size=4, num_workers=1)
tensors = lambda: loader(torch.utils.data.TensorDataset(torch.arange(N), torch.ones(N, 2)))
told = lambda: loader(torch.utils.data.Subset(Told(), range(N)))
put_back = lambda: loader(PutBack())
copied = lambda: loader(Copied())
unpicklable = lambda: loader(FakeDataset(N), collate_fn=lambda batch: batch)
private = lambda: loader(Private())
kept_numpy = lambda: loader(Kept(np.random.default_rng(1)))
kept_random = lambda: loader(Kept(random.Random(1)))
kept_torch = lambda: loader(Kept(torch.Generator()))
of_module = lambda: loader(OfModule())
by_worker = lambda: loader(ByWorker())
by_process = lambda: loader(ByProcess())
by_hash = lambda: loader(ByHash())
of_threads = lambda: loader(OfThreads())
on_first_use = lambda: loader(OnFirstUse())
counting_in_class = lambda: loader(CountingInClass())
counting_in_module = lambda: loader(CountingInModule())
numbering = lambda: loader(Numbering())
seldom = lambda: loader(Seldom())
by_thread = lambda: loader(ByThread())
clock = lambda: loader(Clock())
identified = lambda: loader(Identified())
counting = lambda: loader(Counting())
remembering = lambda: loader(Remembering())
built = lambda: loader(Built())
rounding = lambda: loader(Rounding())
in_bulk = lambda: loader(InBulk())
broken = lambda: loader(Broken())
broken_in_workers = lambda: loader(BrokenInWorkers())
broken_collate = lambda: loader(FakeDataset(N), collate_fn=torn)
iterable = lambda: DataLoader(Stream())
torchs = lambda: TorchLoader(range(N))
sampler = lambda: DataLoader(range(N), sampler=RandomSampler(range(N)))
batch_sampler = lambda: DataLoader(range(N), batch_sampler=[[1, 2], [3]])
empty = lambda: DataLoader([], seed=1)
fixed = lambda: Fixed(N)
forgetting = lambda: Forgetting("/data", range(N))
nothing = lambda: None
