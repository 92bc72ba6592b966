"""The part that cannot be pickled is named by its place in the value."""

import multiprocessing
import threading
from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch

from headrace.memory.pickling import encode
from headrace.memory.unpicklable import unpicklable_part

Pair = namedtuple("Pair", "left right")


class Box:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("lock", "number")

    def __init__(self) -> None:
        self.number, self.lock = 1, threading.Lock()


class Careful(Box):
    """Leaves out its lock only."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}


def within_a_cycle() -> Any:
    outer = Box()
    outer.inner = Box(outer=outer, number=1)  # type: ignore[attr-defined]
    outer.lock = threading.Lock()  # type: ignore[attr-defined]
    return outer


def tagged() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.lock = threading.Lock()  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    ("batch", "where"),
    [
        ({"meta": [Box(number=1, lock=threading.Lock())]}, "batch['meta'][0].lock is a _thread.lock"),
        ([1, Slotted()], "batch[1].lock is a _thread.lock"),
        (within_a_cycle(), "batch.lock is a _thread.lock"),
        (Careful(lock=threading.Lock(), more=[threading.Lock()]), "batch.more[0] is a _thread.lock"),
        (Pair(1, {2: memoryview(b"raw")}), "batch.right[2] is a memoryview"),
        ([Box(scale=partial(max, key=lambda one: one))], "batch[0].scale.keywords['key'] is a function (<lambda>)"),
        ([("text", number) for number in range(100_000)] + [threading.Lock()], "batch[100000] is a _thread.lock"),
        ([torch.zeros(3), tagged()], "batch[1].lock is a _thread.lock"),
        (threading.Lock(), "batch is a _thread.lock"),
    ],
)
def test_the_path_is_named(batch: Any, where: str) -> None:
    with pytest.raises(Exception, match="pickle") as caught:
        encode(batch)
    assert unpicklable_part(batch, "batch", caught.value) == where


def test_what_a_process_inherits_is_not_to_blame() -> None:
    """A multiprocessing lock cannot be pickled here, but can while a process starts."""
    dataset = Box(shared=multiprocessing.Lock(), own=threading.Lock())
    assert unpicklable_part(dataset, "dataset", TypeError()) == "dataset.own is a _thread.lock"


def test_depth_has_an_end() -> None:
    nested: list[Any] = []
    nested.append(nested)
    deep: Any = threading.Lock()
    for _ in range(100):
        deep = [nested, deep]
    assert unpicklable_part(deep, "batch", TypeError()).startswith("batch[1][1][1]")
    assert unpicklable_part([1, 2], "batch", TypeError()) == "batch is a list"
