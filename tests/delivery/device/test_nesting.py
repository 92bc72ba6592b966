"""Tensors in batches of any structure."""

from array import array
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from headrace.delivery.device.nesting import Replacement, replaced


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Sample:
    image: Any
    name: str = "name"


class Frozen(Sequence[Any]):
    """A sequence that cannot be made of its parts."""

    def __init__(self, one: Any, other: Any) -> None:
        self.parts = one, other

    def __len__(self) -> int:
        return 2

    def __getitem__(self, at: Any) -> Any:
        return self.parts[at]


ONE = torch.tensor([1.0])
BY = Replacement(lambda tensor: tensor + 1, lambda value: value.to("cpu", torch.float64))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict | UserDict):
        return (
            type(one) is type(other) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple | UserList | deque):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (ONE, ONE + 1),
        ([ONE, 3, "text", b"bytes", None], [ONE + 1, 3, "text", b"bytes", None]),
        ((ONE, (ONE,)), (ONE + 1, (ONE + 1,))),
        ({"a": ONE, "b": {"c": [ONE]}}, {"a": ONE + 1, "b": {"c": [ONE + 1]}}),
        (OrderedDict(a=ONE), OrderedDict(a=ONE + 1)),
        (UserDict(a=ONE), UserDict(a=ONE + 1)),
        (UserList([ONE]), UserList([ONE + 1])),
        (Pair(ONE, "x"), Pair(ONE + 1, "x")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_structures_stay(batch: Any, expected: Any) -> None:
    assert same(replaced(batch, BY), expected)


def test_more_than_the_items_of_a_mapping_stays() -> None:
    found = replaced(defaultdict(int, a=ONE), BY)
    assert (found["a"], found["b"]) == (ONE + 1, 0)


def test_dataclasses() -> None:
    found = replaced(Sample(ONE), BY)
    assert isinstance(found, Sample)
    assert (found.image, found.name) == (ONE + 1, "name")


def test_objects_that_know_how_to_move() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    found = replaced([packed], BY)[0]
    assert isinstance(found, PackedSequence)
    assert found.data.dtype is torch.float64
    assert found.batch_sizes.dtype is torch.int64


def test_what_cannot_be_made_of_its_parts_becomes_a_list() -> None:
    assert replaced(Frozen(ONE, 2), BY) == [ONE + 1, 2]


class AttrDict(dict[str, Any]):
    """Attributes are items, and there are no others."""

    __getattr__ = dict.__getitem__


def test_attributes_that_are_items() -> None:
    found = replaced(AttrDict(a=ONE), BY)
    assert type(found) is AttrDict
    assert found.a == ONE + 1


def test_what_holds_no_tensor_stays_as_it_is() -> None:
    for value in (
        range(1000),
        array("d", [1e9, 2e9]),
        Frozen(1, 2),
        Sample(1),
        {"a": (1, "b")},
        np.ones(2),
        torch.float32,
        int,
        "text",
        object(),
    ):
        assert replaced(value, BY) is value
