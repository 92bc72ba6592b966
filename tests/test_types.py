"""The values that all layers share: checked where a user makes them, immutable, equal by value, picklable."""

import inspect
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from headrace.types import TAILS, IndexTask, PlanTask, StreamTask, World


def test_world() -> None:
    assert World() == World(0, 1)
    assert World(rank=3, size=4) != World(3, 5)
    assert len({World(1, 2), World(1, 2), World(0, 2)}) == 2


def test_a_world_takes_numpy_integers_and_keeps_plain_ones() -> None:
    world = World(np.int8(1), np.uint64(2))  # type: ignore[arg-type]
    assert world == World(1, 2)
    assert type(world.rank) is type(world.size) is int


@pytest.mark.parametrize(
    ("rank", "size", "error", "text"),
    [
        (0, 0, ValueError, "size=0 is not allowed: expected an integer >= 1."),
        (0, -2, ValueError, "size=-2 is not allowed"),
        (2, 2, ValueError, r"rank=2 is not allowed: expected an integer in \[0, 1\]. Ranks count from 0"),
        (-1, 2, ValueError, "rank=-1 is not allowed"),
        (1, 1, ValueError, r"rank=1 is not allowed: expected an integer in \[0, 0\]"),
        (0, 2.0, TypeError, r"size=2\.0 is not allowed: expected an integer >= 1, got float"),
        (0, True, TypeError, "size=True is not allowed.*got bool"),
        (False, 2, TypeError, "rank=False is not allowed.*got bool"),
        ("0", 2, TypeError, "rank='0' is not allowed.*got str"),
        (None, 2, TypeError, "rank=None is not allowed"),
    ],
)
def test_world_errors(rank: Any, size: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        World(rank, size)


@pytest.mark.parametrize(
    "value", [World(1, 2), PlanTask(3, 4, 5), IndexTask([1, 2]), StreamTask(0, 1, None)], ids=lambda v: type(v).__name__
)
def test_values_are_frozen_and_picklable(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
    with pytest.raises((FrozenInstanceError, AttributeError)):
        setattr(value, inspect.getfullargspec(type(value)).args[1], 0)
    assert not hasattr(value, "__dict__"), "a task crosses a process boundary per batch: it carries its fields only"


def test_tasks_are_values() -> None:
    assert PlanTask(0, 1) == PlanTask(epoch=0, step=1, cursor=0)
    assert len({PlanTask(0, 1), PlanTask(1, 0), PlanTask(0, 1, 1)}) == 3


def test_tails() -> None:
    assert TAILS == ("pad", "drop", "exact")
