"""What happens between `iter()` and the first batch, after the last one, and when the process group is gone."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler, TensorDataset

import headrace
from headrace import DataLoader

LENGTH = 23

pytestmark = [
    pytest.mark.filterwarnings("ignore:the state of a loader without a plan"),
    pytest.mark.filterwarnings("ignore:the state of an iterable dataset"),
]


class Stream(IterableDataset[Any]):
    """Numbers, each with what is drawn for its batch, and with what the epoch was when it was begun."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(LENGTH):
            yield number, headrace.rng().random()


class Keeping(Stream):
    """Keeps its own place, and raises once at a sample."""

    def __init__(self, broken: int = -1) -> None:
        self.next, self.broken = 0, broken

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.next == LENGTH:
            raise StopIteration
        self.next += 1
        if self.next == self.broken:
            raise ValueError("broken")
        return self.next - 1, headrace.rng().random()

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def make(kind: str, **options: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(LENGTH), torch.zeros(LENGTH))
    match kind:
        case "torch's":
            return DataLoader(data, batch_size=4, shuffle=True, **options)
        case "sampler":
            return DataLoader(data, batch_size=4, sampler=torch.randperm(LENGTH).tolist(), **options)
        case "batches":
            return DataLoader(data, batch_sampler=BatchSampler(range(LENGTH), 4, drop_last=True), **options)
        case "keyed":
            return DataLoader(Stream(), batch_size=4, seed=3, **options)
    return DataLoader(Stream(), batch_size=4, **options)


def read(batches: Any) -> list[Any]:
    return [tuple(row) for batch in batches for row in zip(*(part.tolist() for part in batch), strict=True)]


WORKERS = [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]


@pytest.mark.parametrize("options", WORKERS, ids=str)
@pytest.mark.parametrize("kind", ["torch's", "sampler", "stream", "keyed"])
def test_an_epoch_set_before_the_first_batch_is_that_readers(kind: str, options: dict[str, Any]) -> None:
    loader = make(kind, **options)
    for epoch in (5, 9):
        reader = iter(loader)
        loader.set_epoch(epoch)
        got = read(next(reader) for _ in range(2))
        state = loader.state_dict()
        assert (state["epoch"], state["samples"]) == (epoch, len(got))
        other = make(kind, **options)
        other.load_state_dict(state)
        rest = read(reader)
        assert loader.epoch == epoch + 1
        # Another loader has a sampler of its own, and where workers did not persist it draws their seed as well.
        if kind != "sampler" and (kind != "torch's" or "persistent_workers" not in options):
            assert read(other) == rest
    if kind == "keyed":
        undisturbed = make(kind)
        undisturbed.set_epoch(9)
        assert read(undisturbed) == got + rest


@pytest.mark.parametrize("executor", ["process", "thread", "inline"])
def test_an_epoch_set_before_the_first_batch_of_a_resumed_stream_is_read_whole(executor: str) -> None:
    loader = make("keyed")
    next(iter(loader))
    options: dict[str, Any] = {} if executor == "inline" else {"num_workers": 1, "executor": executor}
    first = make("keyed", **options)
    next(iter(first))
    other = make("keyed", **options)
    other.load_state_dict(first.state_dict())
    reader = iter(other)
    other.set_epoch(2)
    loader.set_epoch(2)
    assert read(reader) == read(loader)


def test_a_resumed_reader_of_a_sampler_keeps_to_its_epoch() -> None:
    loader = make("torch's")
    reader = iter(loader)
    next(reader)
    other = make("torch's")
    other.load_state_dict(loader.state_dict())
    late = iter(other)
    other.set_epoch(7)
    assert read(late) == read(reader)
    assert (other.epoch, other.state_dict()["samples"]) == (7, 0)
    assert len(read(other)) == LENGTH


def test_a_reader_does_not_follow_into_another_mode() -> None:
    loader = make("torch's")
    reader = iter(loader)
    loader.load_state_dict(make("torch's", seed=3).state_dict())
    loader.set_epoch(4)
    next(reader)
    assert (loader.state_dict()["mode"], loader.state_dict()["samples"]) == ("plan", 0)


@pytest.mark.parametrize("kind", ["torch's", "sampler", "batches"])
@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_who_stops_at_the_last_batch_has_finished_the_epoch(kind: str, options: dict[str, Any]) -> None:
    loader = make(kind, **options)
    for epoch in (1, 2):
        reader = iter(loader)
        for _ in range(len(loader)):
            assert loader.epoch == epoch - 1
            next(reader)
        assert loader.epoch == loader.state_dict()["epoch"] == epoch
    iter(loader)
    assert loader.state_dict()["epoch"] == 2


def test_a_samplers_length_is_asked_for_in_vain() -> None:
    """Torch asks for none while it iterates."""

    class Secretive(list[int]):
        def __len__(self) -> int:
            raise RuntimeError("nobody knows")

    loader = DataLoader(range(LENGTH), sampler=Secretive(range(3)))  # type: ignore[arg-type]
    assert sum(1 for _ in loader) == 3
    assert loader.epoch == 1


def test_a_datasets_length_is_asked_for_in_vain() -> None:
    class Secretive(Stream):
        def __len__(self) -> int:
            raise RuntimeError("nobody knows")

    assert sum(1 for _ in DataLoader(Secretive(), batch_size=4)) == 6


# The process group.


@pytest.mark.parametrize("kind", ["torch's", "stream"])
@pytest.mark.parametrize("batches", [0, 2, 6])
def test_a_state_outlives_the_process_group(kind: str, batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {} if kind == "torch's" else {"distributed": True}
    with monkeypatch.context() as launched:
        launched.setenv("RANK", "1")
        launched.setenv("WORLD_SIZE", "2")
        loader = make(kind, **options)
        before = make(kind, **options)
        readers = iter(loader), iter(before)
        for reader in readers:
            read(next(reader) for _ in range(min(batches, len(loader) if kind != "stream" else 3)))
        expected = before.state_dict()
    assert loader.state_dict() == expected
    assert (expected["mode"], expected["seed"]) == ("plan" if kind != "stream" else "stream", 0)


# Streams.


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("executor", ["process", "inline"])
def test_the_second_epoch_of_a_stream_without_a_seed_goes_on_with_its_numbers(executor: str, persistent: bool) -> None:
    options: dict[str, Any] = {"executor": executor, "num_workers": 1, "persistent_workers": persistent}
    loader, other = make("stream", **options), make("stream", **options)
    first = read(loader)
    reader = iter(loader)
    got = read(next(reader) for _ in range(2))
    assert got != first[: len(got)]
    other.load_state_dict(loader.state_dict())
    assert read(other) == read(reader)


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_a_place_that_was_loaded_and_not_read_from_is_not_a_later_epochs(executor: str) -> None:
    options: dict[str, Any] = {"executor": executor, "num_workers": 1, "persistent_workers": True, "seed": 3}
    loader = DataLoader(Stream(), batch_size=4, **options)
    next(iter(loader))
    other = DataLoader(Stream(), batch_size=4, **options)
    other.load_state_dict(loader.state_dict())
    iter(other)
    other.set_epoch(3)
    assert [number for number, _ in read(other)] == list(range(LENGTH))


@pytest.mark.parametrize("where", ["dataset", "collate_fn"])
def test_a_batch_that_raised_counts_alike_in_rank_and_worker(where: str) -> None:
    def collate(rows: list[Any]) -> list[Any]:
        if where == "collate_fn" and rows[0][0] == 4:
            raise ValueError("broken")
        return [(number, headrace.rng().random()) for number, _ in rows]

    def loader() -> DataLoader[Any]:
        broken = 6 if where == "dataset" else -1
        return DataLoader(Keeping(broken), batch_size=4, seed=0, collate_fn=collate)

    first, second = loader(), loader()
    reader = iter(first)
    next(reader)
    with pytest.raises(ValueError, match="broken"):
        next(reader)
    next(reader)
    second.load_state_dict(first.state_dict())
    assert list(second) == list(reader)


def test_a_sampler_that_was_put_into_torchs_batch_sampler_goes_on_with_the_numbers_that_it_drew() -> None:
    class Shuffling(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(np.random.permutation(12).tolist())

        def __len__(self) -> int:
            return 12

    def exchanged() -> DataLoader[Any]:
        loader = DataLoader(list(range(12)), batch_size=3)
        loader.batch_sampler.sampler = Shuffling()  # type: ignore[union-attr]
        return loader

    first, second = exchanged(), exchanged()
    reader = iter(first)
    next(reader)
    second.load_state_dict(first.state_dict())
    rest = [batch.tolist() for batch in reader]
    np.random.seed(7)
    assert [batch.tolist() for batch in second] == rest
