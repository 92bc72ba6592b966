"""Generators for each sample, and the protection of those that a process shares."""

import random
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data._utils.worker import _generate_state

import headrace
from headrace.randomness import (
    COLLATION,
    Generators,
    KeyedGenerators,
    Keys,
    Lease,
    LeaseEnded,
    _seed_numpy,
    callers_generators_kept,
    seed_from_words,
    seed_worker,
    thread_randomness,
)


@pytest.fixture(autouse=True)
def _outside() -> Any:
    yield
    thread_randomness.keyed = None


def draws() -> tuple[float, float]:
    """The next number of either generator."""
    return headrace.rng().random(), torch.rand((), generator=headrace.torch_rng()).item()


def keyed() -> KeyedGenerators:
    assert thread_randomness.keyed is not None
    return thread_randomness.keyed


def at(seed: int, epoch: int, numbers: list[int], place: int) -> tuple[float, float]:
    thread_randomness.keyed = KeyedGenerators(Keys(seed, epoch, numbers), place)
    return draws()


def test_a_samples_numbers_belong_to_seed_epoch_and_position() -> None:
    one = at(1, 2, [30, 31, 32], 1)
    assert at(1, 2, [31], 0) == one, "whatever batch it is in"
    others = [at(2, 2, [31], 0), at(1, 3, [31], 0), at(1, 2, [30], 0), at(1, 2, [31], COLLATION), at(2, 1, [31], 0)]
    numbers = [number for pair in [one, *others] for number in pair]
    assert len(set(numbers)) == len(numbers)


def test_a_sample_goes_on_drawing_and_the_next_begins_anew() -> None:
    first = at(0, 0, [5, 6], 0)
    second = draws()
    assert second != first
    assert at(0, 0, [5, 6], 0) == first, "the same batch, begun again"
    keyed().place = 1
    assert draws() not in (first, second)


def test_threads_have_their_own() -> None:
    expected = at(0, 0, [5, 6], 0)
    seen: list[Any] = []
    keyed().place = 1
    thread = threading.Thread(target=lambda: seen.append(at(0, 0, [5, 6], 0)))
    thread.start()
    thread.join()
    assert seen == [expected]
    assert keyed().place == 1


def test_outside_of_a_batch_torchs_seed_rules() -> None:
    torch.manual_seed(2)  # where it was 3 already they would go on
    draws()
    torch.manual_seed(3)
    first, second = draws(), draws()
    assert first != second
    torch.manual_seed(4)
    assert draws() not in (first, second)
    torch.manual_seed(3)
    assert draws() == first


def test_asking_draws_nothing_from_the_global_generators() -> None:
    before = Generators()
    draws()
    at(0, 0, [1], 0)
    assert before.moved() == []


@pytest.mark.parametrize(
    ("name", "draw"),
    [("torch", lambda: torch.rand(())), ("random", random.random), ("numpy.random", np.random.rand)],
)
def test_the_watch_names_who_moved_and_puts_it_back(name: str, draw: Any) -> None:
    before = Generators()
    first = float(draw())
    assert before.moved() == [name]
    before.restore()
    assert before.moved() == []
    assert float(draw()) == first


class Raises(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise ValueError(headrace.rng().random())


@pytest.mark.parametrize("options", [{}, {"seed": 0}], ids=["parity", "plan"])
@pytest.mark.parametrize("dataset", [[0.5], Raises()], ids=["batch", "error"])
def test_no_interrupt_leaves_a_batch_in_work_behind(dataset: Any, options: dict[str, Any]) -> None:
    loader = headrace.DataLoader(dataset, executor="inline", **options)
    events: list[tuple[str, str]] = []

    def watch(frame: Any, event: str, argument: Any) -> None:
        name = frame.f_code.co_qualname
        if thread_randomness.keyed is not None or (events and name == "Worker.run" and events[-1][1] != name):
            events.append((event, name))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        list(loader)
    except ValueError:
        pass
    finally:
        sys.setprofile(before)
    *_, last_inside, end = events
    # Python lets interrupts in where something is called, so that nothing may be called between the two.
    assert end == ("return", "Worker.run")
    assert last_inside[0] == "return"
    assert thread_randomness.keyed is None


def test_a_lease_that_has_ended_sets_no_generators_any_more() -> None:
    seen: list[str] = []

    def work(lease: Lease) -> None:
        thread_randomness.lease = lease
        inner = Lease()
        with callers_generators_kept():
            seed_from_words([1, 2, 3])
            seen.append("seeded")
        before = Generators()
        lease.end()
        for one in (lease, inner):
            thread_randomness.lease = one
            for act in (before.restore, lambda: seed_from_words([1, 2, 3])):
                with pytest.raises(LeaseEnded):
                    act()
        seen.append("refused")

    with callers_generators_kept():  # which the other thread need not wait for
        before = Generators()
        thread = threading.Thread(target=work, args=(Lease(),))
        thread.start()
        thread.join(60)
        assert seen == ["seeded", "refused"]
        assert not before.moved()


@given(st.integers(0, 2**63), st.integers(0, 1000))
@example(base_seed=0, worker_id=0)
def test_a_worker_is_seeded_as_by_torch(base_seed: int, worker_id: int) -> None:
    words = _generate_state(base_seed, worker_id)  # type: ignore[no-untyped-call]
    with callers_generators_kept():
        for numbers in (words, [*words[:-1], 0], [0, 0, 0, 0]):
            np.random.seed(numbers)
            np.random.standard_normal()  # of which numpy keeps a second one
            expected = Generators()
            _seed_numpy(numbers)
            np.random.standard_normal()
            assert expected.moved() == []
        assert seed_worker(base_seed, worker_id) == base_seed + worker_id == torch.initial_seed()
