"""Endless: the epochs of an order, end to end, cut into epochs of any size."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import Blocks, Order, Plan, Sequential, Shuffled, Subset, Weighted
from headrace.plan.endless import Endless
from headrace.types import World
from plan.plan_cases import PROPERTY


def inner(kind: str, length: int) -> Order:
    orders: dict[str, Order] = {
        "shuffled": Shuffled(),
        "sequential": Sequential(),
        "subset": Subset(range(0, length, 2), shuffle=True),
        "weighted": Weighted([1.0] * length, replacement=False),
        "blocks": Blocks([length], streams=2, window=3),
    }
    return orders[kind]


KINDS = ("shuffled", "sequential", "subset", "weighted", "blocks")


@PROPERTY
@given(st.sampled_from(KINDS), st.integers(2, 30), st.integers(1, 70), st.integers(0, 5), st.integers(0, 40))
def test_the_epochs_of_the_order_follow_each_other(kind: str, length: int, size: int, seed: int, epoch: int) -> None:
    order, endless = inner(kind, length), Endless(inner(kind, length), size)
    per_pass = order.samples(length)
    found = endless.epoch(seed, epoch, length)(np.arange(size)).tolist()
    places = [divmod(epoch * size + position, per_pass) for position in range(size)]
    assert found == [int(order.epoch(seed, number, length)(np.array([place]))[0]) for number, place in places]
    assert endless.samples(length) == size


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_comes_again_before_all_else_came(kind: str) -> None:
    endless = Endless(inner(kind, 20), 7)
    line = [index for epoch in range(20) for index in endless.epoch(3, epoch, 20)(np.arange(7)).tolist()]
    per_pass = inner(kind, 20).samples(20)
    passes = [line[start : start + per_pass] for start in range(0, 140, per_pass)]
    assert all(sorted(one) == sorted(passes[0]) for one in passes if len(one) == per_pass)
    assert len(set(passes[0])) == per_pass
    assert kind == "sequential" or passes[0] != passes[1]


def test_far_epochs_do_not_overflow() -> None:
    order = Endless(Shuffled(), 10**10)
    assert order.epoch(3, 10**9, 7)(np.arange(7)).tolist() != order.epoch(3, 0, 7)(np.arange(7)).tolist()
    assert sorted(Endless(Shuffled(), 7).epoch(3, 2**62, 7)(np.arange(7)).tolist()) == list(range(7))


def test_pads_are_the_first_samples_of_the_epoch() -> None:
    order = Endless(Shuffled(), 7)
    at = order.epoch(3, 2, 20)
    assert at(np.arange(7, 10)).tolist() == at(np.arange(3)).tolist()


@PROPERTY
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.data())
def test_ranks_split_it_and_go_on_anywhere(size: int, ranks: int, batch_size: int, data: st.DataObject) -> None:
    order = Endless(Shuffled(), size)
    plans = [Plan(order, 11, batch_size, World(rank, ranks), "exact", 9) for rank in range(ranks)]
    cursor = data.draw(st.integers(0, size))
    read = [
        position
        for plan in plans
        for step in range(plan.steps(4, cursor))
        for position in plan.positions(4, step, cursor).tolist()
    ]
    assert sorted(read) == list(range(cursor, size))


def test_it_is_a_value() -> None:
    one = Endless(Shuffled(), 7)
    assert one == Endless(Shuffled(), 7)
    assert one != Endless(Shuffled(), 8)
    assert one != Endless(Sequential(), 7)
    assert one.described == "Endless('Shuffled()', 7)"
    assert repr(one) == "Endless(Shuffled(), 7)"
    one.epoch(1, 0, 5)(np.arange(7))
    assert one._passes
    sent = pickle.loads(pickle.dumps(one))
    assert sent == one
    assert not sent._passes, "workers build the tables that they need"
    assert (one.random, Endless(Sequential(), 7).random) == (True, False)


def test_a_dataset_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"len\(weights\)=3 is not allowed"):
        Plan(Endless(Weighted([1.0] * 3), 2), 4)


def test_numbers_are_frozen() -> None:
    """What a resumed run reads depends on them."""
    order = Endless(Shuffled(), 8)
    assert [order.epoch(5, epoch, 6)(np.arange(8)).tolist() for epoch in range(3)] == FROZEN


FROZEN = [[5, 2, 0, 1, 4, 3, 1, 5], [0, 4, 3, 2, 1, 4, 0, 5], [3, 2, 3, 1, 0, 5, 4, 2]]
