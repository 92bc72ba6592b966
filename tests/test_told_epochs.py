"""Datasets that are told the epoch: whatever workers read, and whatever happens to them, the samples are inline work's.

Jobs of `tests/integrations` have those that Accelerate and Lightning tell.
"""

import os
import signal
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import RandomSampler

from comparable import flat
from headrace import DataLoader
from rays import RAY, pids_of
from told_datasets import Told, deep

WORKERS: dict[str, dict[str, Any]] = {
    "inline": {},
    "thread": {"executor": "thread", "num_workers": 3},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "ray": {"executor": RAY, "num_workers": 2},
}


def set_ahead(loader: Any, reader: Any) -> None:
    loader.set_epoch(loader.epoch + 1)


def resize(loader: Any, reader: Any) -> None:
    loader.resize_workers(1 if loader.stats().workers == 3 else 3)


def kill(loader: Any, reader: Any) -> None:
    os.kill((pids_of(reader) or [process.pid for process in reader._workers])[0], signal.SIGKILL)


def change(loader: Any, reader: Any) -> None:
    """Change the rank's own object, from which other workers may be forked."""
    told = loader.dataset.datasets[0].dataset.datasets[0]
    told.set_epoch(77)
    told.size = told.new = 8
    kill(loader, reader)
    resize(loader, reader)


pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

IN_EPOCH: dict[str, Callable[[Any, Any], None]] = {
    "set_epoch": set_ahead,
    "killed": kill,
    "resized": resize,
    "changed": change,
}
CELLS = [
    *[(one, what) for one in ("inline", "thread", "fork") for what in ("ends", "persistent", "set_epoch", "late")],
    *[("fork", what) for what in ("killed", "resized", "changed")],
    *[(one, "changed") for one in ("spawn", "ray")],
]


def epochs(what: str, dataset: Any, **options: Any) -> list[list[Any]]:
    loader = DataLoader(dataset, batch_size=2, shuffle=True, seed=3, **options)
    found = []
    for number in range(3):
        reader = iter(loader)
        if what == "late":  # as Lightning does
            loader.sampler.set_epoch(2 * number)  # type: ignore[attr-defined]
        found.append([flat(next(reader))])
        if what in IN_EPOCH:
            IN_EPOCH[what](loader, reader)
        found[-1] += map(flat, reader)
    return found


@pytest.mark.parametrize(
    ("workers", "what"),
    [pytest.param(*cell, marks=pytest.mark.ray if "ray" in cell else (), id="-".join(cell)) for cell in CELLS],
)
def test_each_cell_is_inlines(workers: str, what: str) -> None:
    dataset = deep(draws=workers != "thread")
    persistent = {} if what == "ends" or workers == "inline" else {"persistent_workers": True}
    found = epochs(what, dataset, **WORKERS[workers], **persistent)
    expected = epochs("late" if what == "late" else "", deep(draws=workers != "thread"))
    assert found == expected
    told = [{epoch for (_, epochs_, _, _), _ in batches for epoch in epochs_} for batches in found]
    assert told == ([{0}, {2}, {4}] if what == "late" else [{0}, {1}, {2}])


@pytest.mark.parametrize("workers", ["inline", "thread", "fork"])
def test_two_readers_in_turn(workers: str) -> None:
    loaders = [DataLoader(deep(draws=False), batch_size=2, seed=3, **WORKERS[one]) for one in ("inline", workers)]
    expected = [[flat(batch) for batch in loaders[0]] for _ in range(2)]
    first: Any = iter(loaders[1])
    found = [[flat(next(first))], []]
    loaders[1].set_epoch(1)
    second: Any = iter(loaders[1])
    for batch in second:
        found[1].append(flat(batch))
        found[0] += [flat(other) for other in islice(first, 1)]
    assert found == expected


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "options", [{"shuffle": True}, {"sampler": RandomSampler(range(12))}], ids=["parity", "sampler"]
)
def test_without_a_plan_it_is_torchs(options: dict[str, Any], persistent: bool) -> None:
    """Workers that persist then keep the first epoch: torch has no way to tell them."""
    found = []
    for kind in (TorchLoader, DataLoader):
        torch.manual_seed(5)
        dataset = Told(12)
        loader = kind(dataset, batch_size=2, num_workers=1, persistent_workers=persistent, **options)
        found.append([])
        for epoch in range(2):
            dataset.set_epoch(epoch) if kind is TorchLoader else loader.set_epoch(epoch)
            found[-1].append([flat(batch) for batch in loader])
    assert found[0] == found[1]
