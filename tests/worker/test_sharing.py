"""Dealing a stream: every sample as often as the tail rule says, in turn or in runs."""

from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.types import TAILS, World
from headrace.worker.sharing import StreamShare

PROPERTY = settings(deadline=None, derandomize=True, max_examples=200)


def dealt(length: int, size: int, tail: Any, run: int) -> list[list[int]]:
    return [list(StreamShare(World(rank, size), tail, run).of(iter(range(length)))) for rank in range(size)]


@PROPERTY
@given(st.integers(0, 60), st.integers(1, 6), st.sampled_from(TAILS), st.integers(1, 7))
def test_each_sample_is_dealt_once(length: int, size: int, tail: Any, run: int) -> None:
    """What is dealt in runs, laid end to end in rounds, is the stream, with the pads at the end."""
    ranks = dealt(length, size, tail, run)
    assert [len(rank) for rank in ranks] == [len(rank) for rank in dealt(length, size, tail, 1)]
    rounds = zip_longest(*([rank[at : at + run] for at in range(0, len(rank), run)] for rank in ranks), fillvalue=())
    stream = list(chain(*chain(*rounds)))
    pads = -length % size if tail == "pad" else 0
    if tail == "drop":
        assert stream == list(range(length - length % size))
    elif run == 1 and tail == "pad":
        assert stream[:length] == list(range(length))
        assert len(stream) == length + pads
    else:
        assert stream == [*range(length), *(place % length for place in range(pads))]


class Breaking(Iterator[int]):
    """Raises an error in the place of each seventh number."""

    def __init__(self, length: int) -> None:
        self._at, self._length = -1, length

    def __next__(self) -> int:
        self._at += 1
        if self._at >= self._length:
            raise StopIteration
        if self._at % 7 == 3:
            raise OSError
        return self._at


def test_a_share_in_runs_goes_on_behind_an_error() -> None:
    read: list[list[int]] = []
    for rank in range(2):
        samples = StreamShare(World(rank, 2), "exact", 4).of(Breaking(20))
        read.append([])
        errors = 0
        while True:
            try:
                read[rank].append(next(samples))
            except OSError:
                errors += 1
            except StopIteration:
                break
        assert errors == 3
    assert read == [[0, 1, 2, 4, 9, 11, 12, 13, 19], [5, 6, 7, 8, 14, 15, 16, 18]]


@pytest.mark.parametrize("run", [1, 4])
def test_nothing_is_read_behind_the_end(run: int) -> None:
    samples = StreamShare(World(1, 2), "pad", run).of(iter(range(9)))
    assert len(list(samples)) == 5
    assert list(samples) == []
