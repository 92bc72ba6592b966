"""What a plan refuses, and what it takes for an integer."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from headrace.plan import Balanced, Order, Plan, Sequential, Shuffled, Subset, Weighted
from headrace.types import TAILS, World
from plan.plan_cases import Case


def test_a_step_out_of_range() -> None:
    plans = Case(Sequential(), 11, 0, 0).plans(4, 2, tail="exact")
    for rank, step, cursor, text in [
        (1, 2, 0, "step 2 is out of range: rank 1 of 4 has 2 steps from position 0 of 11"),
        (3, 1, 0, "step 1 is out of range: rank 3 of 4 has 1 steps from position 0 of 11"),
        (0, -1, 0, "step -1 is out of range: rank 0 of 4 has 2 steps from position 0 of 11"),
        (0, -1, 8, "step -1 is out of range: rank 0 of 4 has 1 steps from position 8 of 11"),
        (0, 0, 11, "step 0 is out of range: rank 0 of 4 has 0 steps from position 11 of 11"),
        (0, 10**15, 3, "step 1000000000000000 is out of range: rank 0 of 4 has 1 steps from position 3 of 11"),
    ]:
        for read in (plans[rank].positions, plans[rank].batch):
            with pytest.raises(IndexError) as caught:
                read(0, step, cursor)
            assert str(caught.value) == text
    for tail in ("pad", "drop"):
        with pytest.raises(IndexError, match="has 0 steps from position 11 of 11"):
            replace(plans[0], tail=tail, in_runs=True).positions(0, 0, 11)


@pytest.mark.parametrize("cursor", [-1, -8, 12, 100])
def test_a_cursor_out_of_range(cursor: int) -> None:
    text = rf"cursor={cursor} is not allowed: expected an integer in \[0, 11\]\. It counts the epoch's samples"
    for tail, in_runs in product(TAILS, (False, True)):
        plan = Plan(Sequential(), 11, 1, World(1, 2), tail, in_runs=in_runs)
        for ask, arguments in [(plan.share, (0,)), (plan.steps, (0,)), (plan.positions, (0, 0)), (plan.batch, (0, 0))]:
            with pytest.raises(ValueError, match=text):
                ask(*arguments, cursor)  # type: ignore[operator]


@pytest.mark.parametrize("order", [Sequential(), Shuffled(), Subset([0]), Weighted([1]), Balanced([1])])
def test_an_empty_dataset(order: Order) -> None:
    text = r"len\(dataset\)=0 is not allowed: expected an integer >= 1\. An empty dataset has no order; check the path"
    for tail in TAILS:
        with pytest.raises(ValueError, match=text):
            Plan(order, 0, tail=tail)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"batch_size": 0},
            ValueError,
            "batch_size=0 is not allowed: expected an integer >= 1. Count samples per rank",
        ),
        ({"batch_size": 1.0}, TypeError, r"batch_size=1\.0 is not allowed.*got float"),
        ({"batch_size": True}, TypeError, "batch_size=True is not allowed.*got bool"),
        ({"seed": -1}, ValueError, "seed=-1 is not allowed: expected an integer in"),
        ({"seed": 2**64}, ValueError, f"seed={2**64} is not allowed"),
        ({"tail": "wrap"}, ValueError, r"tail='wrap' is not allowed: expected one of \('pad', 'drop', 'exact'\)"),
        ({"length": 7.0}, TypeError, r"len\(dataset\)=7\.0 is not allowed"),
    ],
)
def test_plan_errors(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Plan(**({"order": Sequential(), "length": 10} | options))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_numpy_integers_are_integers(dtype: Any) -> None:
    """They are accepted, so they must not overflow or wrap round where plain ones do not."""
    plain = Plan(Sequential(), 100, 50, World(1, 4), seed=3)
    plan = Plan(Sequential(), dtype(100), dtype(50), World(1, 4), seed=dtype(3))
    assert plan.steps(0) == plain.steps(0) == 1
    assert plan.positions(0, 0).tolist() == plain.positions(0, 0).tolist()
    assert (plan.global_batch, plan.end(0), plan.cursor_after(0, 0)) == (200, 100, 100)
