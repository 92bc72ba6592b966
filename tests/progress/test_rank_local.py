"""Stopping and going on without a plan: torch's own samplers and the user's; and batches in any order."""

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from headrace import Balanced, DataLoader, StateMismatch, Subset, World
from headrace.testing import FakeDataset, ManualExecutor
from progress.drawing_streams import Keeping, Stream

LENGTH = 23

pytestmark = [
    pytest.mark.filterwarnings("ignore:the state of a loader without a plan"),
    pytest.mark.filterwarnings("error:the iterable dataset was read again"),
]


class Numbers(TensorDataset):
    def __init__(self) -> None:
        super().__init__(torch.arange(LENGTH))


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch[0].tolist()]


# Torch's own order, and samplers of the user's.


class Counting(Sampler[int]):
    """Has a state of its own, and says whether it was asked for what it need not be."""

    def __init__(self) -> None:
        self.next = 0
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < LENGTH:
            self.next += 1
            self.drawn += 1
            yield (self.next - 1) * 7 % LENGTH
        self.next = 0

    def __len__(self) -> int:
        return LENGTH

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "history": torch.arange(self.next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert len(state["history"]) == state["next"]
        self.next = state["next"]


def sampled(kind: str, own: bool, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4) if own else None
    data = Numbers()
    match kind:
        case "torch's":
            return DataLoader(data, batch_size=4, shuffle=True, generator=generator, **options)
        case "sequential":
            return DataLoader(data, batch_size=4, generator=generator, **options)
        case "random":
            return DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=generator), **options)
        case "weighted":
            weights = torch.arange(1.0, LENGTH + 1).tolist()
            sampler = WeightedRandomSampler(weights, 30, generator=generator)
            return DataLoader(data, batch_size=4, sampler=sampler, generator=generator, **options)
        case "batches":
            batches = BatchSampler(RandomSampler(data, generator=generator), 4, drop_last=True)
            return DataLoader(data, batch_sampler=batches, **options)
        case "distributed":
            sampler = DistributedSampler(data, num_replicas=2, rank=1, seed=9)
            return DataLoader(data, batch_size=4, sampler=sampler, **options)
        case "stateful":
            return DataLoader(data, batch_size=4, sampler=Counting(), **options)
    raise AssertionError(kind)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own", [False, True], ids=["global generator", "own generator"])
@pytest.mark.parametrize("kind", ["torch's", "sequential", "random", "weighted", "batches", "distributed", "stateful"])
def test_a_sampler_goes_on_in_the_same_order_and_so_does_the_next_epoch(kind: str, own: bool, workers: int) -> None:
    torch.manual_seed(9)
    loader = sampled(kind, own, num_workers=workers)
    reader = iter(loader)
    got = numbers(next(reader) for _ in range(2))
    state, callers = loader.state_dict(), torch.get_rng_state()
    rest, following = numbers(reader), numbers(loader)
    torch.manual_seed(1)
    other = sampled(kind, own, num_workers=workers)
    other.load_state_dict(state)
    torch.set_rng_state(callers)  # as a training script restores it
    assert numbers(other) == rest
    assert numbers(other) == following
    assert other.epoch == loader.epoch == 2
    assert state["samples"] == len(got)


def test_a_sampler_is_run_to_the_place_without_loading_a_sample() -> None:
    class Loud(Numbers):
        def __getitem__(self, index: int) -> Any:
            loaded.append(index)
            return super().__getitem__(index)

    loaded: list[int] = []
    loader = DataLoader(Loud(), batch_size=4, sampler=RandomSampler(range(LENGTH)))
    next(iter(loader))
    first, state = list(loaded), loader.state_dict()
    other = DataLoader(Loud(), batch_size=4, sampler=RandomSampler(range(LENGTH)))
    other.load_state_dict(state)
    loaded.clear()
    list(other)
    assert sorted(first + loaded) == list(range(LENGTH))


def test_a_stateful_sampler_is_asked_for_the_delivered_place_and_not_run_again() -> None:
    loader = sampled("stateful", False, num_workers=2)
    reader = iter(loader)
    next(reader)
    other = sampled("stateful", False, num_workers=1)
    other.load_state_dict(loader.state_dict())
    assert numbers(other) == [number * 7 % LENGTH for number in range(4, LENGTH)]
    assert other.sampler.drawn == LENGTH - 4  # type: ignore[attr-defined]


def test_the_samplers_own_epoch_is_remembered() -> None:
    loader = sampled("distributed", False)
    loader.sampler.set_epoch(5)  # type: ignore[attr-defined]
    reader = iter(loader)
    next(reader)
    other = sampled("distributed", False)
    other.load_state_dict(loader.state_dict())
    assert numbers(other) == numbers(reader)


@pytest.mark.parametrize("kind", ["torch's", "random"])
def test_batches_in_any_order_are_delivered_once(kind: str) -> None:
    executor = ManualExecutor()
    torch.manual_seed(3)
    loader = DataLoader(
        Numbers(),
        batch_size=4,
        shuffle=kind == "torch's" or None,
        sampler=RandomSampler(range(LENGTH)) if kind == "random" else None,
        in_order=False,
        num_workers=2,
        seed=1 if kind == "torch's" else None,
        executor=executor,
    )
    reader = iter(loader)
    for number in (1, 3):
        executor.pools[0].complete(number)
    got = numbers(next(reader) for _ in range(2))
    state = loader.state_dict()
    other = DataLoader(
        Numbers(),
        batch_size=4,
        shuffle=kind == "torch's" or None,
        sampler=RandomSampler(range(LENGTH)) if kind == "random" else None,
        seed=1 if kind == "torch's" else None,
    )
    other.load_state_dict(state)
    second = iter(other)
    got += numbers(next(second) for _ in range(2))
    third = DataLoader(
        Numbers(),
        batch_size=4,
        shuffle=kind == "torch's" or None,
        sampler=RandomSampler(range(LENGTH)) if kind == "random" else None,
        seed=1 if kind == "torch's" else None,
    )
    third.load_state_dict(other.state_dict())
    assert sorted(got + numbers(third)) == list(range(LENGTH))


def test_after_the_last_batch_it_is_the_next_epoch_without_a_plan_too() -> None:
    for kind in ("torch's", "weighted", "batches"):
        loader = sampled(kind, False)
        reader = iter(loader)
        for _ in range(len(loader)):
            next(reader)
        state = loader.state_dict()
        assert (state["epoch"], state["samples"], state["rank_local"]) == (1, 0, "")


def test_augmentation_is_not_promised_there_and_a_warning_says_what_would() -> None:
    loader = sampled("torch's", False)
    next(iter(loader))
    with pytest.warns(UserWarning, match="not the random numbers.*seed="):
        sampled("torch's", False).load_state_dict(loader.state_dict())


def test_a_state_that_could_not_be_read_back_is_refused_when_it_is_taken() -> None:
    class Odd(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"next": self.next, "history": {1, LENGTH}, "self": self}

    loader = DataLoader(Numbers(), batch_size=4, sampler=Odd())
    reader = iter(loader)
    next(reader)
    with pytest.raises(TypeError, match=r"Odd\.state_dict\(\) returned what torch\.load\(weights_only=True\)"):
        loader.state_dict()


# What is refused.

GIVEN = {"batch_size": 4, "seed": 3}


def plan_state() -> dict[str, Any]:
    loader = DataLoader(FakeDataset(LENGTH), shuffle=True, **GIVEN)
    next(iter(loader))
    return loader.state_dict()


@pytest.mark.parametrize(
    ("loader", "both"),
    [
        (lambda: DataLoader(FakeDataset(24), shuffle=True, **GIVEN), ("23", "24")),
        (lambda: DataLoader(FakeDataset(LENGTH), shuffle=True, batch_size=4, seed=4), ("seed=3", "has 4")),
        (lambda: DataLoader(FakeDataset(LENGTH), **GIVEN), (r"Shuffled\(\)", r"Sequential\(\)")),
        (lambda: DataLoader(FakeDataset(LENGTH), order=Subset([1, 2]), **GIVEN), (r"Shuffled\(\)", "Subset")),
        (lambda: DataLoader(FakeDataset(LENGTH), order=Balanced([0, 1] * 11 + [0]), **GIVEN), ("Shuffled", "Balanced")),
        (lambda: DataLoader(FakeDataset(LENGTH), sampler=range(LENGTH)), ("'plan'", "'sampler'")),
        (lambda: DataLoader(Stream(), batch_size=4), ("'plan'", "'stream'")),
    ],
)
def test_a_plans_state_in_another_loader_is_refused_with_both_values(loader: Any, both: tuple[str, str]) -> None:
    made = loader()
    before = made.state_dict()
    with pytest.raises(StateMismatch, match=".*".join(both)):
        made.load_state_dict(plan_state())
    assert made.state_dict() == before, "a refused state leaves the loader as it was"


def test_orders_are_told_apart_by_what_they_hold() -> None:
    def loader(indices: list[int]) -> DataLoader[Any]:
        return DataLoader(FakeDataset(LENGTH), order=Subset(indices), **GIVEN)

    state = loader([1, 2, 3]).state_dict()
    loader([1, 2, 3]).load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"order='Subset.*has 'Subset"):
        loader([1, 2, 4]).load_state_dict(state)


def test_more_samples_than_the_epoch_has_are_refused() -> None:
    with pytest.raises(StateMismatch, match=r'state\["samples"\] is 24, and the epoch has 23'):
        DataLoader(FakeDataset(LENGTH), shuffle=True, **GIVEN).load_state_dict(plan_state() | {"samples": 24})


def test_a_state_without_a_plan_does_not_go_into_one() -> None:
    loader = sampled("torch's", False)
    next(iter(loader))
    with pytest.raises(StateMismatch, match=r"mode='parity'.*'plan'.*pass seed= where you save"):
        DataLoader(Numbers(), batch_size=4, shuffle=True, seed=0).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 5, "num_workers": 2}, "batch_size=4.*has 5"),
        ({"batch_size": 4, "num_workers": 1}, "num_workers=2.*has 1"),
        ({"batch_size": 4, "num_workers": 2, "distributed": World(1, 2)}, "rank=0.*has 1"),
    ],
)
def test_a_streams_state_belongs_to_its_rank_and_workers(options: dict[str, Any], text: str) -> None:
    dealt = World(0, 2) if "distributed" in options else None
    loader = DataLoader(Keeping(), batch_size=4, num_workers=2, distributed=dealt)
    reader = iter(loader)
    next(reader)
    other = DataLoader(Keeping(), **options)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatch, match=text):
        iter(other)


def test_a_state_of_batches_in_any_order_belongs_to_its_rank() -> None:
    options = {"seed": 3, "num_workers": 1, "batch_size": 2}
    loader = DataLoader(FakeDataset(LENGTH), in_order=False, distributed=World(0, 2), **options)
    reader = iter(loader)
    next(reader)
    for changed, text in (
        ({"distributed": World(1, 2)}, "rank=0.*has 1"),
        ({"distributed": World(0, 3)}, "world_size"),
    ):
        other = DataLoader(FakeDataset(LENGTH), **options, **changed)
        other.load_state_dict(loader.state_dict())
        with pytest.raises(StateMismatch, match=text):
            iter(other)


def test_datapipes_have_no_place_to_go_on_from() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has deprecated them
        loader = DataLoader(IterableWrapper(range(5)))
    state = loader.state_dict()
    with pytest.raises(StateMismatch, match="keeps no place"):
        loader.load_state_dict(state)


RANK_LOCAL = {
    "stream": lambda: DataLoader(Keeping(), batch_size=4),
    "sampler": lambda: sampled("stateful", False),
    "parity": lambda: sampled("torch's", False),
}


@pytest.mark.parametrize("kind", RANK_LOCAL)
def test_a_damaged_rank_local_part_is_refused(kind: str) -> None:
    make = RANK_LOCAL[kind]
    loader = make()
    reader = iter(loader)
    next(reader)
    state = loader.state_dict()
    whole = json.loads(state["rank_local"])
    damaged: list[str] = ["", "{", "[]", "3", '"text"']
    for name, value in whole.items():
        for wrong in (None, "x", -1, [[]], {"a": 1}):
            if wrong != value:
                damaged.append(json.dumps(whole | {name: wrong}))
        if name not in ("sampler", "beyond"):  # which not every state has
            damaged.append(json.dumps({key: other for key, other in whole.items() if key != name}))
    for text in damaged:
        other = make()
        other.load_state_dict(state | {"rank_local": text})
        with pytest.raises(StateMismatch):
            iter(other)


def test_another_batch_sampler_or_one_without_the_state_is_refused() -> None:
    def loader(sampler: Any, batch_size: int) -> DataLoader[Any]:
        return DataLoader(Numbers(), batch_sampler=BatchSampler(sampler, batch_size, drop_last=False))

    first = loader(Counting(), 4)
    next(iter(first))
    for other, text in (
        (loader(Counting(), 2), "batch_size=4.*has 2"),
        (loader(range(LENGTH), 4), "a state of its own"),
    ):
        other.load_state_dict(first.state_dict())
        with pytest.raises(StateMismatch, match=text):
            iter(other)


def test_a_dealt_streams_state_is_not_that_of_one_that_is_not_dealt() -> None:
    first = DataLoader(Stream(), batch_size=4, seed=0, distributed=World())
    next(iter(first))
    other = DataLoader(Stream(), batch_size=4, seed=0)
    other.load_state_dict(first.state_dict())
    with pytest.raises(StateMismatch, match=r"split=True.*has False"):
        iter(other)


@pytest.mark.parametrize("batches", [2**70, 2**47, LENGTH])
def test_a_count_beyond_the_epoch_is_refused(batches: int) -> None:
    loader = sampled("torch's", False)
    next(reader := iter(loader))
    state = loader.state_dict()
    del reader
    state["rank_local"] = json.dumps(json.loads(state["rank_local"]) | {"batches": batches})
    loader.load_state_dict(state)
    with pytest.raises(StateMismatch, match="batches"):
        iter(loader)
