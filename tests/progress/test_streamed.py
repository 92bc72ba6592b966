"""Stopping and going on in a stream: read again to the place and compared, or with a state of its own."""

import json
import random
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from headrace import DataLoader, World
from headrace.progress.base import packed
from headrace.worker.streams import has_state
from progress.drawing_streams import Keeping, Stream

pytestmark = pytest.mark.filterwarnings("error:the iterable dataset was read again")


def columns(batches: Any, count: int = 5) -> list[Any]:
    return [tuple(row) for batch in batches for row in zip(*(part.tolist() for part in batch[:count]), strict=True)]


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 3}], ids=str)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kind", [Stream, Keeping])
def test_a_stream_goes_on_where_it_was(
    kind: type[Stream], seed: int | None, persistent: bool, options: dict[str, Any]
) -> None:
    workers = options["num_workers"]
    if persistent and not workers:
        return
    if kind is Stream and seed is None and not workers:
        return  # it draws from the caller's own generators
    options = options | {"batch_size": 4, "seed": seed, "persistent_workers": persistent}
    width = 5 if kind is Stream else 2
    for stop in (1, 4, 6) if workers else range(1, 7):
        loader, other = DataLoader(kind(), **options), DataLoader(kind(), **options)
        reader = iter(loader)
        got = columns([next(reader) for _ in range(stop)], width)
        state = loader.state_dict()
        assert state["samples"] == len(got)
        other.load_state_dict(state)
        assert columns(other, width) == columns(reader, width)
        if seed is not None:
            assert columns(other, width) == columns(loader, width), "the next epoch, too"
    assert loader.state_dict()["epoch"] == 1 + (seed is not None)


def test_a_dataset_with_a_state_is_not_read_again() -> None:
    loader = DataLoader(Keeping(), batch_size=4)
    reader = iter(loader)
    next(reader)
    other = DataLoader(Keeping(), batch_size=4)
    other.load_state_dict(loader.state_dict())
    first = next(iter(other))
    assert (first[0].tolist(), first[2].tolist()) == ([4, 5, 6, 7], [1, 2, 3, 4])


class SharedEpoch(IterableDataset[int]):
    """Has its epoch in memory that all processes share, as Hugging Face's do; yields what it was before."""

    def __init__(self) -> None:
        self._epoch = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.before = int(self._epoch)
        self._epoch += epoch - self.before

    def __iter__(self) -> Iterator[int]:
        return iter([self.before])


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_in_shared_memory_is_set_before_workers_set_it_at_once(persistent: bool) -> None:
    """Two that add the difference to the epoch before would add it twice, and shuffle otherwise."""
    loader = DataLoader(SharedEpoch(), batch_size=None, num_workers=2, seed=1, persistent_workers=persistent)
    assert [list(loader) for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]


class Restless(IterableDataset[int]):
    """Shuffles as no seed of the loader's can decide; each pass another way."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.items))
        random.SystemRandom().shuffle(order)
        return iter(order)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"seed": 3, "distributed": World(0, 2)}], ids=str)
def test_what_is_read_again_is_compared_with_what_was_delivered(options: dict[str, Any], workers: int) -> None:
    options = options | {"batch_size": 8, "num_workers": workers}
    loader = DataLoader(Restless(100), **options)
    reader = iter(loader)
    for _ in range(3):
        next(reader)
    other = DataLoader(Restless(100), **options)
    other.load_state_dict(loader.state_dict())
    reader = iter(other)
    with pytest.warns(UserWarning, match="read again .* yielded other data .* twice or never.* state_dict") as caught:
        list(islice(reader, max(1, workers)))
    assert len(caught) == max(1, workers), "one for each copy that was read again"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(reader)
    assert other.state_dict()["samples"] == 8 * (4 + max(1, workers))


def test_a_stream_that_is_shorter_when_it_is_read_again_is_told_of() -> None:
    loader = DataLoader(Restless(100), batch_size=8, seed=1)
    reader = iter(loader)
    for _ in range(9):
        next(reader)
    other = DataLoader(Restless(50), batch_size=8, seed=1)
    other.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="read again .* other data"):
        assert list(other) == []


def test_a_state_of_an_older_release_is_read() -> None:
    """Its workers have batches, samples and the dataset's own state."""
    for kind, width in ((Stream, 5), (Keeping, 1)):
        for workers in (0, 2):
            options = {"batch_size": 4, "num_workers": workers, "seed": 3}
            loader, other = DataLoader(kind(), **options), DataLoader(kind(), **options)
            reader = iter(loader)
            for _ in range(3):
                next(reader)
            state = loader.state_dict()
            local = json.loads(state["rank_local"])
            local["starts"] = [start[:3] for start in local["starts"]]
            other.load_state_dict(state | {"rank_local": json.dumps(local)})
            assert columns(other, width) == columns(reader, width)


def test_a_dealt_stream_goes_on_where_it_was() -> None:
    for tail in ("pad", "drop", "exact"):
        for rank in range(3):
            options = {"batch_size": 2, "seed": 5, "distributed": World(rank, 3), "tail": tail}
            loader, other = DataLoader(Keeping(), **options), DataLoader(Keeping(), **options)
            reader = iter(loader)
            next(reader)
            other.load_state_dict(loader.state_dict())
            assert columns(other, 1) == columns(reader, 1)


def test_errors_in_a_stream_are_passed_over_when_it_is_read_again() -> None:
    def collate(rows: list[Any]) -> list[int]:
        if rows[0][0] == 4:
            raise ValueError("no such batch")
        return [row[0] for row in rows]

    loader = DataLoader(Stream(), batch_size=4, seed=0, collate_fn=collate)
    reader = iter(loader)
    next(reader)
    with pytest.raises(ValueError, match="no such batch"):
        next(reader)
    state = loader.state_dict()
    other = DataLoader(Stream(), batch_size=4, seed=0, collate_fn=collate)
    other.load_state_dict(state)
    assert list(other) == list(reader)


def of_hugging_face(kind: str) -> Any:
    """A stream of 64 numbers, made by the steps that the name gives."""
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": list(range(64))}).to_iterable_dataset(num_shards=4)
    for step in kind.split():
        stream = {
            "shuffle": lambda one: one.shuffle(seed=0, buffer_size=16),
            "map": lambda one: one.map(lambda row: {"x": row["x"]}),
            "take": lambda one: one.take(50),
            "join": lambda one: datasets.concatenate_datasets([one, stream]),  # noqa: B023 - called at once
            "torch": lambda one: one.with_format("torch"),
        }[step](stream)
    return stream


@pytest.mark.parametrize(
    ("kind", "seed", "workers", "in_order"),
    [
        ("shuffle", None, 0, True),
        ("shuffle", 3, 2, True),
        ("shuffle map take torch", 3, 2, False),
        ("shuffle join", None, 2, True),
        ("map torch", 3, 0, True),
    ],
)
def test_shuffled_streams_of_hugging_face_go_on_where_they_were(
    kind: str, seed: int | None, workers: int, in_order: bool
) -> None:
    """Their own state leaves out what is in the shuffle's buffer."""

    def loader() -> DataLoader[Any]:
        return DataLoader(of_hugging_face(kind), batch_size=4, seed=seed, num_workers=workers, in_order=in_order)

    def numbers(batches: Any) -> list[Any]:
        read = [batch["x"].tolist() for batch in batches]
        return read if in_order else sorted(read)

    for stop in (0, 1, 5, 100):
        first, other = loader(), loader()
        reader = iter(first)
        list(islice(reader, stop))
        state = first.state_dict()
        if stop in (1, 5):
            assert ("shuffle" in kind) == all(not start[2] for start in json.loads(state["rank_local"])["starts"])
        other.load_state_dict(state)
        assert numbers(other) == numbers(reader if stop < 100 else first)


def test_subclasses_of_hugging_faces_streams_are_known_too() -> None:
    for kind, stateful in (("shuffle map", False), ("map", True)):
        stream = of_hugging_face(kind)
        stream.__class__ = type("Own", (type(stream),), {"__module__": "own"})
        assert has_state(stream) == stateful


def test_a_state_of_an_older_release_with_a_shuffled_streams_own_state_is_read_again() -> None:
    first, other = (DataLoader(of_hugging_face("shuffle"), batch_size=4) for _ in range(2))
    reader = iter(first)
    for _ in range(3):
        next(reader)
    state = first.state_dict()
    local = json.loads(state["rank_local"])
    local["starts"] = [
        (*start[:2], packed(first.dataset.state_dict(), first.dataset), "", None) for start in local["starts"]
    ]
    other.load_state_dict(state | {"rank_local": json.dumps(local)})
    assert [batch["x"].tolist() for batch in other] == [batch["x"].tolist() for batch in reader]
