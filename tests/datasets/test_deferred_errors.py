"""Deferred: the errors of a factory that raises, or builds another kind of dataset than stated."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from deferred_datasets import CELLS, LENGTH, WRAPPERS, Stream, flat, tensors
from headrace import DataLoader, Deferred
from headrace.testing import FakeDataset


@pytest.fixture(params=[pytest.param(cell, id=name) for name, cell in CELLS.items()])
def cell(request: pytest.FixtureRequest) -> dict[str, Any]:
    options: dict[str, Any] = request.param
    return options


class Flaky(FakeDataset):
    """Raises at the first construction in each process."""

    tries = 0

    def __init__(self, error: type[Exception] = ConnectionError) -> None:
        super().__init__(LENGTH)
        Flaky.tries += 1
        if Flaky.tries == 1:
            raise error("no such store")


def outcomes(reader: Any) -> Iterator[Any]:
    """A reader's batches and errors, until its end."""
    while True:
        try:
            yield flat(next(reader))
        except StopIteration:
            return
        except (ConnectionError, RuntimeError) as error:
            yield error


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
@pytest.mark.parametrize("wrap", WRAPPERS[:2], ids=["plain", "subset"])
def test_an_error_of_the_factory_arrives_in_its_place_and_the_next_read_tries_again(
    cell: dict[str, Any], wrap: Callable[[Any], Any]
) -> None:
    Flaky.tries = 0
    expected = flat(DataLoader(wrap(FakeDataset(LENGTH)), batch_size=2, seed=7))
    found = list(outcomes(iter(DataLoader(wrap(Deferred(Flaky, LENGTH)), batch_size=2, seed=7, **cell))))
    errors = [one for one in found if isinstance(one, Exception)]
    assert len(found) == len(expected)
    assert len(errors) == (2 if "multiprocessing_context" in cell else 1)
    assert [one for one in found if one not in errors] == [
        batch for batch, one in zip(expected, found, strict=True) if one not in errors
    ]
    for error in errors:
        assert type(error) is ConnectionError
        assert "no such store" in str(error)
        assert error.__notes__[0] == "headrace: while building the dataset of Deferred(Flaky)"
        if "num_workers" in cell:
            assert "in DataLoader worker" in error.__notes__[1]


@pytest.mark.parametrize("iterable", [False, True])
def test_stop_iteration_does_not_pass_for_the_end(cell: dict[str, Any], iterable: bool) -> None:
    Flaky.tries = 0
    loader = DataLoader(Deferred(partial(Flaky, StopIteration), LENGTH, iterable=iterable), seed=7, **cell)
    with pytest.raises(RuntimeError, match=r"the factory of Deferred\(Flaky\) raised StopIteration"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("make", "options", "kind", "text"),
    [
        (tensors, {"length": 12}, ValueError, "length=12 was given, but the .* has a length of 11"),
        (Stream, {}, TypeError, "returned a Stream: expected a dataset with __getitem__. Pass iterable=True"),
        (tensors, {"iterable": True}, TypeError, "a TensorDataset: expected an IterableDataset. Leave out iterable"),
        (functools.lru_cache(int), {}, TypeError, "returned a int: expected a dataset with __getitem__. It must"),
        (int, {"iterable": True}, TypeError, "returned a int: expected an IterableDataset. It must"),
    ],
)
def test_what_is_built_must_be_what_was_said(
    make: Callable[[], Any], options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    for cell in (CELLS["inline"], CELLS["fork-2"]):
        loader = DataLoader(Deferred(make, **({"length": 5} | options)), seed=7, **cell)
        with pytest.raises(kind, match=text) as caught:
            next(iter(loader))
        assert "while building the dataset of Deferred(" in caught.value.__notes__[0]


class OfLength(Stream):
    def __len__(self) -> int:
        return LENGTH


class Unsure(Stream):
    def __len__(self) -> int:
        raise NotImplementedError


def test_the_length_of_a_stream_is_compared_where_it_has_one() -> None:
    for make in (OfLength, Unsure, Stream):
        assert len(list(DataLoader(Deferred(make, LENGTH, iterable=True)))) == LENGTH
    with pytest.raises(ValueError, match="length=12 was given, but the dataset that was built has a length of 11"):
        iter(DataLoader(Deferred(OfLength, 12, iterable=True)))


def test_a_factory_that_reads_what_it_is_to_build_is_told_so() -> None:
    dataset: Any = Deferred(lambda: [dataset[0]])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="reads from the dataset that it is to build"):
            dataset[0]


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (([1],), TypeError, r"factory=\[1\] is not allowed: expected a callable without arguments .*partial"),
        ((FakeDataset,), TypeError, "factory=.* is not allowed: .*missing a required argument: 'length'"),
        ((tensors, -1), ValueError, "length=-1 is not allowed: expected an integer >= 0. Leave it out"),
        ((tensors, 1.5), TypeError, "length=1.5 is not allowed"),
    ],
)
def test_a_mistake_is_told_at_once(arguments: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Deferred(*arguments)
    assert len(Deferred(dict, 0)) == 0  # type: ignore[arg-type]
