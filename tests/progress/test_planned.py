"""Stopping anywhere and going on anywhere, under a plan."""

import copy
import io
import json
import pickle
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from headrace import DataLoader, Plan, Sequential, Weighted, World
from headrace.testing import FakeDataset, ManualExecutor
from interrupts import default_interrupts

LENGTH = 23


def rows(batch: Any) -> list[tuple[Any, ...]]:
    """A batch's samples as comparable values."""
    columns = batch.values() if isinstance(batch, dict) else batch
    return [tuple(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def read(batches: Any) -> list[tuple[Any, ...]]:
    return [row for batch in batches for row in rows(batch)]


def some(reader: Iterator[Any], batches: int) -> list[tuple[Any, ...]]:
    return read(next(reader) for _ in range(batches))


def planned(**options: Any) -> DataLoader[Any]:
    return DataLoader(FakeDataset(LENGTH), **({"batch_size": 4, "shuffle": True, "seed": 3} | options))


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    """The state as it comes back from a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


# Under a plan.


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", range(8))
def test_a_plan_goes_on_at_exactly_the_next_sample(stop: int, workers: int) -> None:
    whole = read(planned())
    loader = planned(num_workers=workers)
    reader = iter(loader)
    got = some(reader, min(stop, 6)) + (read(reader) if stop > 6 else [])
    state = loader.state_dict()
    assert state["epoch"] * LENGTH + state["samples"] == len(got)
    other = planned(seed=None, num_workers=2 - workers)
    other.load_state_dict(saved_and_loaded(state))
    if state["epoch"] == 0:
        assert got + read(other) == whole
        assert other.epoch == 1
    undisturbed = planned()
    undisturbed.set_epoch(1)
    assert read(other) == read(undisturbed)


def test_a_state_is_small_and_plain_and_always_has_the_same_keys() -> None:
    loader = planned(order=Weighted(np.arange(1, LENGTH + 1)), shuffle=None)
    states = [loader.state_dict()]
    states += [loader.state_dict() for _ in loader]
    assert len({tuple(state) for state in states}) == 1
    assert all(type(value) in (int, str) for state in states for value in state.values())
    assert max(len(json.dumps(state)) for state in states) < 1000
    assert len(pickle.dumps(states[-1])) < 1000


def test_what_was_computed_ahead_is_not_counted() -> None:
    executor = ManualExecutor()
    loader = planned(executor=executor, num_workers=2)
    reader = iter(loader)
    for number in range(4):
        executor.pools[0].complete(number)
    assert loader.state_dict()["samples"] == 0
    next(reader)
    assert loader.state_dict()["samples"] == 4


def test_the_state_is_that_of_the_iterator_made_last() -> None:
    loader = planned()
    one, other = iter(loader), iter(loader)
    some(one, 3)
    assert loader.state_dict()["samples"] == 0
    some(other, 1)
    assert loader.state_dict()["samples"] == 4


def test_the_state_of_an_epoch_that_was_broken_off() -> None:
    loader = planned()
    for number, _ in enumerate(loader):
        if number == 2:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (0, 12)
    loader.load_state_dict(state)
    assert read(loader) == read(planned())[12:]


def test_a_batch_that_raised_counts() -> None:
    class Broken(FakeDataset):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 5:
                raise ValueError("sample 5")
            return super().__getitem__(index)

    loader = DataLoader(Broken(12), batch_size=4, seed=0)
    reader = iter(loader)
    next(reader)
    with pytest.raises(ValueError, match="sample 5"):
        next(reader)
    assert loader.state_dict()["samples"] == 8


def test_len_is_the_whole_epochs_after_a_resume() -> None:
    loader = planned()
    loader.load_state_dict(loader.state_dict() | {"samples": 8})
    assert len(loader) == 6
    assert len(list(loader)) == 4


def test_set_epoch_of_the_same_epoch_keeps_the_place_and_of_another_leaves_it() -> None:
    state = planned().state_dict() | {"epoch": 2, "samples": 8}
    loader = planned()
    loader.load_state_dict(state)
    loader.set_epoch(2)
    assert len(list(loader)) == 4
    loader.load_state_dict(state)
    loader.set_epoch(3)
    assert len(list(loader)) == 6
    assert loader.epoch == 4


def test_a_sampler_level_epoch_that_counts_from_0_again_is_an_offset() -> None:
    loader = planned()
    loader.load_state_dict(loader.state_dict() | {"epoch": 5, "samples": 8})
    loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    assert loader.state_dict()["samples"] == 8
    list(loader)
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert loader.epoch == 6


def test_an_epoch_set_after_iter_restarts_the_prefetch() -> None:
    loader = planned(num_workers=1)
    loader.load_state_dict(loader.state_dict() | {"epoch": 1, "samples": 8})
    reader = iter(loader)
    loader.set_epoch(0)
    assert read(reader) == read(planned())


def test_a_loader_level_epoch_is_taken_literally_after_a_sampler_level_one() -> None:
    loader = planned()
    loader.load_state_dict(loader.state_dict() | {"epoch": 3})
    loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    loader.set_epoch(5)
    assert loader.epoch == 5


def test_a_reader_whose_epoch_was_set_late_is_the_one_that_counts() -> None:
    loader = planned()
    reader = iter(loader)
    loader.set_epoch(2)
    next(reader)
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (2, 4)


def test_a_state_of_another_seed_loaded_before_the_first_batch_is_for_the_next_reader() -> None:
    loader = planned(seed=None, distributed=World())
    whole = read(loader)
    loader.set_epoch(0)
    reader = iter(loader)
    loader.load_state_dict(planned(seed=77).state_dict() | {"samples": 8})
    assert read(reader) == whole
    assert read(loader) == read(planned(seed=77))[8:]


def test_what_was_delivered_beyond_a_gap_stays_delivered_in_a_loader_that_keeps_order() -> None:
    beyond = json.dumps({"rank": 0, "world_size": 1, "batch_size": 4, "beyond": [2, 3]})
    first = planned()
    first.load_state_dict(first.state_dict() | {"rank_local": beyond})
    reader = iter(first)
    got = some(reader, 1)
    second = planned()
    second.load_state_dict(first.state_dict())
    whole = read(planned())
    assert got + read(second) == whole[:8] + whole[16:]
    first.load_state_dict(first.state_dict())
    reader = iter(first)
    first.set_epoch(1)
    assert len(list(reader)) == 6, "another epoch has no gaps"


def test_an_interrupt_while_the_next_task_is_made_does_not_end_the_epoch() -> None:
    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_name == "<genexpr>" and frame.f_code.co_filename.endswith("planned.py"):
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace

    with default_interrupts():
        loader = planned()
        reader = iter(loader)
        got = some(reader, 2)
        before = sys.gettrace()
        try:
            sys.settrace(trace)
            with pytest.raises(KeyboardInterrupt):
                next(reader)
        finally:
            sys.settrace(before)
        assert loader.state_dict()["samples"] == 8
        assert got + read(reader) == read(planned())


def test_a_state_loaded_after_iteration_began_leaves_the_reader_alone() -> None:
    loader = planned()
    reader = iter(loader)
    got = some(reader, 1)
    loader.load_state_dict(loader.state_dict() | {"epoch": 7, "samples": 12})
    assert got + read(reader) == read(planned())
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (7, 12)
    assert len(list(loader)) == 3
    assert loader.epoch == 8


def test_the_state_loaded_last_counts() -> None:
    loader = planned()
    state = loader.state_dict()
    loader.load_state_dict(state | {"samples": 8})
    loader.load_state_dict(state | {"samples": 16})
    assert len(list(loader)) == 2


def test_a_state_survives_loading_and_saving_unread() -> None:
    loader = planned()
    state = loader.state_dict() | {"epoch": 4, "samples": 8}
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    iter(loader)
    assert loader.state_dict() == state


def test_all_read_means_the_next_epoch() -> None:
    loader = planned()
    loader.load_state_dict(loader.state_dict() | {"epoch": 4, "samples": LENGTH})
    assert (loader.epoch, len(list(loader))) == (5, 6)


def test_a_state_brings_the_plan_and_its_seed() -> None:
    torch.manual_seed(0)
    drawn = DataLoader(FakeDataset(LENGTH), batch_size=4, shuffle=True, tail="exact")
    reader = iter(drawn)
    got = some(reader, 2)
    plain = DataLoader(FakeDataset(LENGTH), batch_size=4, shuffle=True)
    plain.load_state_dict(drawn.state_dict())
    rest = read(plain)
    assert rest == read(reader)
    assert {row[0] for row in got + rest} == set(range(LENGTH))
    assert read(plain) == read(drawn)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loaded_state_reaches_workers_that_persist(persistent: bool) -> None:
    loader = planned(num_workers=2, persistent_workers=persistent)
    first = read(loader)
    loader.load_state_dict(planned().state_dict() | {"samples": 8})
    assert read(loader) == first[8:]


def test_a_copied_loader_goes_on_where_it_was_copied() -> None:
    loader = planned()
    reader = iter(loader)
    next(reader)
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.state_dict() == loader.state_dict()


# Ranks that read the tail differently.


def test_exact_shares_have_one_state_on_all_ranks_at_each_step() -> None:
    loaders = [planned(tail="exact", batch_size=2, distributed=World(rank, 4)) for rank in range(4)]
    readers = [iter(loader) for loader in loaders]
    for step in range(len(loaders[3])):
        for reader in readers:
            next(reader)
        states = [loader.state_dict() for loader in loaders]
        assert len({(state["epoch"], state["samples"]) for state in states}) == 1, step
    for reader in readers:
        list(reader)
    assert {loader.state_dict()["epoch"] for loader in loaders} == {1}


def test_a_tail_that_is_left_whole_under_a_bigger_batch_is_an_empty_epoch() -> None:
    loader = planned(tail="drop", batch_size=8)
    loader.load_state_dict(planned().state_dict() | {"samples": 20})
    assert list(loader) == []
    assert loader.state_dict()["epoch"] == 1


def run(
    dataset: Dataset[Any], state: dict[str, Any] | None, size: int, batch_size: int, steps: int, **options: Any
) -> tuple[list[int], dict[str, Any]]:
    """Read some steps on every rank of a world; return the positions that were read, pads left out, and the state."""
    got: list[int] = []
    states = []
    for rank in range(size):
        loader = DataLoader(dataset, batch_size=batch_size, distributed=World(rank, size), **options)
        if state is not None:
            loader.load_state_dict(state)
        cursor = 0 if state is None else state["samples"]
        length = len(dataset)  # type: ignore[arg-type]
        plan = Plan(Sequential(), length, batch_size, World(rank, size), loader.tail or "pad")
        whole = (plan.end(0, cursor) - cursor) // plan.global_batch
        reader = iter(loader)
        for step in range(min(steps, whole) if steps else plan.steps(0, cursor)):
            batch = next(reader)["index"].tolist()
            positions = plan.positions(0, step, cursor).tolist()
            got += [index for position, index in zip(positions, batch, strict=True) if position < length]
        states.append(loader.state_dict())
    assert len({str(one) for one in states}) == 1 or not steps
    return got, states[0]


def test_another_world_batch_size_and_number_of_workers_mid_epoch() -> None:
    dataset, state, got = FakeDataset(2_000), None, []
    for size, batch_size, steps, workers in ((4, 32, 3, 2), (2, 48, 4, 0), (8, 48, 1, 0), (8, 48, 0, 1)):
        read, state = run(dataset, state, size, batch_size, steps, shuffle=True, seed=5, num_workers=workers)
        got += read
    assert sorted(got) == list(range(2_000))
    assert state is not None
    assert (state["epoch"], state["samples"]) == (1, 0)


runs = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 4, 8]),
        st.integers(1, 48),
        st.integers(1, 12),
        st.sampled_from(["pad", "drop", "exact"]),
    ),
    max_size=4,
)


@pytest.mark.filterwarnings('ignore:tail="drop" leaves no batch')
@settings(max_examples=100, deadline=None)
@given(length=st.integers(1, 700), seed=st.integers(0, 2**64 - 1), runs=runs, shuffle=st.booleans())
def test_no_sample_is_lost_or_doubled_whatever_changes_on_the_way(
    length: int, seed: int, runs: list[tuple[int, int, int, str]], shuffle: bool
) -> None:
    """Each run reads some whole steps in a world of its own, with its own batch size and tail; the last reads on."""
    dataset, state, got = FakeDataset(length), None, []
    for size, batch_size, steps, tail in [*runs, (3, 7, 0, "exact")]:
        read, state = run(dataset, state, size, batch_size, steps, tail=tail, shuffle=shuffle, seed=seed)
        got += read
        if state["epoch"]:
            break
    assert state is not None
    assert len(set(got)) == len(got)
    if tail != "drop":  # which may leave a rest that was not to be read
        assert sorted(got) == list(range(length))


def test_two_readers_read_the_same_epoch_even_if_one_begins_late() -> None:
    loader = planned()
    late, early = iter(loader), iter(loader)
    assert read(early) == read(late) == read(planned())
    assert loader.epoch == 1
