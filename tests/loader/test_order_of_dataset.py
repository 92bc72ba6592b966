"""An order that the dataset brings: heeded with shuffle=True alone, and then under a plan."""

import pickle
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset

import headrace
from headrace import Balanced, DataLoader, Deferred, Order, Plan, Sequential, Shuffled, Weighted

LENGTH = 12


class Bringing(Dataset[int]):
    """Brings an order that reads a half of it."""

    def __init__(self, order: Any = None) -> None:
        self.order: Any = headrace.Subset(range(0, LENGTH, 2)) if order is None else order

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class BringingStream(IterableDataset[int]):
    order = Shuffled()

    def __iter__(self) -> Any:
        return iter(range(LENGTH))


def order_of(loader: DataLoader[Any]) -> Order | None:
    """The order that a loader follows under a plan; None without one."""
    return loader.plan().order if loader._source.planned() else None


def read(loader: DataLoader[Any]) -> list[int]:
    return sorted(int(index) for batch in loader for index in batch)


def test_it_is_heeded_with_shuffle_alone() -> None:
    shuffled = DataLoader(Bringing(), 2, shuffle=True)
    assert order_of(shuffled) == headrace.Subset(range(0, LENGTH, 2), shuffle=True)
    assert read(shuffled) == list(range(0, LENGTH, 2))
    assert shuffled.state_dict()["mode"] == "plan"
    for shuffle in (False, None):
        plain = DataLoader(Bringing(), 2, shuffle=shuffle)
        assert order_of(plain) is None
        assert read(plain) == list(range(LENGTH))


def test_under_a_plan_without_shuffle_the_dataset_is_read_in_sequence() -> None:
    assert order_of(DataLoader(Bringing(), 2, seed=0)) == Sequential()


def test_the_loaders_own_order_wins() -> None:
    weighted = Weighted([1.0] * LENGTH)
    assert order_of(DataLoader(Bringing(), 2, shuffle=True, order=weighted)) is weighted


def test_a_sampler_wins() -> None:
    loader = DataLoader(Bringing(), 2, sampler=[3, 1])
    assert [batch.tolist() for batch in loader] == [[3, 1]]


@pytest.mark.parametrize(
    "order", ["by date", Shuffled, lambda: None, [2, 1]], ids=["a name", "a type", "a function", "a list"]
)
def test_what_is_no_order_is_left_alone(order: Any) -> None:
    assert order_of(DataLoader(Bringing(order), 2, shuffle=True)) is None
    assert order_of(DataLoader(Bringing(order), 2, shuffle=True, seed=0)) == Shuffled()


def test_an_order_that_does_not_fit_is_refused_with_both_lengths() -> None:
    with pytest.raises(ValueError, match=r"len\(weights\)=3 is not allowed.*len\(dataset\)=12"):
        DataLoader(Bringing(Weighted([1.0] * 3)), 2, shuffle=True)


def test_streams_have_no_order() -> None:
    assert read(DataLoader(BringingStream(), 2)) == list(range(LENGTH))


@pytest.mark.parametrize(
    "wrapped",
    [
        pytest.param(lambda one: Subset(one, range(LENGTH)), id="Subset"),
        pytest.param(lambda one: ConcatDataset([one]), id="ConcatDataset"),
        pytest.param(lambda one: StackDataset(one), id="StackDataset"),
        pytest.param(lambda one: Deferred(lambda: one, LENGTH), id="Deferred"),
    ],
)
def test_wrappers_bring_none(wrapped: Any) -> None:
    assert order_of(DataLoader(wrapped(Bringing()), 2, shuffle=True)) is None


def test_a_deferred_brings_the_order_that_it_was_given() -> None:
    order = Balanced([0, 1] * (LENGTH // 2))
    dataset = Deferred(Bringing, LENGTH, order=order)
    assert order_of(DataLoader(dataset, 2, shuffle=True)) is order
    assert dataset.built_here is None, "the order is known without building"


def test_a_deferred_keeps_its_order_when_it_is_pickled() -> None:
    dataset = pickle.loads(pickle.dumps(Deferred(Bringing, LENGTH, order=Shuffled())))
    assert dataset.order == Shuffled()


def test_a_deferred_refuses_what_is_no_order() -> None:
    with pytest.raises(TypeError, match=r"order='by date' is not allowed: expected None or an Order.*got str"):
        Deferred(Bringing, LENGTH, order="by date")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"order=Shuffled\(\) is not allowed: expected None with iterable=True"):
        Deferred(BringingStream, iterable=True, order=Shuffled())


@pytest.mark.parametrize("executor", ["inline", "process", "thread"])
def test_every_executor_reads_the_plan(executor: Any) -> None:
    loader = DataLoader(Bringing(), 2, shuffle=True, executor=executor, num_workers=0 if executor == "inline" else 2)
    plan = loader.plan()
    assert isinstance(plan, Plan)
    assert [batch.tolist() for batch in loader] == [plan.batch(0, step).tolist() for step in range(len(loader))]
