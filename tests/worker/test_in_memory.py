"""In-memory batches gathered whole are those that torch collates from samples, or are left to it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate

from headrace import DataLoader
from headrace.worker.in_memory import Unsuitable, gather, rows_of

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32]


def tensor(rows: int, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32, shift: int = 0) -> torch.Tensor:
    """A tensor in which every element differs, as far as its dtype goes."""
    count = rows * int(np.prod(shape))
    return (torch.arange(count) + shift).reshape(rows, *shape).to(dtype)


@st.composite
def datasets(draw: Any, rows: int, depth: int = 2) -> Any:
    """Datasets of `rows` samples, of every kind that can be gathered, nested."""
    kinds = ["tensor", "array", "tensors"] + (["subset", "concat", "stack", "named"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    shape = draw(st.sampled_from([(), (3,), (2, 3)]))
    plain = tensor(rows, shape, draw(st.sampled_from(DTYPES)))
    if kind == "tensor":
        return draw(st.sampled_from([plain, plain.flip(0), plain.movedim(0, -1).contiguous().movedim(-1, 0)]))
    if kind == "array":
        return tensor(rows, shape).numpy().astype(draw(st.sampled_from(["?", "u1", "i4", "i8", "f2", "f4", "f8"])))
    if kind == "tensors":
        return TensorDataset(plain, tensor(rows, (2,)))
    inner = datasets(depth=depth - 1, rows=rows)
    if kind == "subset":
        chosen = draw(st.permutations(range(rows)))
        return Subset(
            draw(inner), draw(st.sampled_from([chosen, tuple(chosen), np.array(chosen), torch.tensor(chosen)]))
        )
    if kind == "concat":
        cut = draw(st.integers(1, rows - 1))
        one = draw(
            st.sampled_from(
                [lambda n, k: tensor(n, shape, shift=k), lambda n, k: TensorDataset(tensor(n, (), shift=k))]
            )
        )
        return ConcatDataset([one(cut, 0), one(rows - cut, 100)])
    parts = [draw(inner), draw(inner)]
    return StackDataset(*parts) if kind == "stack" else StackDataset(a=parts[0], b=parts[1])


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert torch.equal(ours, theirs)
    else:
        items = theirs.items() if isinstance(theirs, dict) else enumerate(theirs)
        assert len(ours) == len(theirs)
        for key, value in items:
            assert_same(ours[key], value)


@given(st.data())
def test_equals_collated_samples(data: Any) -> None:
    rows = data.draw(st.integers(2, 9))
    dataset = data.draw(datasets(rows=rows))
    wanted = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=12))
    assert_same(gather(dataset, torch.tensor(wanted)), default_collate([dataset[one] for one in wanted]))
    start = data.draw(st.integers(0, rows - 1))
    run = range(start, data.draw(st.integers(start + 1, rows)))
    assert_same(gather(dataset, run), default_collate([dataset[one] for one in run]))


@given(st.data())
def test_goes_where_it_is_told(data: Any) -> None:
    rows = data.draw(st.integers(2, 9))
    dataset = data.draw(datasets(rows=rows))
    made: list[torch.Tensor] = []

    def allocate(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty(tuple(shape), dtype=dtype))
        return made[-1]

    for wanted in (torch.tensor([1, 0, rows - 1]), range(rows)):
        made.clear()
        batch = gather(dataset, wanted, allocate)
        assert_same(batch, default_collate([dataset[int(one)] for one in wanted]))
        assert {leaf.data_ptr() for leaf in leaves(batch)} == {one.data_ptr() for one in made}


def leaves(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    return [leaf for part in (batch.values() if isinstance(batch, dict) else batch) for leaf in leaves(part)]


@pytest.mark.parametrize("rows", [range(3), torch.tensor([2, 0])])
def test_memory_is_its_own(rows: Any) -> None:
    source = tensor(4, (2,))
    (batch,) = gather(TensorDataset(source), rows)
    batch.zero_()
    assert torch.equal(source, tensor(4, (2,)))
    assert batch.untyped_storage().nbytes() == batch.nbytes


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * one for one in super().__getitem__(index))


class Named(TensorDataset):
    name = "overrides nothing"


class Tagged(torch.Tensor):
    pass


def fixed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "dataset",
    [
        Doubled(tensor(4)),
        [1, 2, 3, 4],
        tensor(4).requires_grad_(),
        tensor(4).to_sparse(),
        tensor(4).as_subclass(Tagged),
        torch.arange(4).to(torch.complex64),
        np.array(["a", "b", "c", "d"]),
        np.zeros(4, [("x", "f4")]),
        np.arange(4, dtype=">i4"),
        np.arange(4)[::-1],
        fixed(np.arange(4)),
        Subset(tensor(4), [True, 0, 1, 2]),
        Subset(tensor(4), torch.tensor([0.0, 1.0, 2.0, 3.0])),
        Subset([1, 2, 3, 4], [0, 1, 2, 3]),
        ConcatDataset([tensor(2), tensor(2, (1,))]),
        ConcatDataset([tensor(2), tensor(2, dtype=torch.int64)]),
        ConcatDataset([TensorDataset(tensor(2)), TensorDataset(tensor(2), tensor(2))]),
        ConcatDataset([TensorDataset(tensor(2)), StackDataset(a=tensor(2))]),
        ConcatDataset([tensor(2), tensor(2).numpy()]),
        StackDataset(tensor(4), ["a", "b", "c", "d"]),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_leaves_alone_what_it_is_not_sure_of(dataset: Any) -> None:
    with pytest.raises(Unsuitable):
        gather(dataset, torch.tensor([0, 3, 1]))


@pytest.mark.parametrize("rows", [range(3, 6), torch.tensor([0, 4]), torch.tensor([-1])])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda one: one,
        TensorDataset,
        lambda one: Subset(one, torch.arange(4)),
        lambda one: ConcatDataset([one, one[:0]]),
    ],
)
def test_leaves_alone_rows_that_are_not_there(rows: Any, wrap: Any) -> None:
    with pytest.raises(Unsuitable):
        gather(wrap(tensor(4)), rows)


def test_a_subclass_that_overrides_nothing_is_gathered() -> None:
    assert_same(gather(Named(tensor(4)), range(2)), [tensor(2)])


@pytest.mark.parametrize("index", [[True, 1], [1.0], ["a"], (0, 1), torch.tensor([0]), 3, []])
def test_rows_are_plain_integers(index: Any) -> None:
    assert rows_of(index) is None


@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=["parity", "plan"])
def test_an_index_beyond_the_end_is_the_datasets_own_error(options: dict[str, Any]) -> None:
    dataset = TensorDataset(tensor(8))
    loader = iter(DataLoader(dataset, batch_size=4, **options))
    next(loader)
    dataset.tensors = (tensor(6),)
    with pytest.raises(IndexError, match="index 6 is out of bounds"):
        next(loader)


def test_a_batch_that_cannot_be_gathered_is_fetched_from_then_on() -> None:
    dataset = TensorDataset(tensor(12))
    loader = iter(DataLoader(dataset, batch_size=4))
    assert_same(next(loader), [tensor(4)])
    dataset.tensors = (tensor(12).requires_grad_(),)
    assert next(loader)[0].grad_fn is not None, "collated from samples"
    assert_same(next(loader)[0].detach(), tensor(12)[8:])
