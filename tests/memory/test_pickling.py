"""Pickling keeps a batch: its values, types and dtypes, in writable memory."""

import dataclasses
import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from headrace.memory import pickling
from headrace.memory.pickling import decode, dump, encode

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Boxed:
    tensor: torch.Tensor
    name: str


class Tagged(torch.Tensor):
    tag: str


def through(value: Any) -> Any:
    """Send a value through bytes, as a socket would."""
    return decode([bytearray(part) for part in encode(value)])


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (0,), (2, 0, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    copy = through(tensor)
    assert (copy.dtype, copy.shape) == (dtype, tensor.shape)
    assert copy.view(torch.uint8).equal(tensor.view(torch.uint8)) if tensor.ndim else copy.item() == tensor.item()
    copy.zero_()


def test_the_next_one_of_a_kind_is_like_the_first() -> None:
    """The streams of plain tensors are cached; no other tensor may match one."""
    plain = torch.arange(12.0)
    kinds = [
        plain,
        plain.reshape(3, 4),
        plain.reshape(3, 4).t(),
        plain.clone().requires_grad_(),
        [plain],
        torch.nn.Parameter(plain.clone()),
        plain.as_subclass(Tagged),
        plain.numpy(),
    ]
    for step in range(3):
        for kind in kinds:
            copy = through(kind)
            assert type(copy) is type(kind)
            first, second = (copy[0], kind[0]) if isinstance(kind, list) else (copy, kind)
            assert first.tolist() == second.tolist()
            if isinstance(first, torch.Tensor):
                assert (first.stride(), first.requires_grad) == (second.stride(), second.requires_grad)
        plain += step + 1


def test_no_more_kinds_are_remembered_than_there_is_room_for() -> None:
    for _ in range(2):
        for length in range(1, pickling._MOST_PLAIN + 10):
            assert through(torch.arange(length)).tolist() == list(range(length))
        assert 0 < len(pickling._plain_kinds) <= pickling._MOST_PLAIN


@pytest.mark.parametrize("container", [list, tuple, lambda values: dict(zip("ab", values, strict=True))])
def test_containers_of_plain_tensors(container: Any) -> None:
    """The streams of such containers are cached, too."""
    image, label = torch.rand(3, 4), torch.arange(3)
    shared = torch.arange(4.0)
    for values in (
        [image, label],
        [label, image],
        [label, image.clone().requires_grad_()],
        [label, image.t()],
        [image, image],
        [shared[:3], shared[1:]],
        [torch.empty(0), label],
        [label, image.to(torch.bfloat16)],
        [label, "text"],
    ):
        value = container(values)
        for _ in range(2):
            copy = through(value)
            assert type(copy) is type(value)
            assert list(copy) == list(value) if isinstance(value, dict) else len(copy) == len(value)
            left, right = copy.values() if isinstance(value, dict) else copy
            for before, after in zip(values, (left, right), strict=True):
                if isinstance(before, str):
                    assert after == before
                    continue
                assert (after.dtype, after.requires_grad) == (before.dtype, before.requires_grad)
                assert torch.equal(after, before)
            if values[0] is image and values[1] is image:
                assert left is right
            elif values[0].data_ptr() == shared.data_ptr():
                left[1] = 7.0
                assert right[0] == 7.0


def test_containers_whose_names_are_equal_but_not_the_same() -> None:
    for names in ((1, 2), (True, 2), (1.0, 2), ("1", "2")):
        copy = through({name: torch.ones(2) for name in names})
        assert [(type(name), name) for name in copy] == [(type(name), name) for name in names]


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


def test_parts_keep_alive_what_they_are_views_of_and_no_longer() -> None:
    base = torch.arange(100)
    memory = StorageWeakRef(base.untyped_storage())  # type: ignore[no-untyped-call]
    parts = encode([base[10:30], base[10:14]])
    del base
    assert not memory.expired()  # type: ignore[no-untyped-call]
    del parts
    assert memory.expired()  # type: ignore[no-untyped-call]


def test_empty_and_differently_typed_views_among_those_that_share() -> None:
    base = torch.arange(10, dtype=torch.uint8)
    whole, words, nothing, end = through([base, base[:8].view(torch.int32), base[:0], base[10:10]])
    assert whole.tolist() == list(range(10))
    assert (words.dtype, words.shape) == (torch.int32, (2,))
    assert nothing.shape == end.shape == (0,)


def size_of(value: Any) -> int:
    return sum(map(len, encode(value)))


def test_a_view_costs_what_it_shows() -> None:
    table = torch.arange(1_000_000.0).reshape(1000, 1000)
    for view in (
        table[::100, ::100],
        table[:, 3],
        table[5:7, 5:7].t(),
        table[0, :1].expand(1000, 1000),
        table[:, :1].expand(1000, 9),
    ):
        copy = through(view)
        assert size_of(view) < 6_000
        assert torch.equal(copy, view)
    assert size_of([table[:, 3], table[:, 7]]) < 10_000, "interleaved, but nothing in common"
    assert size_of([table[:, :500], table[:, 500:]]) < 4_010_000, "most of the memory between: sent once"
    complex_table = torch.zeros(100_000, dtype=torch.complex64)
    assert size_of(complex_table.conj()[:10]) < 1_000
    assert size_of(complex_table.imag[:10]) < 1_000


def test_columns_with_an_element_in_common_go_on_sharing_it() -> None:
    table = torch.zeros(1000, 100)
    column, row = through([table[:, 3], table[500]])
    column[500] = 7
    assert row[3] == 7


steps = st.integers(1, 3)


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Some common views of one storage."""
    base = torch.arange(120, dtype=draw(st.sampled_from([torch.uint8, torch.float32, torch.int64])))
    taken = []
    for _ in range(draw(st.integers(1, 5))):
        view = base.reshape(draw(st.permutations([4, 5, 6])))
        slices = [slice(draw(st.integers(0, length - 1)), length, draw(steps)) for length in view.shape]
        view = view[tuple(slices)].permute(draw(st.permutations([0, 1, 2])))
        if draw(st.booleans()):
            view = view[..., :1].expand(*view.shape[:2], draw(st.integers(0, 3)))
        elif view.shape[0] > 1 and draw(st.booleans()):
            view = view[:, :, 0].unfold(0, 2, 1)
        taken.append(view)
    return taken


@settings(deadline=None)
@given(views())
def test_views_of_one_storage_stay_views_of_one_memory(originals: list[torch.Tensor]) -> None:
    copies = through(originals)
    for number in range(len(originals)):
        for corner in ((0, 0, 0), (0, 0, -1), (-1, -1, -1)):
            for written in (originals[number], copies[number]):
                if written.numel():
                    written[corner] = 200 + number
            assert all(map(torch.equal, copies, originals))


def test_views_of_one_array_by_several_tensors() -> None:
    array = np.arange(10)
    first, second = through([torch.from_numpy(array), torch.from_numpy(array[5:])])
    second.zero_()
    assert first.tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 0, 0]


def test_views_made_while_pickling() -> None:
    """They are made again at each pickling, at other addresses."""
    first, second = through([Passing(), torch.arange(6)[:4], torch.arange(6)])[0].pair
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3], [2, 3])


class Passing:
    def __init__(self, pair: Any = None) -> None:
        self.pair = pair

    def __reduce__(self) -> Any:
        made = torch.arange(4)
        return Passing, ((made, made[2:]),)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse(layout: torch.layout) -> None:
    blocks = (2, 2) if layout is torch.sparse_bsr else None
    sparse = torch.eye(4).to_sparse(layout=layout, blocksize=blocks)
    copy = through(sparse)
    assert copy.layout is layout
    assert torch.equal(copy.to_dense(), torch.eye(4))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.arange(3.0), torch.arange(5.0)], layout=layout)
    copy = through(nested)
    assert copy.is_nested
    assert [one.tolist() for one in copy.unbind()] == [[0, 1, 2], [0, 1, 2, 3, 4]]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised() -> None:
    quantised = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8)
    copy = through(quantised)
    assert copy.q_scale() == 0.5
    assert torch.equal(copy.dequantize(), quantised.dequantize())


def test_lazy_signs_and_conjugates_keep_sharing() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    plain, conjugate, negative = through([base, base.conj(), base.conj().imag])
    assert conjugate.is_conj()
    assert negative.is_neg()
    plain[0] = 5 + 6j
    assert conjugate[0] == 5 - 6j
    assert negative.tolist() == [-6, 4]


def test_subclasses_keep_type_and_attributes_and_lie_out_of_band() -> None:
    base = torch.arange(1000.0)
    tagged = base[:500].as_subclass(Tagged)
    tagged.tag = "kept"
    copy, plain = through([tagged, base])
    assert type(copy) is Tagged
    assert copy.tag == "kept"
    plain[0] = 7
    assert copy[0] == 7
    assert len(encode(tagged)[1]) == 2000


def test_packed_sequences() -> None:
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    copy = through(packed)
    assert type(copy) is PackedSequence
    assert torch.equal(copy.data, packed.data)
    assert torch.equal(copy.batch_sizes, packed.batch_sizes)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(24).reshape(2, 3, 4)[:, ::2].T,
        np.array(3.5),
        np.zeros((0, 3)),
        np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
        np.array([5], dtype="timedelta64[s]"),
        np.array(["text", "längerer Text"]),
        np.array([b"raw", b""]),
        np.array([(1, b"x")], dtype=[("id", ">i4"), ("name", "S3")]),
        np.ma.masked_array([1, 2, 3], mask=[False, True, False]),
        np.arange(4.0).astype(np.float16),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
    ids=lambda array: f"{type(array).__name__}-{array.dtype.str}",
)
def test_arrays(array: Any) -> None:
    copy = through(array)
    assert type(copy) is type(array)
    assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
    assert copy.flags.f_contiguous == array.flags.f_contiguous
    assert copy.flags.writeable
    assert repr(copy) == repr(array)


def test_large_bytes_are_not_copied_before_they_reach_their_place() -> None:
    large = [bytes([number]) * 100_000 for number in range(3)]
    stream = dump(["small", *large, bytearray(100_000), "x" * 100_000])[0]
    assert sum(any(piece is one for one in large) for piece in stream) == 3
    assert through(large) == large


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


def test_a_default_device_of_the_user_s_is_for_the_user() -> None:
    torch.set_default_device("meta")
    try:
        back = decode(encode(torch.arange(7, device="cpu")))
    finally:
        torch.set_default_device(None)
    assert back.tolist() == [0, 1, 2, 3, 4, 5, 6]
