"""What can be seen of a loader beside its batches: signature, attributes, workers, and their lives."""

import copy
import inspect
import multiprocessing
import os
import pickle
import random
from collections import UserDict
from multiprocessing import connection
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import headrace
import parity_datasets as data
from parity_tools import LOADERS, Raised, abandoned, assert_parity, attempt, interleaved, steps, three_epochs
from waiting import wait_for_reapers

pytestmark = pytest.mark.timeout(180)

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffled": {"shuffle": True, "batch_size": 4, "drop_last": True},
    "unbatched": {"batch_size": None},
    "unbatched and shuffled": {"batch_size": None, "shuffle": True},
    "sampler": {"sampler": [1, 2, 3], "batch_size": 2},
    "batch sampler": {"batch_sampler": [[1], [2, 3]]},
    "workers": {"num_workers": 2, "timeout": 3, "worker_init_fn": data.reseed_and_mutate},
    "context": {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True},
    "generator": {"shuffle": True, "generator": torch.Generator()},
    "collate": {"collate_fn": data.to_dict, "in_order": False, "pin_memory": True},
    "stream": {"dataset": data.Sized()},
    "stream without length": {"dataset": data.Stream(), "batch_size": None},
    "stream, dropping": {"dataset": data.Sized(), "batch_size": 3, "drop_last": True, "shuffle": False},
}
FROZEN = ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers")
PLAIN = (
    *("num_workers", "prefetch_factor", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn", "in_order"),
    *("batch_size", "drop_last", "generator", "collate_fn", "persistent_workers", "_iterator", "_auto_collation"),
    *("multiprocessing_context", "_dataset_kind", "dataset"),
)


def child_count() -> int:
    wait_for_reapers()
    return len(multiprocessing.active_children())


def test_it_is_torchs():
    loader = headrace.DataLoader(data.Plain())
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert issubclass(headrace.DataLoader, torch.utils.data.DataLoader)
    assert headrace.DataLoader.__name__ == torch.utils.data.DataLoader.__name__


def test_the_signature_begins_with_torchs():
    theirs, ours = (list(inspect.signature(one).parameters.values()) for one in LOADERS)
    assert [(one.name, one.kind, one.default) for one in theirs] == [
        (one.name, one.kind, one.default) for one in ours[: len(theirs)]
    ]
    own = ours[len(theirs) :]
    assert own
    assert all(one.kind is one.KEYWORD_ONLY for one in own)
    assert {one.name: one.default for one in own if one.default is not None} == {
        "fetch_threads": 1,
        "on_error": "raise",
        "device_prefetch": 1,
    }


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_attributes(name):
    options = {"dataset": data.Plain(), **CONFIGURATIONS[name]}
    theirs, ours = (loader_class(**options) for loader_class in LOADERS)
    for attribute in PLAIN:
        assert getattr(theirs, attribute) == getattr(ours, attribute), attribute
    assert type(theirs.batch_sampler) is type(ours.batch_sampler)
    assert isinstance(ours.sampler, type(theirs.sampler))
    if isinstance(theirs.batch_sampler, BatchSampler):
        assert ours.batch_sampler.sampler is ours.sampler
        for attribute in ("batch_size", "drop_last"):
            assert getattr(theirs.batch_sampler, attribute) == getattr(ours.batch_sampler, attribute)
    if isinstance(theirs.sampler, RandomSampler):
        for attribute in ("data_source", "replacement", "num_samples", "generator", "_num_samples"):
            assert getattr(theirs.sampler, attribute) == getattr(ours.sampler, attribute), attribute
    if isinstance(theirs.sampler, SequentialSampler):
        assert theirs.sampler.data_source == ours.sampler.data_source
    assert attempt(lambda: len(theirs.sampler)) == attempt(lambda: len(ours.sampler))
    assert "multiprocessing_context" not in vars(ours)
    assert vars(theirs).keys() <= vars(ours).keys()


@pytest.mark.parametrize("name", [*FROZEN, "timeout", "generator", "collate_fn", "multiprocessing_context", "anything"])
def test_setting_attributes(name):
    outcomes = []
    for loader_class in LOADERS:
        loader = loader_class(data.Plain(), num_workers=1)
        context = multiprocessing.get_context("fork")
        value = context if name == "multiprocessing_context" else getattr(loader, name, 5)
        outcomes.append(attempt(lambda loader=loader, value=value: setattr(loader, name, value)))
        assert getattr(loader, name) is value
    assert outcomes[0] == outcomes[1]
    assert isinstance(outcomes[1], Raised) == (name in FROZEN)


def test_a_wrong_context_is_refused_later_too():
    outcomes = []
    for loader_class in LOADERS:
        for workers, context in ((1, "thread"), (1, 7), (0, "fork"), (1, "spawn"), (1, None)):
            loader = loader_class(data.Plain(), num_workers=workers)
            outcomes.append(attempt(lambda loader=loader, one=context: setattr(loader, "multiprocessing_context", one)))
    assert outcomes[:5] == outcomes[5:]
    assert outcomes[:3] != [None] * 3


def test_it_is_generic_and_can_be_subclassed():
    class Loader(headrace.DataLoader[int]):
        def __iter__(self):
            return (batch + 1 for batch in super().__iter__())

    assert headrace.DataLoader[int].__origin__ is headrace.DataLoader
    assert [batch.tolist() for batch in Loader([1, 2, 3], 2)] == [[2, 3], [4]]
    refused = attempt(lambda: setattr(Loader([1]), "batch_size", 2))
    assert refused == Raised(ValueError, "batch_size attribute should not be set after Loader is initialized")


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": data.Stream()},
        {"dataset": data.Stream(), "num_workers": 1, "batch_size": None},
        {"dataset": data.Plain(), "sampler": data.Tensors()},
        {"dataset": data.Plain(), "sampler": iter([1])},
        {"dataset": data.Plain(), "batch_sampler": (one for one in [[1]])},
        {"dataset": data.Plain(), "batch_sampler": [[1], [2]]},
        {"dataset": UserDict({0: 1}), "batch_size": 3},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_lengths(options):
    def use(loader):
        return [attempt(lambda: len(loader)), attempt(lambda: len(iter(loader))), attempt(lambda: len(loader.sampler))]

    outcomes = [use(loader_class(**options)) for loader_class in LOADERS]
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [data.Plain(5), data.Sharded(5)], ids=repr)
def test_iterators(dataset, workers):
    def use(loader):
        iterator = iter(loader)
        return [
            iter(iterator) is iterator,
            iter(loader) is iterator,
            attempt(lambda: len(iterator)),
            attempt(lambda: pickle.dumps(iterator)).kind,
            attempt(lambda: copy.copy(iterator)).kind,
            loader._iterator is None,
            len(getattr(iterator, "_workers", ())),
            steps(iterator, 9),
            list(iterator),
            loader._iterator is None,
        ]

    result = assert_parity(lambda cls: cls(dataset, 2, num_workers=workers), use)
    assert result[1:3] == [False, 3 if isinstance(dataset, data.Plain) else result[2]]
    assert result[3] is NotImplementedError
    assert child_count() == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_persistent_workers(workers):
    def use(loader):
        first = iter(loader)
        pids = [worker.pid for worker in first._workers]
        read = [list(first), steps(first, 2)]
        again = iter(loader)
        return [
            *(read, again is first, loader._iterator is first, len(pids)),
            *([worker.pid for worker in again._workers] == pids, list(again), child_count()),
        ]

    result = assert_parity(lambda cls: cls(data.Plain(5), 2, num_workers=workers, persistent_workers=True), use)
    assert result[1:5] == [True, True, workers, True]
    assert result[-1] == workers


def test_letting_persistent_workers_go():
    loader = headrace.DataLoader(data.Plain(5), num_workers=2, persistent_workers=True)
    assert len(list(loader)) == 5
    assert child_count() == 2
    loader._iterator = None
    assert child_count() == 0
    assert len(list(loader)) == 5
    loader._iterator._shutdown_workers()
    assert child_count() == 0
    loader._iterator = None


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_abandoned_iterators_leave_no_process(count, persistent):
    loader = headrace.DataLoader(data.Drawing(), 2, num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    assert len(steps(iterator, count)) == count
    held = [os.dup(worker.sentinel) for worker in iterator._workers]
    del iterator, loader
    for sentinel in held:
        assert connection.wait([sentinel], timeout=60) == [sentinel]
        os.close(sentinel)
    assert len(held) == 2
    assert child_count() == 0


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_workers_know(workers, persistent):
    result = assert_parity(
        lambda cls: cls(
            data.Telling(), 5, num_workers=workers, persistent_workers=persistent and workers > 0, collate_fn=data.facts
        ),
        three_epochs,
    )
    assert len(result[0]) == 4
    assert get_worker_info() is None


@pytest.mark.slow
def test_what_spawned_workers_know():
    assert_parity(
        lambda cls: cls(data.Telling(), 10, num_workers=1, collate_fn=data.facts, multiprocessing_context="spawn"), list
    )


@pytest.mark.parametrize("change", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [data.Drawing, data.Sharded], ids=lambda one: one.__name__)
def test_copies(change, workers, dataset):
    def use(loader):
        torch.rand(1)
        copied = change(loader)
        assert type(copied) is type(loader)
        frozen = attempt(lambda: setattr(copied, "sampler", 1))
        read = [list(copied), list(loader), list(copied)]
        return [frozen, attempt(lambda: len(copied)), copied.sampler is loader.sampler, read]

    assert_parity(lambda cls: cls(dataset(), 6, shuffle=dataset is data.Drawing, num_workers=workers), use)


def test_a_copied_generator_goes_its_own_way():
    def use(loader):
        copied = copy.deepcopy(loader)
        return [list(copied), list(copied), list(loader), list(loader.sampler), list(copied.sampler)]

    assert_parity(lambda cls: cls(range(9), 3, shuffle=True, generator=torch.Generator().manual_seed(4)), use)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("use", [three_epochs, abandoned, interleaved], ids=lambda use: use.__name__)
def test_data_pipes(workers, persistent, use):
    persistent = persistent and workers > 0
    pipes = [
        (lambda: IterableWrapper(range(9)).shuffle().sharding_filter(), {"shuffle": True}),
        (lambda: IterableWrapper(range(9)).map(str), {"batch_size": None}),
        (lambda: SequenceWrapper(list(range(9))), {"shuffle": True}),
    ]
    for pipe, options in pipes:
        assert assert_parity(
            lambda cls, pipe=pipe, options=options: cls(
                pipe(), num_workers=workers, persistent_workers=persistent, **options
            ),
            lambda loader: attempt(lambda: use(loader)),  # they refuse to be read twice at once
        )


class Wrapped:
    """What some libraries put around a loader's iterator, in `_get_iterator`."""

    def __init__(self, iterator):
        self.iterator = iterator

    def __iter__(self):
        return self

    def __next__(self):
        return ("wrapped", str(next(self.iterator)))

    def _reset(self, loader, first_iter=False):
        self.iterator._reset(loader, first_iter)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("dataset", [data.Plain(), data.Stream()], ids=["map", "stream"])
def test_an_overridden_get_iterator_is_heeded(dataset, options):
    def outcome(base):
        class Loader(base):
            def _get_iterator(self):
                return Wrapped(super()._get_iterator())

        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        loader = Loader(dataset, batch_size=2, **options)
        epochs = [list(loader) for _ in range(2)]
        kept = loader._iterator is not None
        loader._iterator = None
        return epochs, kept, list(loader)

    assert outcome(headrace.DataLoader) == outcome(torch.utils.data.DataLoader)
