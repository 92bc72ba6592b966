"""Deferred: what a loader gives over the dataset itself, from one that is built where it is read."""

import copy
import functools
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sized
from functools import partial
from typing import Any

import numpy as np
import pytest
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
from waiting import LIMIT_S

CELLS: dict[str, dict[str, Any]] = {
    "inline": {"executor": "inline"},
    "thread-2": {"executor": "thread", "num_workers": 2},
    "fork-2": {"num_workers": 2, "multiprocessing_context": "fork"},
}
LENGTH = 11


@pytest.fixture(params=[pytest.param(cell, id=name) for name, cell in CELLS.items()])
def cell(request: pytest.FixtureRequest) -> dict[str, Any]:
    options: dict[str, Any] = request.param
    return options


class Bulk(FakeDataset):
    """Gives samples in bulk, and draws for them in bulk."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, torch.rand(1).item(), headrace.rng().random()) for index in indices]


class OnlyBulk(Dataset[Any]):
    """Gives samples in bulk alone, unless one is broken."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        if 3 in indices:
            raise KeyError("broken")
        return indices


class Stream(IterableDataset[Any]):
    """Deals numbers to the workers; draws, and keeps its place and its epoch."""

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
    """Make a dataset by way of all the random numbers there are."""
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


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
@pytest.mark.parametrize("wrap", WRAPPERS, ids=["plain", "subset", "concatenation", "stack"])
@pytest.mark.parametrize("seed", [7, None], ids=["plan", "parity"])
def test_bits_equal_the_datasets(cell: dict[str, Any], wrap: Callable[[Any], Any], seed: int | None) -> None:
    for make in MAKERS:
        made = []
        for dataset in (wrap(make()), wrap(deferred(make, length=LENGTH)), wrap(deferred(make))):
            seed_all()
            loader = DataLoader(dataset, batch_size=4, shuffle=True, seed=seed, **cell)
            made.append([flat(loader), flat(loader), len(loader)])
        assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("wrap", "start_method"),
    [(WRAPPERS[0], "spawn"), (WRAPPERS[0], "forkserver"), (WRAPPERS[1], "forkserver")],
    ids=["plain-spawn", "plain-forkserver", "subset-forkserver"],
)
def test_bits_equal_the_datasets_in_workers_that_start_afresh(wrap: Callable[[Any], Any], start_method: str) -> None:
    options = {"num_workers": 2, "multiprocessing_context": start_method, "persistent_workers": True}
    expected = DataLoader(wrap(FakeDataset(LENGTH)), batch_size=4, shuffle=True, seed=7)
    loader = DataLoader(wrap(deferred(MAKERS[0], length=LENGTH)), batch_size=4, shuffle=True, seed=7, **options)
    assert [flat(loader), flat(loader)] == [flat(expected), flat(expected)]


@pytest.mark.parametrize("seed", [7, None])
@pytest.mark.parametrize("cell", [CELLS["inline"], CELLS["fork-2"]], ids=["inline", "fork-2"])
def test_streams_equal_the_datasets(cell: dict[str, Any], seed: int | None) -> None:
    made = []
    for dataset in (Stream(), deferred(Stream, iterable=True)):
        seed_all()
        loader = DataLoader(dataset, batch_size=2, seed=seed, **cell)
        made.append([flat(loader), flat(loader)])
    assert made[0] == made[1]
    assert {epoch for batch in made[0][1] for epoch in batch[1]} == {0 if seed is None else 1}


def test_a_streams_own_state_is_kept() -> None:
    made = []
    for make in (Stream, lambda: deferred(Stream, iterable=True)):
        loader, other = (DataLoader(make(), batch_size=2, seed=7, **CELLS["fork-2"]) for _ in range(2))
        reader = iter(loader)
        made.append(flat([next(reader) for _ in range(3)]))
        other.load_state_dict(loader.state_dict())
        made[-1] += [flat(other), flat(list(reader))]
        assert made[-1][-1] == made[-1][-2]
    assert made[0] == made[1]


def test_replaced_samples_equal_the_datasets(cell: dict[str, Any]) -> None:
    made = []
    for dataset in (OnlyEven(), Deferred(OnlyEven), Subset(Deferred(OnlyEven), range(LENGTH))):
        loader = DataLoader(dataset, batch_size=4, seed=7, on_error="replace", **cell)
        made.append([flat(loader), loader.stats().replacements])
        assert loader.stats().replaced == 5
    assert made[0] == made[1] == made[2]


class OnlyEven(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if index % 2:
            raise KeyError(index)
        return index


def test_a_bulk_call_alone_is_not_taken_for_single_ones() -> None:
    for dataset in (OnlyBulk(), Deferred(OnlyBulk, LENGTH)):
        loader = DataLoader(Subset(dataset, range(LENGTH)), batch_size=4, seed=7, on_error="replace")
        with pytest.raises(KeyError, match="broken"):
            next(iter(loader))


def test_in_memory_data_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = flat(DataLoader(tensors(), batch_size=4))
    monkeypatch.setattr(TensorDataset, "__getitem__", None)  # nobody needs it
    assert flat(DataLoader(Deferred(tensors), batch_size=4)) == expected
    with pytest.raises(TypeError, match="not callable"):
        flat(DataLoader(Deferred(tensors), batch_size=4, collate_fn=list))


def test_torchs_own_loader_takes_it() -> None:
    for make in MAKERS:
        loaders = [
            torch.utils.data.DataLoader(one, batch_size=4, num_workers=2) for one in (make(), Deferred(make, LENGTH))
        ]
        seed_all()
        expected = flat(list(loaders[0]))
        seed_all()
        assert flat(list(loaders[1])) == expected
    streams = [torch.utils.data.DataLoader(one, num_workers=2) for one in (Stream(), Deferred(Stream, iterable=True))]
    assert flat(list(streams[0])) == flat(list(streams[1]))


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


class Flaky(FakeDataset):
    """Cannot be built the first time, in any process."""

    tries = 0

    def __init__(self, error: type[Exception] = ConnectionError) -> None:
        super().__init__(LENGTH)
        Flaky.tries += 1
        if Flaky.tries == 1:
            raise error("no such store")


def outcomes(reader: Any) -> Iterator[Any]:
    """What a reader gives until its end: batches, and errors."""
    while True:
        try:
            yield flat(next(reader))
        except StopIteration:
            return
        except (ConnectionError, RuntimeError) as error:
            yield error


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
@pytest.mark.parametrize("wrap", WRAPPERS[:2], ids=["plain", "subset"])
def test_an_error_of_the_factory_arrives_in_its_place_and_the_next_read_tries_again(
    cell: dict[str, Any], wrap: Callable[[Any], Any]
) -> None:
    Flaky.tries = 0
    expected = flat(DataLoader(wrap(FakeDataset(LENGTH)), batch_size=2, seed=7))
    found = list(outcomes(iter(DataLoader(wrap(Deferred(Flaky, LENGTH)), batch_size=2, seed=7, **cell))))
    errors = [one for one in found if isinstance(one, Exception)]
    assert len(found) == len(expected)
    assert len(errors) == (2 if "multiprocessing_context" in cell else 1)
    assert [one for one in found if one not in errors] == [
        batch for batch, one in zip(expected, found, strict=True) if one not in errors
    ]
    for error in errors:
        assert type(error) is ConnectionError
        assert "no such store" in str(error)
        assert error.__notes__[0] == "headrace: while building the dataset of Deferred(Flaky)"
        if "num_workers" in cell:
            assert "in DataLoader worker" in error.__notes__[1]


@pytest.mark.parametrize("iterable", [False, True])
def test_stop_iteration_does_not_pass_for_the_end(cell: dict[str, Any], iterable: bool) -> None:
    Flaky.tries = 0
    loader = DataLoader(Deferred(partial(Flaky, StopIteration), LENGTH, iterable=iterable), seed=7, **cell)
    with pytest.raises(RuntimeError, match=r"the factory of Deferred\(Flaky\) raised StopIteration"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("make", "options", "kind", "text"),
    [
        (tensors, {"length": 12}, ValueError, "length=12 was given, but the .* has a length of 11"),
        (Stream, {}, TypeError, "returned a Stream: expected a dataset with __getitem__. Pass iterable=True"),
        (tensors, {"iterable": True}, TypeError, "a TensorDataset: expected an IterableDataset. Leave out iterable"),
        (functools.lru_cache(int), {}, TypeError, "returned a int: expected a dataset with __getitem__. It must"),
        (int, {"iterable": True}, TypeError, "returned a int: expected an IterableDataset. It must"),
    ],
)
def test_what_is_built_must_be_what_was_said(
    make: Callable[[], Any], options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    for cell in (CELLS["inline"], CELLS["fork-2"]):
        loader = DataLoader(Deferred(make, **({"length": 5} | options)), seed=7, **cell)
        with pytest.raises(kind, match=text) as caught:
            next(iter(loader))
        assert "while building the dataset of Deferred(" in caught.value.__notes__[0]


class OfLength(Stream):
    def __len__(self) -> int:
        return LENGTH


class Unsure(Stream):
    def __len__(self) -> int:
        raise NotImplementedError


def test_the_length_of_a_stream_is_compared_where_it_has_one() -> None:
    for make in (OfLength, Unsure, Stream):
        assert len(list(DataLoader(Deferred(make, LENGTH, iterable=True)))) == LENGTH
    with pytest.raises(ValueError, match="length=12 was given, but the dataset that was built has a length of 11"):
        iter(DataLoader(Deferred(OfLength, 12, iterable=True)))


def test_a_factory_that_reads_what_it_is_to_build_is_told_so() -> None:
    dataset: Any = Deferred(lambda: [dataset[0]])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="reads from the dataset that it is to build"):
            dataset[0]


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (([1],), TypeError, r"factory=\[1\] is not allowed: expected a callable without arguments .*partial"),
        ((FakeDataset,), TypeError, "factory=.* is not allowed: .*missing a required argument: 'length'"),
        ((tensors, -1), ValueError, "length=-1 is not allowed: expected an integer >= 0. Leave it out"),
        ((tensors, 1.5), TypeError, "length=1.5 is not allowed"),
    ],
)
def test_a_mistake_is_told_at_once(arguments: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Deferred(*arguments)
    assert len(Deferred(dict, 0)) == 0  # type: ignore[arg-type]
