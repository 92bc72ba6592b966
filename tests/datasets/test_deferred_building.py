"""Deferred: where, when and how often the dataset is built, and what is pickled."""

import copy
import os
import pickle
import threading
from collections.abc import Callable, Sized
from functools import partial
from typing import Any

import pytest
from torch.utils.data import (
    Dataset,
    IterableDataset,
    get_worker_info,
)

from deferred_datasets import CELLS, LENGTH, Bulk, Stream, deferred, tensors
from headrace import DataLoader, Deferred
from waiting import LIMIT_S


@pytest.fixture(params=[pytest.param(cell, id=name) for name, cell in CELLS.items()])
def cell(request: pytest.FixtureRequest) -> dict[str, Any]:
    options: dict[str, Any] = request.param
    return options


class Where(Dataset[Any]):
    """Tells where it was built: the process, the worker, and how often that process had built one."""

    times = 0

    def __init__(self) -> None:
        Where.times += 1
        info = get_worker_info()
        self.built = os.getpid(), None if info is None else (info.id, info.num_workers), Where.times

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is None or info.dataset is self
        return *self.built, os.getpid()


def as_it_is(sample: Any) -> Any:
    return sample


def take_note(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is Where
    assert (info.id, info.dataset.built[1]) == (worker, (worker, 2))
    assert "num_workers=2" in repr(info)


@pytest.mark.parametrize("hook", [None, take_note])
def test_each_process_builds_once(cell: dict[str, Any], hook: Callable[[int], None] | None) -> None:
    Where.times = 0
    dataset = Deferred(Where, LENGTH)
    in_processes = "multiprocessing_context" in cell
    hook = hook if in_processes else None
    loader = DataLoader(dataset, None, collate_fn=as_it_is, seed=7, worker_init_fn=hook, **cell)
    samples = list(loader)
    assert {(builder, times) for builder, _, times, reader in samples if builder == reader} == {
        (reader, 1) for *_, reader in samples
    }
    workers = {worker for _, worker, _, _ in samples}
    if in_processes:
        assert workers == {(0, 2), (1, 2)}
        assert Where.times == 0
    else:
        assert Where.times == 1


def test_a_forked_worker_builds_its_own_although_the_rank_has_one() -> None:
    dataset: Any = Deferred(Where)
    assert len(dataset) == LENGTH
    assert dataset[0][0] == os.getpid()
    loader = DataLoader(dataset, None, collate_fn=as_it_is, num_workers=1, multiprocessing_context="fork")
    for builder, worker, _, reader in loader:
        assert builder == reader != os.getpid()
        assert worker == (0, 1)


def test_threads_build_once() -> None:
    entered, second = [], threading.Event()

    def build() -> list[int]:
        entered.append(1)
        if len(entered) > 1:
            second.set()
        second.wait(0.2)
        return [5]

    dataset: Any = Deferred(build)
    read: list[int] = []
    threads = [threading.Thread(target=lambda: read.append(dataset[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert read == [5] * 4
    assert len(entered) == 1


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_while_it_is_being_built_does_not_hang() -> None:
    begun, go_on, rank = threading.Event(), threading.Event(), os.getpid()

    def build() -> range:
        begun.set()
        assert os.getpid() != rank or go_on.wait(LIMIT_S)
        return range(LENGTH)

    dataset: Any = Deferred(build, LENGTH)
    thread = threading.Thread(target=lambda: dataset[0])
    thread.start()
    try:
        assert begun.wait(LIMIT_S)
        loader = DataLoader(dataset, None, num_workers=1, multiprocessing_context="fork", timeout=LIMIT_S)
        assert list(loader) == list(range(LENGTH))
    finally:
        go_on.set()
        thread.join(LIMIT_S)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_only_what_it_was_given_is_pickled(protocol: int) -> None:
    dataset: Any = Deferred(partial(bytes, 100_000), 100_000)
    assert dataset[0] == 0
    text = pickle.dumps(dataset, protocol)
    assert len(text) < 300
    for other in (pickle.loads(text), copy.copy(dataset), copy.deepcopy(dataset)):
        assert (type(other), len(other), repr(other)) == (type(dataset), 100_000, "Deferred(bytes)")
        assert other.built() is not dataset.built()
    stream = pickle.loads(pickle.dumps(Deferred(Stream, 7, iterable=True), protocol))
    assert isinstance(stream, IterableDataset)
    assert len(stream) == 7  # type: ignore[arg-type]


def test_a_factory_that_cannot_be_pickled_is_named() -> None:
    loader = DataLoader(Deferred(lambda: [1], 1), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises((AttributeError, pickle.PicklingError)) as caught:
        next(iter(loader))
    assert any("dataset.factory is a function" in note for note in caught.value.__notes__)


def test_styles_and_lengths_are_told_by_type() -> None:
    maps: list[Any] = [Deferred(tensors), Deferred(tensors, LENGTH)]
    assert not any(isinstance(one, IterableDataset) for one in maps)
    assert [len(one) for one in maps] == [LENGTH] * 2
    streams: list[Any] = [Deferred(Stream, iterable=True), Deferred(Stream, LENGTH, iterable=True)]
    assert all(isinstance(one, IterableDataset) for one in streams)
    assert [isinstance(one, Sized) for one in streams] == [False, True]
    assert len(DataLoader(streams[1], batch_size=2)) == 6
    for refused in (lambda: len(streams[0]), lambda: len(DataLoader(streams[0]))):
        with pytest.raises(TypeError, match=r"has no len\(\)"):
            refused()
    assert not hasattr(maps[0], "__getitems__")
    assert hasattr(Deferred(partial(Bulk, 2)), "__getitems__")
    assert len(Deferred(lambda: deferred(tensors)).built()) == LENGTH
