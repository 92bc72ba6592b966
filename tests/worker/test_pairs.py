"""`read_many` and `decode`: one read a batch, random numbers by the sample, whatever wraps the dataset."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset
from torch.utils.data import DataLoader as TorchLoader

import headrace
from headrace import DataLoader, Deferred, Plan, Sequential, World
from headrace.testing import FakeDataset
from headrace.worker.fetch import fetches_in_bulk
from headrace.worker.pairs import pair_of

LENGTH = 12


def sample_of(index: int, scale: int = 1) -> dict[str, Any]:
    """A sample that draws from everything there is."""
    return {
        "index": index * scale,
        "drawn": [torch.rand(()).item(), random.random(), np.random.rand()],
        "own": [headrace.rng().random(), torch.rand((), generator=headrace.torch_rng()).item()],
    }


class Single(Dataset[Any]):
    """The reference: samples one by one."""

    def __init__(self, scale: int = 1) -> None:
        self.scale = scale

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return sample_of(index, self.scale)


class Paired(Dataset[Any]):
    """The same samples, by the pair alone. A raw sample is a list that decoding empties."""

    def __init__(self, scale: int = 1, unreadable: Sequence[int] = (), undecodable: Sequence[int] = ()) -> None:
        self.scale, self.unreadable, self.undecodable = scale, unreadable, undecodable
        self.read: list[list[int]] = []

    def __len__(self) -> int:
        return LENGTH

    def read_many(self, indices: list[int]) -> Any:
        self.read.append(indices)
        if not {*self.unreadable}.isdisjoint(indices):
            raise OSError(f"one of {indices} cannot be read")
        return [[index] for index in indices]

    def decode(self, raw: list[int]) -> Any:
        sample = sample_of(raw.pop(), self.scale)
        if sample["index"] // self.scale in self.undecodable:
            raise ValueError("torn")
        return sample


class PairedAndMore(Paired):
    """Has all three, none of them more derived than the others."""

    decode = Paired.decode

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the pair comes first")

    def __getitems__(self, indices: list[int]) -> Any:
        raise AssertionError("the pair comes first")


class Augmented(Paired):
    """Overrides what the pair knows nothing of."""

    def __getitem__(self, index: int) -> int:
        return -index


class AugmentedInBulk(Paired):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [-index for index in indices]


class PairedAgain(Augmented):
    """And has a pair that knows of it."""

    def decode(self, raw: list[int]) -> Any:
        return -raw[0]


class Passing(Dataset[Any]):
    """Passes on all attributes of another dataset, and changes its samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return LENGTH

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__getitems__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        return -index


def numbers(dataset: Any, **options: Any) -> list[Any]:
    loader = DataLoader(dataset, collate_fn=list, **{"batch_size": 4, "seed": 3} | options)
    return [one for batch in loader for one in batch]


def test_which_of_several_ways_is_taken() -> None:
    expected = numbers(Single())
    assert numbers(Paired()) == numbers(PairedAndMore()) == expected
    assert not fetches_in_bulk(PairedAndMore())
    for kind in (Augmented, AugmentedInBulk, PairedAgain):
        assert numbers(kind()) == [-index for index in range(LENGTH)]
    assert fetches_in_bulk(AugmentedInBulk())
    assert numbers(Passing(Paired())) == [-index for index in range(LENGTH)]


def test_one_of_the_two_alone_is_no_pair() -> None:
    class Half(Single):
        def read_many(self, indices: list[int]) -> Any:
            raise AssertionError

    class Other(Single):
        read_many = None

        def decode(self, raw: Any) -> Any:
            raise AssertionError

    assert numbers(Half()) == numbers(Other()) == numbers(Single())


def test_a_decoder_may_be_given_to_the_dataset() -> None:
    class Given(Single):
        def __init__(self, decode: Callable[[Any], Any]) -> None:
            super().__init__()
            self.decode = decode

        def read_many(self, indices: list[int]) -> list[int]:
            return indices

    assert numbers(Given(lambda raw: -raw)) == [-index for index in range(LENGTH)]


def test_a_class_of_torchs_with_the_pair_is_not_gathered() -> None:
    class Scaled(TensorDataset):
        def read_many(self, indices: list[int]) -> Any:
            return self.tensors[0][indices]

        def decode(self, raw: torch.Tensor) -> torch.Tensor:
            return raw * 2

    assert [batch.tolist() for batch in DataLoader(Scaled(torch.arange(4)), 2, seed=0)] == [[0, 2], [4, 6]]


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
@pytest.mark.parametrize("options", [{}, {"fetch_threads": 3}, {"num_workers": 1}], ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
def test_in_parity_mode_draws_are_those_of_torch(options: dict[str, Any], shuffle: bool) -> None:
    results = []
    for kind, dataset, more in ((TorchLoader, Single(), {}), (DataLoader, Paired(), options)):
        torch.manual_seed(1), random.seed(2), np.random.seed(3)
        workers = {"num_workers": options.get("num_workers", 0)}
        read = list(kind(dataset, 5, shuffle=shuffle, collate_fn=list, **{**workers, **more}))
        results.append([[(one["index"], one["drawn"]) for one in batch] for batch in read])
        results.append([torch.rand(()).item(), random.random(), np.random.rand()])
    assert results[:2] == results[2:]


def test_samples_of_a_batch_are_read_in_one_call() -> None:
    dataset = PairedAndMore()
    list(DataLoader(dataset, 5, collate_fn=list, seed=0, fetch_threads=2))
    assert dataset.read[0] == [0, 1, 2, 3, 4]
    assert dataset.read[1:] in ([[*range(5, 10)], [10, 11]], [[*range(5)], [*range(5, 10)], [10, 11]])
    dataset.read.clear()
    list(DataLoader(dataset, None, seed=0))
    assert dataset.read == [[index] for index in range(LENGTH)]


def test_samplers_of_the_users() -> None:
    dataset = Paired()
    batches = [[3, 3, 1], [], [2]]
    read = list(DataLoader(dataset, batch_sampler=batches, collate_fn=list))
    assert [[one["index"] for one in batch] for batch in read] == batches
    assert dataset.read == [[3, 3, 1], [2]], "an index that comes twice is asked for twice"
    dataset = PairedAndMore()
    assert [one["index"] for one in DataLoader(dataset, None, sampler=[4, 2], collate_fn=dict)] == [4, 2]
    assert dataset.read == [[4], [2]]


def test_an_index_that_is_a_list_is_for_getitem() -> None:
    class Taking(Paired):
        def __getitem__(self, index: list[int]) -> list[int]:
            return index

        def decode(self, raw: Any) -> Any:
            raise AssertionError

    assert list(DataLoader(Taking(), None, sampler=[[1, 2], [3]], collate_fn=list)) == [[1, 2], [3]]


WRAPPERS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "subset": lambda make: Subset(make(), [5, 1, 1, 9, 0]),
    "subset of a subset": lambda make: Subset(Subset(make(), [5, 1, 1, 9, 0]), [4, 0]),
    "concatenation": lambda make: ConcatDataset([make(), make(2)]),
    "mixed concatenation": lambda make: ConcatDataset([Single(5), make(), Single(3)]),
    "stack": lambda make: StackDataset(make(), make(2)),
    "mixed stack": lambda make: StackDataset(image=Single(5), text=make()),
    "deferred": lambda make: Deferred(make),
    "subset of a deferred": lambda make: Subset(Deferred(make, length=LENGTH), [3, 0, 11]),
    "concatenation of deferred": lambda make: ConcatDataset([Deferred(make, length=LENGTH), make(2), Deferred(Single)]),
    "all": lambda make: Subset(
        ConcatDataset([StackDataset(make(), Deferred(make)), StackDataset(make(), Single())]), range(3, 20)
    ),
}


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
@pytest.mark.parametrize("options", [{}, {"fetch_threads": 3}, {"on_error": "replace"}, {"seed": None}], ids=str)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_wrappers_have_the_same_samples_and_draws(wrap: Callable[..., Any], options: dict[str, Any]) -> None:
    for batch_size in (1, 4, 100) if "fetch_threads" in options else (1, 4, 100, None):
        read = []
        for make in (Single, Paired):
            torch.manual_seed(1), random.seed(2), np.random.seed(3)
            read.append(list(DataLoader(wrap(make), batch_size, shuffle=True, **{"seed": 3} | options)))
        if options.get("seed", 3) is None:  # a batch has one headrace.rng() where torch's wrapper fetches it
            read = [without_own(one) for one in read]
        assert str(read[0]) == str(read[1])


def without_own(batches: Any) -> Any:
    if isinstance(batches, dict):
        return {name: without_own(value) for name, value in batches.items() if name != "own"}
    return [without_own(one) for one in batches] if isinstance(batches, list | tuple) else batches


def test_each_wrapped_dataset_is_read_once_a_batch_in_order() -> None:
    one, other = Paired(), Paired(2)
    both = ConcatDataset([one, Single(5), other])
    batch = next(iter(DataLoader(both, batch_sampler=[[30, 2, -1, 13, 1, -36, 35]], collate_fn=list)))
    assert [sample["index"] for sample in batch] == [12, 2, 22, 5, 1, 0, 22]
    assert (one.read, other.read) == ([[2, 1, 0]], [[6, 11, 11]])
    one.read.clear(), other.read.clear()
    list(DataLoader(StackDataset(one, other), 5, seed=0))
    assert one.read == other.read == [[*range(5)], [*range(5, 10)], [10, 11]]
    for index, error in ((36, IndexError), (-37, ValueError)):
        with pytest.raises(error):
            list(DataLoader(both, batch_sampler=[[0, index]]))


def test_a_deferred_part_is_not_built_before_it_is_read() -> None:
    late = Deferred(Paired, length=LENGTH)
    both = ConcatDataset([Paired(), late])
    next(iter(DataLoader(both, 4, seed=0)))
    assert late.built_here is None
    list(DataLoader(both, 24, seed=0))
    assert late.built_here.read == [[*range(LENGTH)]]


def test_a_stacked_getitems_is_called_once_a_batch() -> None:
    class Bulk(Dataset[int]):
        asked: list[list[int]] = []

        def __len__(self) -> int:
            return LENGTH

        def __getitems__(self, indices: list[int]) -> list[int]:
            self.asked.append(indices)
            return [10 * index for index in indices]

    for index, (sample, bulk) in enumerate(numbers(StackDataset(Paired(), Bulk()), batch_size=6)):
        assert (sample["index"], bulk) == (index, 10 * index)
    assert Bulk.asked == [[*range(6)], [*range(6, 12)]]


def test_a_subclass_of_a_wrapper_that_overrides_is_asked_as_it_says() -> None:
    class Doubled(ConcatDataset[Any]):
        def __getitem__(self, index: int) -> int:
            return 2 * index

    assert pair_of(Doubled([Paired()])) is None
    assert numbers(Doubled([Paired()])) == [2 * index for index in range(LENGTH)]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.data(), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_broken_samples_are_replaced_as_without_the_pair(
    data: st.DataObject, batch_size: int, size: int, shuffle: bool
) -> None:
    broken = data.draw(st.lists(st.integers(0, LENGTH - 1), max_size=5, unique=True))
    cut = data.draw(st.integers(0, len(broken)))

    class Torn(Single):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            if index in broken[:cut]:
                raise OSError
            if index in broken[cut:]:
                raise ValueError
            return sample

    def read(dataset: Any, rank: int) -> tuple[Any, list[Any]]:
        world = World(rank, size)
        loader = DataLoader(
            dataset, batch_size, shuffle, seed=3, distributed=world, collate_fn=list, on_error="replace", tail="exact"
        )
        return list(loader), [(one.position, one.index, one.substitute) for one in loader.stats().replacements]

    for rank in range(size):
        assert read(Paired(1, broken[:cut], broken[cut:]), rank) == read(Torn(), rank)


def test_a_batch_that_cannot_be_read_is_read_one_by_one_and_only_the_broken_sample_replaced() -> None:
    dataset = Paired(1, unreadable=[5])
    loader = DataLoader(dataset, 4, seed=3, collate_fn=list, on_error="replace")
    assert [len(batch) for batch in loader] == [4, 4, 4]
    substitute = Plan(Sequential(), LENGTH, seed=3).substitutes(0, 5)[0]
    assert dataset.read == [[0, 1, 2, 3], [4, 5, 6, 7], [4], [5], [substitute], [6], [7], [8, 9, 10, 11]]
    (record,) = loader.stats().replacements
    assert (record.index, record.position, record.error) == (5, 5, "OSError: one of [5] cannot be read")


class Tired(Paired):
    def read_many(self, indices: list[int]) -> Any:
        raise MemoryError


def test_want_of_memory_is_not_replaced() -> None:
    with pytest.raises(MemoryError):
        next(iter(DataLoader(Tired(), 4, seed=3, on_error="replace")))


class ReadsAndDraws(Paired):
    """Draws while it reads, too: a batch's numbers."""

    def read_many(self, indices: list[int]) -> Any:
        draws = [headrace.rng().random(), torch.rand(()).item()]
        return [[(index, draws)] for index in indices]

    def decode(self, raw: Any) -> Any:
        index, draws = raw.pop()
        return sample_of(index) | {"read": draws}


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
@pytest.mark.parametrize(
    "where", [{}, {"num_workers": 1}, {"num_workers": 2, "executor": "thread"}, {"fetch_threads": 2}], ids=str
)
def test_numbers_drawn_in_reading_are_the_first_samples_and_change_none_in_decoding(where: dict[str, Any]) -> None:
    read = numbers(ReadsAndDraws(), **where)
    draws = [one.pop("read") for one in read]
    assert read == numbers(Single())
    for place, (own, _) in enumerate(draws):
        first = place // 4 * 4
        assert own == read[first]["own"][0]
        assert draws[place] == draws[first]
    assert len({own for own, _ in draws}) == 3


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([1, 2, 3], "Wrong.read_many returned 3 items for 4 indices: expected one for each index, in order"),
        (b"12345", "Wrong.read_many returned 5 items for 4 indices"),
        (iter(range(4)), "Wrong.read_many returned a range_iterator for 4 indices: expected a sequence with one item"),
        (None, "Wrong.read_many returned a NoneType for 4 indices"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "replace"])
def test_another_number_of_items_is_an_error(returned: Any, says: str, on_error: Any) -> None:
    class Wrong(Paired):
        def read_many(self, indices: list[int]) -> Any:
            return returned

    with pytest.raises(ValueError, match=says) as caught:
        next(iter(DataLoader(Subset(Wrong(), range(4)), 4, seed=0, on_error=on_error)))
    assert caught.value.__notes__ == ["headrace: while fetching samples [0, 1, 2, 3], position 0 of epoch 0, step 0"]


def test_arrays_and_tensors_will_do_as_raw_samples() -> None:
    class Rows(Dataset[Any]):
        rows = np.arange(24).reshape(LENGTH, 2)

        def __len__(self) -> int:
            return LENGTH

        def read_many(self, indices: list[int]) -> Any:
            return self.rows[indices]

        def decode(self, raw: Any) -> Any:
            return raw + 1

    assert torch.cat(list(DataLoader(Rows(), 5, seed=0))).tolist() == (Rows.rows + 1).tolist()


def test_a_decoder_that_ends_an_iteration_is_told_of() -> None:
    class Ending(Paired):
        def decode(self, raw: Any) -> Any:
            raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(iter(DataLoader(Ending(), 4, seed=0)))
    with pytest.warns(UserWarning, match=r"raised StopIteration while fetching sample 0, which ends the epoch"):
        assert list(DataLoader(Ending(), 4)) == []


def test_samples_need_no_list() -> None:
    """An ordinary dataset is asked as before."""
    assert pair_of(FakeDataset(3)) is None
    assert pair_of([1, 2]) is None
    assert pair_of(torch.zeros(3)) is None
    assert pair_of(ConcatDataset([FakeDataset(3)])) is None
