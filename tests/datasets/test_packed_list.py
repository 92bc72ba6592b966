"""PackedList: equal to a list, in one buffer that workers share."""

import copy
import gc
import operator
import pickle
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from headrace import DataLoader, PackedList

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
items = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner), max_leaves=8
)
bounds = st.none() | st.integers(-25, 25)
slices = st.builds(slice, bounds, bounds, bounds.filter(lambda step: step != 0))


@given(st.lists(items))
def test_gives_back_what_was_packed(values: list[Any]) -> None:
    packed = PackedList(iter(values))
    assert list(packed) == values
    assert [packed[number] for number in range(len(packed))] == values
    assert list(reversed(packed)) == values[::-1]


@given(st.integers(0, 20), slices, slices, bounds.filter(lambda index: index is not None))
def test_indices_and_slices_are_a_lists(length: int, first: slice, second: slice, index: int) -> None:
    values = [f"item {number}" for number in range(length)]
    packed: Any = PackedList(values)
    for made in (packed[first][second], pickle.loads(pickle.dumps(packed[first]))[second]):
        assert type(made) is PackedList
        assert list(made) == values[first][second]
        assert len(made) == len(values[first][second])
    assert outcome(lambda: packed[first][index]) == outcome(lambda: values[first][index])


def outcome(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except IndexError:
        return IndexError


@pytest.mark.parametrize("index", [np.int64(1), torch.tensor(1), True])
def test_whatever_counts_as_an_integer_is_an_index(index: Any) -> None:
    assert PackedList("abc")[index] == "b"


def test_is_a_sequence() -> None:
    packed = PackedList("abca")
    assert isinstance(packed, Sequence)
    assert "b" in packed
    assert packed.index("c") == 2
    assert packed.count("a") == 2
    assert repr(packed) == "<PackedList of 4 items>"
    assert not PackedList()


def test_an_index_out_of_range_names_it_and_the_length() -> None:
    with pytest.raises(IndexError, match="index -4 is out of range for a PackedList of 3 items"):
        PackedList("abc")[-4]


@pytest.mark.parametrize(
    "change", [lambda packed: operator.setitem(packed, 0, "x"), lambda packed: operator.delitem(packed, 0)]
)
def test_cannot_be_changed(change: Callable[[Any], None]) -> None:
    with pytest.raises(TypeError, match=r"'PackedList' object does(n't| not) support item"):
        change(PackedList("abc"))


def test_a_changed_item_is_not_kept() -> None:
    packed = PackedList([[1], np.zeros(2), torch.zeros(2)])
    packed[0].append(2)
    packed[1][0] = packed[2][0] = 1
    assert [packed[0], packed[1].tolist(), packed[2].tolist()] == [[1], [0, 0], [0, 0]]


def test_an_item_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda") as caught:
        PackedList([1, 2, lambda: None])
    assert caught.value.__notes__ == ["headrace: while packing item 2, of type function"]


def test_a_repeated_object_is_whole_in_every_item() -> None:
    shared = ["shared"]
    packed = PackedList([(shared, shared), shared])
    assert list(packed) == [(shared, shared), shared]
    first, second = packed[0]
    assert first is second


def test_tensors_keep_their_values_and_take_only_what_they_show() -> None:
    large = torch.arange(100_000)
    tensors = [large[:3], large[::50_000], torch.tensor(1.5, dtype=torch.bfloat16), torch.ones(2, requires_grad=True)]
    tensors += [torch.eye(2).to_sparse(), torch.arange(6).view(2, 3).T, torch.tensor([1j]).conj(), torch.empty(0, 2)]
    packed = PackedList([{"tensor": tensor} for tensor in tensors])
    for read, tensor in zip(packed, tensors, strict=True):
        assert read["tensor"].dtype == tensor.dtype
        assert read["tensor"].requires_grad == tensor.requires_grad
        assert read["tensor"].to_dense().tolist() == tensor.to_dense().tolist()
    assert len(pickle.dumps(PackedList([large[:3]] * 10))) < 10_000
    named = torch.zeros(1)
    named.name_of_mine = "kept"
    assert PackedList([named])[0].name_of_mine == "kept"


def test_a_copy_holds_the_same() -> None:
    packed = PackedList("abc")
    assert list(copy.copy(packed)) == list(copy.deepcopy(packed)) == ["a", "b", "c"]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_pickles_it(protocol: int) -> None:
    assert list(pickle.loads(pickle.dumps(PackedList("abc")[1:], protocol))) == ["b", "c"]


def test_pickle_leaves_the_items_where_they_are() -> None:
    packed = PackedList(bytes(1000) for _ in range(1000))
    buffers: list[pickle.PickleBuffer] = []
    assert len(pickle.dumps(packed, 5, buffer_callback=buffers.append)) < 1000
    assert sum(buffer.raw().nbytes for buffer in buffers) > 1_000_000
    part: list[pickle.PickleBuffer] = []
    pickle.dumps(packed[500:510], 5, buffer_callback=part.append)
    assert sum(buffer.raw().nbytes for buffer in part) < 20_000


def test_a_generator_is_packed_as_it_comes() -> None:
    def blobs() -> Iterator[bytes]:
        for number in range(2000):
            yield number.to_bytes(2, "little") * 5000

    tracemalloc.start()
    try:
        packed = PackedList(blobs())
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 20_000_000 < held < 1.2 * 20_000_000  # a growing buffer leaves room
    assert peak < 2.3 * 20_000_000  # it may move once
    assert packed[1999] == (1999).to_bytes(2, "little") * 5000


class Names(Dataset[Any]):
    """Returns the result of `ask` in the worker."""

    def __init__(self, names: Sequence[str], ask: Callable[[Sequence[str]], Any]) -> None:
        self.names = names
        self.ask = ask

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.ask(self.names)


def growth(names: Sequence[str]) -> int:
    """Read every name; return by how many bytes the process's own memory grew."""
    gc.disable()
    before = psutil.Process().memory_full_info().uss
    for number in range(len(names)):
        names[number]
    return int(psutil.Process().memory_full_info().uss - before)


def mapped_file(names: Any) -> str:
    """Read every name; return the file behind the names' memory."""
    assert list(names[:2]) == ["images/0.jpg", "images/1.jpg"]
    address = np.asarray(names._bytes).__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(one, 16) for one in line.split()[0].split("-"))
        if start <= address < end:
            return line.split(maxsplit=5)[-1].strip()
    return ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_forked_worker_copies_next_to_nothing() -> None:
    names = [f"images/{number}.jpg" for number in range(300_000)]
    grown = {}
    for kind in (list, PackedList):
        loader = DataLoader(Names(kind(names), growth), batch_size=None, num_workers=1, multiprocessing_context="fork")
        grown[kind] = next(iter(loader))
    assert grown[list] > 15_000_000  # what there is to be seen: 300,000 strings of 62 bytes
    assert grown[PackedList] < 3_000_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_spawned_worker_maps_the_items(method: str) -> None:
    names = PackedList(f"images/{number}.jpg" for number in range(300_000))
    loader = DataLoader(Names(names, mapped_file), batch_size=None, num_workers=1, multiprocessing_context=method)
    assert "memfd" in next(iter(loader))


def test_is_a_dataset_by_itself() -> None:
    packed = PackedList(range(10))
    assert [batch.tolist() for batch in DataLoader(packed, batch_size=5)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
