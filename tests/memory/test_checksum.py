"""The checksum of a batch: equal for equal data, in every process, and different for different data."""

import subprocess
import sys
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.memory.checksum import checksum

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
BATCHES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


@given(BATCHES, BATCHES)
def test_it_is_the_same_for_the_same_data(one: Any, other: Any) -> None:
    assert checksum(one) == checksum(one)
    assert (checksum(one) == checksum(other)) == (repr(one) == repr(other)), "a chance in four billion apart"


def changed(batch: torch.Tensor, place: int) -> torch.Tensor:
    other = batch.clone()
    other.view(-1)[place] += 1
    return other


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(7),
        torch.rand(3, 4).t(),
        torch.rand(4).to(torch.bfloat16),
        torch.rand(2, 2, dtype=torch.complex64).conj(),
        torch.rand(4, requires_grad=True),
        np.arange(6.0).reshape(2, 3).T,
        np.array(["a", "b"]),
        np.array([1, "b"], object),
        {"image": torch.rand(2, 3, 8, 8), "label": ["a", "b"]},
        UserDict(a=1),
        "x" * 10_000,
        [b"y" * 10_000] * 100,
        (1, 2.5, None, True),
        np.float32(3),
        object(),
        torch.rand(3).to_sparse(),
        torch.empty(0, 3),
    ],
    ids=lambda batch: f"{type(batch).__name__}",
)
def test_whatever_comes_has_one(batch: Any) -> None:
    before = str(batch)
    assert checksum(batch) == checksum(batch) != checksum([batch, batch])
    assert checksum(batch, 1) != checksum(batch, 2)
    assert str(batch) == before


def test_every_place_of_a_small_tensor_counts_and_every_sample_of_a_large_one() -> None:
    small, large = torch.rand(5, 7), torch.rand(64, 3, 32, 32)
    assert all(checksum(changed(small, place)) != checksum(small) for place in range(35))
    for sample in range(64):
        other = large.clone()
        other[sample] = torch.rand(3, 32, 32)
        assert checksum(other) != checksum(large)
    assert checksum(large.flip(0)) != checksum(large)


def test_kind_and_shape_count() -> None:
    batch = torch.zeros(4)
    others = (torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(5), [0.0] * 4, np.zeros(4))
    assert len({checksum(one) for one in (batch, *others)}) == 6


def test_it_is_the_same_in_every_process() -> None:
    batch = {"name": "shard-3", "numbers": [1, 2], "bytes": b"123", "tensor": torch.arange(3.0)}
    job = (
        "import torch; from headrace.memory.checksum import checksum;"
        "print(checksum({'name': 'shard-3', 'numbers': [1, 2], 'bytes': b'123', 'tensor': torch.arange(3.0)}))"
    )
    done = subprocess.run([sys.executable, "-c", job], capture_output=True, text=True, timeout=180, check=True)
    assert int(done.stdout) == checksum(batch)


class Refusing(dict[str, int]):
    def items(self) -> Any:
        raise OSError("not now")


def test_a_container_that_raises_does_not_end_the_epoch() -> None:
    assert checksum(Refusing(a=1)) == checksum(Refusing(a=2))
