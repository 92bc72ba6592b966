"""A plan is a frozen value, and the numbers behind it are frozen, too."""

import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from headrace.plan import Plan, Sequential, Shuffled, Subset, Weighted
from headrace.plan.keys import batch_seeds, sample_seeds
from headrace.types import World


def test_a_plan_is_a_frozen_value() -> None:
    plan = Plan(Shuffled(), 11, 2, World(1, 4), "exact", 7)
    plan.batch(0, 0)
    assert plan == Plan(plan.order, 11, 2, World(1, 4), "exact", 7), "whatever either has evaluated"
    changes = {"length": 12, "batch_size": 3, "world": World(2, 4), "tail": "pad", "seed": 8, "in_runs": True}
    for name, value in changes.items():
        assert replace(plan, **{name: value}) != plan  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        plan.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("make", [Sequential, Shuffled, lambda: Subset([3, 1]), lambda: Weighted([1] * 4)])
def test_equal_orders_make_equal_plans(make: Any) -> None:
    """An order is a value, so a plan that came back from a worker is the plan that was sent."""
    plan = Plan(make(), 4)
    assert Plan(make(), 4) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_travels_without_its_tables() -> None:
    plan = Plan(Shuffled(), 50_000, 4, World(1, 2), "exact", 9, True)
    bare = len(pickle.dumps(plan))
    expected = plan.batch(3, 17).tolist()
    assert len(pickle.dumps(plan)) == bare < 1000
    copy = pickle.loads(pickle.dumps(plan))
    assert copy._epochs == {}
    assert copy.batch(3, 17).tolist() == expected
    assert replace(copy, order=plan.order) == plan


def test_epochs_may_be_asked_for_in_any_order() -> None:
    plan = Plan(Shuffled(), 30, 30, seed=1)
    for epoch in [0, 5, 0, 1, 2, 5, 2**63, 0, 1, 1, 5]:
        assert plan.batch(epoch, 0).tolist() == Plan(Shuffled(), 30, 30, seed=1).batch(epoch, 0).tolist()
        assert len(plan._epochs) <= 2, "tables of past epochs are let go"


def test_seeds_belong_to_positions() -> None:
    """Not to a world, batch size, step or sample; those of samples and batches are unrelated."""
    plan = Plan(Shuffled(), 40, 8, World(1, 2), seed=3)
    positions = plan.positions(1, 1)
    seeds = np.array(sample_seeds(plan.seed, 1, positions.tolist()), np.uint64)
    assert seeds.shape == (8, 3)
    np.testing.assert_array_equal(np.array(sample_seeds(3, 1, positions[2:3].tolist()), np.uint64), seeds[2:3])
    assert len(batch_seeds(plan.seed, 1, int(positions[0]))) == 3
    others = [np.array(sample_seeds(*at, positions.tolist()), np.uint64) for at in ((plan.seed, 2), (4, 1))]
    batches = np.array(
        [batch_seeds(plan.seed, epoch, position) for epoch in (0, 1) for position in range(40)], np.uint64
    )
    words = np.concatenate([seeds, *others, batches])
    assert len(np.unique(words)) == words.size


def test_the_stream_is_frozen() -> None:
    """Other batches or seeds would change what users who resume a run read."""
    plan = Plan(Shuffled(), 1000, 4, World(1, 3), seed=42)
    assert plan.batch(5, 7).tolist() == [373, 2, 999, 617]
    assert sample_seeds(plan.seed, 5, [7]) == [[15473986552982350076, 16577420370304795530, 565873775]]
    assert batch_seeds(plan.seed, 5, 7) == [14003719808244371154, 10824820922316942293, 59394605]
    assert plan.substitutes(5, 7) == [526, 402, 58, 361, 638, 329, 250, 724]
    assert Plan(Subset(range(0, 90, 9), shuffle=True), 90, 10).batch(0, 0).tolist() == [
        45,
        72,
        63,
        81,
        54,
        27,
        0,
        9,
        18,
        36,
    ]
