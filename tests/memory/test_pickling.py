"""What goes into a batch comes out of it: values, types, dtypes, and memory that may be written to."""

import dataclasses
import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from headrace.memory.pickling import decode, encode

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Boxed:
    tensor: torch.Tensor
    name: str


def through(value: Any) -> Any:
    """Send a value through bytes, as a socket would."""
    return decode([bytearray(part) for part in encode(value)])


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (0,), (2, 0, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    copy = through(tensor)
    assert (copy.dtype, copy.shape) == (dtype, tensor.shape)
    assert torch.equal(copy, tensor)
    copy.zero_()


def test_strides_gradients_and_views() -> None:
    turned = torch.arange(12.0).reshape(3, 4).t()
    assert through(turned).stride() == turned.stride()
    assert torch.equal(through(turned), turned)
    assert torch.equal(through(torch.arange(100)[3:7]), torch.arange(3, 7))
    assert len(encode(torch.arange(100.0)[3:7])[1]) == 16, "a view costs its own bytes"
    assert through(torch.ones(2, requires_grad=True)).requires_grad
    assert isinstance(through(torch.nn.Parameter(torch.ones(2))), torch.nn.Parameter)
    wide = torch.arange(12, dtype=torch.int32).to(torch.uint32).reshape(3, 4).t()
    assert through(wide).tolist() == wide.tolist()
    conjugate = torch.tensor([1 + 2j]).conj()
    assert through(conjugate).tolist() == [1 - 2j]
    assert torch.equal(through(torch.eye(3).to_sparse()).to_dense(), torch.eye(3))
    tagged = torch.ones(1)
    tagged.tag = "kept"  # type: ignore[attr-defined]
    assert through(tagged).tag == "kept"


def test_tensors_that_share_memory_go_on_sharing_it() -> None:
    base = torch.arange(100)
    whole, head, grid, other = through([base[10:30], base[10:14], base[10:30].view(4, 5), torch.arange(3)])
    whole.fill_(7)
    assert head.tolist() == [7] * 4
    assert grid.tolist() == [[7] * 5] * 4
    assert other.tolist() == [0, 1, 2]
    assert sum(map(len, encode([base[10:30], base[10:14]])[1:])) == 20 * 8, "what is shared is sent once, and no more"
    apart = through([base[:2], base[50:]])
    apart[0].fill_(7)
    assert apart[1].tolist() == list(range(50, 100))


def test_empty_and_differently_typed_views_among_those_that_share() -> None:
    base = torch.arange(10, dtype=torch.uint8)
    whole, words, nothing, end = through([base, base[:8].view(torch.int32), base[:0], base[10:10]])
    assert whole.tolist() == list(range(10))
    assert (words.dtype, words.shape) == (torch.int32, (2,))
    assert nothing.shape == end.shape == (0,)


def test_containers_and_arrays() -> None:
    value = {
        "list": [1, "two", b"three", None],
        "pair": Pair(torch.arange(3), (np.arange(4.0), np.float32(2))),
        "boxed": Boxed(torch.zeros(2), "name"),
        "ordered": OrderedDict(b=1, a=2),
        "structured": np.array([(1, 2.0)], dtype=[("id", "i4"), ("weight", "f8")]),
        "object": np.array([{"a": 1}, None], dtype=object),
    }
    copy = through(value)
    assert list(copy) == list(value)
    assert copy["list"] == value["list"]
    assert type(copy["pair"]) is Pair
    assert copy["pair"].left.tolist() == [0, 1, 2]
    assert copy["pair"].right[0].flags.writeable
    assert copy["boxed"].name == "name"
    assert list(copy["ordered"]) == ["b", "a"]
    assert copy["structured"].dtype == value["structured"].dtype  # type: ignore[attr-defined]
    assert copy["object"].tolist() == [{"a": 1}, None]


def test_data_lies_out_of_band() -> None:
    parts = encode([torch.zeros(1000), np.zeros(1000)])
    assert [len(part) for part in parts[1:]] == [4000, 8000]
    assert len(parts[0]) < 1000


def test_what_cannot_be_pickled_raises() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        encode([lambda: None])
