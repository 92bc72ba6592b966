"""Warnings about a dataset before a fork."""

import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

import headrace.datasets.fork_safety
from headrace import Deferred, PackedList
from headrace.datasets.fork_safety import warn_before_fork

MANY_OBJECTS = 20_000
"""The number of objects that causes a warning in these tests; a million would slow down every fork of the run."""

REALLY_MANY = headrace.datasets.fork_safety.MANY_OBJECTS
MANY = list(range(1000, 1000 + MANY_OBJECTS))
WORDS = dict.fromkeys(MANY)


class Data:
    """A dataset that holds any object."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.datasets.fork_safety, "_warned", set())
    monkeypatch.setattr(headrace.datasets.fork_safety, "MANY_OBJECTS", MANY_OBJECTS)


def said(dataset: Any) -> list[str]:
    """The warnings about a dataset."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_before_fork(dataset)
    return [str(one.message) for one in caught]


@contextmanager
def thread_running() -> Iterator[threading.Thread]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        yield thread
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize(
    ("dataset", "names"),
    [
        (MANY, ["dataset (20,000 objects)"]),
        (Data(samples=MANY), ["dataset.samples (20,000 objects)"]),
        (Data(samples=tuple(MANY)), ["dataset.samples"]),
        (Data(samples=set(MANY)), ["dataset.samples"]),
        (Data(samples=WORDS), ["dataset.samples"]),
        (Data(samples=OrderedDict(WORDS)), ["dataset.samples"]),
        (Data(samples=[*MANY, None]), ["dataset.samples (20,001 objects)"]),
        (Data(tables={"train": [MANY]}), ["dataset.tables['train'][0]"]),
        (Data(store=SimpleNamespace(rows=MANY)), ["dataset.store.rows"]),
        (Data(first=MANY, again=MANY, other=WORDS), ["dataset.first (20,000 objects), dataset.other ("]),
        (Subset(Data(), MANY), ["dataset.indices"]),
        (Subset(Subset(Data(samples=MANY), [0]), [0]), ["dataset.dataset.dataset.samples"]),
        (ConcatDataset([Data(), Data(samples=MANY)]), ["dataset.datasets[1].samples"]),
        (StackDataset(Data(samples=MANY), Data()), ["dataset.datasets[0].samples"]),
        (StackDataset(left=Data(samples=MANY), right=Data()), ["dataset.datasets['left'].samples"]),
    ],
)
def test_many_objects_are_named(dataset: Any, names: list[str]) -> None:
    (message,) = said(dataset)
    assert message.startswith(names[0])
    assert all(name in message for name in names)
    assert "headrace.PackedList" in message


@pytest.mark.parametrize(
    "dataset",
    [
        range(10**9),
        TensorDataset(torch.zeros(2 * MANY_OBJECTS)),
        Data(samples=np.arange(2 * MANY_OBJECTS), names=np.array(["name"] * 10)),
        Data(samples=PackedList(MANY)),
        PackedList(MANY),
        Data(samples=MANY[1:]),
        Data(labels=[number % 10 for number in MANY]),
        Data(labels=[None] * MANY_OBJECTS),
        Data(text="x" * 2 * MANY_OBJECTS, blob=bytes(2 * MANY_OBJECTS)),
        Data(model=torch.nn.Linear(2, 2), tensor=torch.empty(2, device="meta")),
        Data(lock=threading.Lock(), again=threading.RLock(), event=threading.Event(), main=threading.current_thread()),
        Data(thread=threading.Thread(), pool=ThreadPoolExecutor(), processes=ProcessPoolExecutor()),
    ],
    ids=lambda dataset: "-".join([type(dataset).__name__, *getattr(dataset, "__dict__", {})]),
)
def test_nothing_is_said_about_a_clean_dataset(dataset: Any) -> None:
    assert said(dataset) == []


def test_nothing_is_said_about_what_a_deferred_dataset_builds_or_has_built_here() -> None:
    with thread_running() as thread:
        dataset = Deferred(lambda: Data(samples=MANY, thread=thread), 10)
        assert said(Subset(dataset, [0])) == []
        assert dataset.built().thread is thread
        assert said(Subset(dataset, [0])) == []


def test_a_million_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.datasets.fork_safety, "MANY_OBJECTS", REALLY_MANY)
    assert said(Data(samples=list(range(999_999)))) == []
    assert said(Data(samples=list(range(1_000_000))))[0].startswith("dataset.samples (1,000,000 objects)")


def test_a_few_are_named_and_the_rest_counted() -> None:
    held = {f"part{number}": tuple(MANY) for number in range(5)}
    (message,) = said(Data(**held))
    assert "dataset.part2 (20,000 objects), 2 more: " in message
    assert "part3" not in message


def test_each_kind_is_said_once() -> None:
    with thread_running() as thread:
        assert len(said(Data(samples=MANY))) == 1
        assert len(said(Data(samples=MANY, other=tuple(MANY)))) == 0
        (message,) = said(Data(samples=MANY, thread=thread))
        assert message.startswith("dataset.thread (a running thread): ")
        assert said(Data(samples=MANY, thread=thread)) == []


def test_all_kinds_are_said_at_one_time() -> None:
    with thread_running() as thread, FakeTensorMode():
        assert len(said(Data(samples=MANY, thread=thread, table=torch.empty(1, device="cuda")))) == 3


@pytest.mark.parametrize("make", [lambda: ThreadPoolExecutor(1), lambda: ProcessPoolExecutor(1), lambda: ThreadPool(1)])
def test_a_pool_in_use_is_named(make: Callable[[], Any]) -> None:
    with make() as pool:
        if isinstance(pool, Executor):
            pool.submit(int).result()
        (message,) = said(Data(reader=SimpleNamespace(pool=pool)))
        name = type(pool).__name__
    assert message.startswith(f"dataset.reader.pool (a {name} in use): ")
    assert "__getstate__" in message


def test_a_pool_that_was_shut_down_is_not() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
    assert said(Data(pool=pool)) == []


def test_a_thread_that_ended_is_not() -> None:
    with thread_running() as thread:
        pass
    assert said(Data(thread=thread)) == []


def test_a_lock_that_is_held_is_named() -> None:
    lock = threading.Lock()
    with lock:
        (message,) = said(Data(lock=lock))
    assert message.startswith("dataset.lock (a lock that is held): ")


def test_a_tensor_on_an_accelerator_is_named() -> None:
    with FakeTensorMode():  # tensors of any device, without their memory
        model = torch.nn.ParameterList([torch.empty(2, device="cuda")])
    (message,) = said(Subset(Data(model=model, host=torch.zeros(1)), [0]))
    assert message.startswith("dataset.dataset.model._parameters['0'] (a tensor on cuda:0): ")
    assert "on the CPU" in message


def test_no_code_of_the_users_is_called() -> None:
    class Lazy(list[Any]):
        def refuse(self, *_: Any) -> Any:
            raise RuntimeError

        __len__ = __iter__ = __getitem__ = __eq__ = __getattr__ = refuse  # type: ignore[assignment]
        __hash__ = None  # type: ignore[assignment]

    class Slotted:
        __slots__ = ()

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert said(Data(lazy=Lazy([MANY]), slotted=Slotted()))[0].startswith("dataset.lazy[0] (20,000 objects)")


def test_cycles_and_breadth_end() -> None:
    class Node:
        pass

    chain: Any = Node()
    chain.self, chain.rest = chain, {number: [{}, {}, {}] for number in range(10_000)}
    chain.samples = MANY
    assert said(Data(chain=chain))[0].startswith("dataset.chain.samples ")


def test_looking_takes_a_bounded_time() -> None:
    dataset = Data(**{f"part{number}": [Data(samples=[[]] * 10) for _ in range(1000)] for number in range(100)})
    start = time.thread_time()
    assert said(dataset) == []
    assert time.thread_time() - start < 0.1  # a walk over all of it would take seconds
