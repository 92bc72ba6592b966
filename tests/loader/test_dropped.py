"""A loader that is dropped lets go of its dataset at once: no reference cycle holds one, in any mode."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

import headrace
from accelerators import ThreadBackend
from headrace import DataLoader
from headrace.delivery.device import backends
from rays import RAY
from waiting import wait_for_reapers, wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore:epoch . was abandoned"),
    pytest.mark.filterwarnings("ignore:the state of a loader without a plan"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

LENGTH = 24


class Rows(Dataset[torch.Tensor]):
    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.broken:
            raise ValueError("this sample is broken")
        return torch.full((3000,), float(index))


class Numbers(IterableDataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


def whole(loader: Any) -> None:
    for _ in range(2):
        for _ in loader:
            pass


def a_part(loader: Any) -> None:
    for _ in islice(loader, 2):
        pass
    loader.state_dict()


def none(loader: Any) -> None:
    iter(loader)


def two_at_once(loader: Any) -> None:
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    loader.set_epoch(3)


def two_states(loader: Any) -> None:
    a_part(loader)
    loader.load_state_dict(loader.state_dict())
    a_part(loader)


def caught(loader: Any) -> None:
    with pytest.raises(ValueError, match="this sample is broken"):
        whole(loader)


USES = [whole, a_part, none, two_at_once, two_states, caught]

MODES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "parity": lambda rows: {"shuffle": True},
    "sampler": lambda rows: {"sampler": RandomSampler(rows)},
    "batches": lambda rows: {"batch_sampler": BatchSampler(RandomSampler(rows), 4, False), "batch_size": 1},
    "plan": lambda rows: {"shuffle": True, "seed": 3},
    "endless": lambda rows: {"seed": 3, "epoch_samples": LENGTH + 2, "distributed": headrace.World(0, 1)},
}

FORK = {"num_workers": 2, "multiprocessing_context": "fork"}
EXECUTORS: dict[str, dict[str, Any]] = {
    "thread": {"executor": "thread", "num_workers": 2},
    "fork": FORK,
    "persistent": FORK | {"persistent_workers": True},
}

DATASETS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "in memory": (lambda: TensorDataset(torch.arange(LENGTH)), {"seed": 1}),
    "wrapped": (lambda: Subset(ConcatDataset([Rows(), Rows()]), range(LENGTH)), {"seed": 1}),
    "deferred": (lambda: headrace.Deferred(Rows), {"seed": 1}),
    "stream": (Numbers, {}),
    "split stream": (Numbers, {"distributed": True}),
    "stream in workers": (Numbers, FORK),
    "stream in persistent workers": (Numbers, FORK | {"persistent_workers": True, "seed": 1}),
    "spawn": (Rows, {"seed": 1, "num_workers": 1, "multiprocessing_context": "forkserver"}),
    "device": (Rows, {"device": "cpu"}),
    "device, workers": (Rows, FORK | {"device": "cpu", "seed": 1}),
    "budget": (Rows, FORK | {"max_prefetch_bytes": 10**6, "seed": 1}),
    "growing": (Rows, {"num_workers": 1, "max_workers": 3, "multiprocessing_context": "fork", "seed": 1}),
    "out of order": (Rows, FORK | {"in_order": False, "seed": 1}),
    "replaced": (partial(Rows, 9), FORK | {"on_error": "replace", "seed": 1}),
    "ray": (Rows, {"num_workers": 1, "executor": RAY}),
}


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def goes(make: Callable[[], Any], options: Callable[[Any], dict[str, Any]], use: Callable[[Any], None]) -> None:
    """Read a loader of a dataset, drop both, and look whether the dataset has gone."""
    dataset = make()
    seen = weakref.ref(dataset)
    loader: Any = DataLoader(dataset, **{"batch_size": 4} | options(dataset))
    del dataset
    use(loader)
    del loader
    wait_for_reapers()  # closed pools are ended beside the caller
    wait_until(lambda: seen() is None, 10)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_a_dataset_goes_with_its_loader(mode: str, use: Any) -> None:
    goes(partial(Rows, 9 if use is caught else -1), MODES[mode], use)


@pytest.mark.parametrize("use", [a_part, caught], ids=lambda use: use.__name__)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("mode", ["parity", "sampler", "plan"])
def test_a_dataset_goes_with_its_workers(mode: str, executor: str, use: Any) -> None:
    goes(partial(Rows, 9 if use is caught else -1), lambda rows: MODES[mode](rows) | EXECUTORS[executor], use)


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=pytest.mark.ray) if one == "ray" else one for one in DATASETS]
)
def test_a_dataset_of_any_kind_goes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "cpu", ThreadBackend)
    make, options = DATASETS[kind]
    goes(make, lambda dataset: dict(options), a_part)


def test_an_iterator_outlives_its_loader() -> None:
    seen = []
    for mode in ("parity", "plan"):
        rows = Rows()
        seen.append(weakref.ref(rows))
        batches = iter(DataLoader(rows, batch_size=4, **MODES[mode](rows)))
        del rows
        assert len(list(batches)) == LENGTH // 4
        del batches
    assert [one() for one in seen] == [None, None]


ACCELERATED = """
import gc, sys, weakref
from accelerate import Accelerator
from torch.utils.data import Dataset
import headrace
class Rows(Dataset):
    def __len__(self): return 24
    def __getitem__(self, index): return float(index)
accelerator = Accelerator(cpu=True)
for options in ({"shuffle": True}, {"seed": 1}):
    gc.collect()
    gc.disable()
    loader = accelerator.prepare(headrace.DataLoader(Rows(), batch_size=4, **options))
    seen = weakref.ref(loader.dataset)
    assert loader.end_of_dataloader is False
    assert [loader.end_of_dataloader for batch in loader] == 5 * [False] + [True]
    next(iter(loader))
    accelerator.free_memory()
    del loader
    sys.exit("the dataset is still there") if seen() is not None else None
"""


def test_a_dataset_goes_under_accelerate() -> None:
    subprocess.run([sys.executable, "-c", ACCELERATED], check=True, timeout=300)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
@pytest.mark.parametrize("mode", MODES)
def test_a_loader_in_use_can_be_copied(mode: str, copied: Any) -> None:
    rows = Rows()
    loader: Any = DataLoader(rows, **{"batch_size": 4} | MODES[mode](rows))
    batches = iter(loader)
    next(batches)
    other = copied(loader)
    assert other.state_dict() == loader.state_dict()
    assert len(list(other)) == len(loader)  # its next pass begins where that of the other would
    assert len(list(batches)) == len(loader) - 1
