"""Every argument of every public class but the loader: what is wrong is refused by name and value."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import headrace
from headrace import (
    Balanced,
    Blocks,
    Deferred,
    Executor,
    InlineExecutor,
    LengthBucketed,
    Order,
    PackedList,
    Plan,
    ProcessExecutor,
    RayExecutor,
    Sequential,
    Shuffled,
    Subset,
    ThreadExecutor,
    Weighted,
    World,
)
from loader.argument_cases import FLAG, Wrong

PLAN = {"order": Shuffled(), "length": 5}
NO_SIZE = {"batch_size": None}
OTHERS: dict[Callable[..., Any], tuple[dict[str, Any], dict[str, list[Wrong]]]] = {
    Sequential: ({}, {}),
    Shuffled: ({}, {}),
    Subset: (
        {"indices": [1]},
        {
            "indices": [
                Wrong([], ValueError, "indices is empty: expected a non-empty sequence of integers"),
                Wrong([[1], [2]], ValueError, r"indices of shape \(2, 1\) is not allowed: expected a non-empty"),
                Wrong([[1], [2, 3]], ValueError, "indices is not allowed: expected a non-empty sequence"),
                Wrong(5, TypeError),
                Wrong((one for one in [1]), TypeError, "indices=<generator .* is not allowed: .* got generator"),
                Wrong({1, 2}, TypeError, r"indices=\{1, 2\} is not allowed: expected a non-empty sequence"),
                Wrong([1.5], TypeError, "indices of dtype float64 are not allowed"),
                Wrong([True], TypeError, "indices of dtype bool are not allowed"),
                Wrong([3, -1], ValueError, "indices=-1 is not allowed"),
            ],
            "shuffle": [*(Wrong(value, TypeError, f"shuffle={value!r} {FLAG}") for value in ("yes", 1, None))],
        },
    ),
    Weighted: (
        {"weights": [1.0]},
        {
            "weights": [
                Wrong([], ValueError, "weights is empty: expected a non-empty sequence of numbers"),
                Wrong([[1.0]], ValueError, r"weights of shape \(1, 1\) is not allowed"),
                Wrong(1.0, TypeError),
                Wrong(["a"], TypeError, "weights of dtype <U1 are not allowed"),
                Wrong([1.0, -1.0], ValueError, r"weights\[1\]=-1\.0 is not allowed"),
                Wrong([0, 0], ValueError, "weights are all zero: expected at least one weight > 0"),
                Wrong(torch.ones(2, dtype=torch.bfloat16), TypeError, r"weights=tensor.*float\(\) of a tensor"),
                Wrong(torch.ones(2, requires_grad=True), TypeError, r"weights=tensor.*detach\(\)"),
                Wrong(
                    np.ma.array([1.0, 2.0], mask=[0, 1]), ValueError, "(?s)weights=masked_array.*none of them masked"
                ),
            ],
            "num_samples": [Wrong(0, ValueError), Wrong(1.5, TypeError), Wrong("3", TypeError)],
            "replacement": [Wrong("no", TypeError), Wrong(1, TypeError), Wrong(None, TypeError)],
        },
    ),
    Balanced: (
        {"labels": [0, 1]},
        {
            "labels": [
                Wrong([], ValueError, "labels is empty: expected a non-empty sequence, one label a sample"),
                Wrong([[0]], ValueError, r"labels of shape \(1, 1\) is not allowed"),
                Wrong(3, TypeError),
                Wrong([0, float("nan")], ValueError, r"labels\[1\]='nan' is not allowed"),
                Wrong([1, "a", object()], TypeError, "labels cannot be put in order"),
            ],
            "length": [Wrong(0, ValueError), Wrong(1.5, TypeError), Wrong("3", TypeError)],
        },
    ),
    LengthBucketed: (
        {"lengths": [3], "batch_size": 1},
        {
            "lengths": [
                Wrong([], ValueError, "lengths is empty"),
                Wrong(None, TypeError, "lengths=None is not allowed: expected a non-empty sequence of numbers > 0"),
                Wrong(["a"], TypeError, "lengths of dtype <U1 are not allowed: expected numbers > 0"),
                Wrong([[1, 2]], ValueError, r"lengths of shape \(1, 2\) is not allowed"),
                Wrong([3, 0, 0], ValueError, r"lengths\[1\]=0 is not allowed.*2 of 3 lengths are 0.*Leave these"),
                Wrong([3, -1], ValueError, r"lengths\[1\]=-1 is not allowed"),
                Wrong([3.0, float("nan")], ValueError, r"lengths\[1\]=nan is not allowed"),
                Wrong([3, 2**60], ValueError, r"lengths\[1\]=1152921504606846976 is not allowed: expected numbers in"),
            ],
            "batch_size": [
                Wrong(0, ValueError),
                Wrong(None, ValueError, "batch_size=None, max_tokens=None is not allowed: expected exactly one"),
            ],
            "max_tokens": [
                Wrong(9, ValueError, "batch_size=1, max_tokens=9 is not allowed"),
                Wrong(2, ValueError, r"lengths\[0\]=3 is not allowed: expected at most max_tokens=2", NO_SIZE),
                Wrong(0, ValueError, beside=NO_SIZE),
                Wrong(float("inf"), ValueError, beside=NO_SIZE),
                Wrong(10**400, ValueError, "max_tokens=1000", NO_SIZE),
                Wrong("9", TypeError, beside=NO_SIZE),
                Wrong(True, TypeError, beside=NO_SIZE),
            ],
            "per_rank": [
                Wrong(0, ValueError),
                Wrong(1.5, TypeError),
                Wrong(3, ValueError, "per_rank=3 is not allowed: expected a divisor of cells=8"),
            ],
            "cells": [Wrong(0, ValueError), Wrong("8", TypeError), Wrong(2**40, ValueError)],
            "spread": [Wrong(0, ValueError), Wrong(1.5, ValueError), Wrong("0.1", TypeError)],
        },
    ),
    InlineExecutor: ({}, {}),
    ThreadExecutor: ({}, {}),
    ProcessExecutor: ({}, {}),
    RayExecutor: (
        {},
        {
            "address": [Wrong(7, TypeError)],
            "num_cpus": [
                *(Wrong(-1, ValueError), Wrong("1", TypeError), Wrong(True, TypeError), Wrong(np.bool_(1), TypeError)),
                *(Wrong(float("inf"), ValueError), Wrong(1j, TypeError)),
            ],
            "resources": [
                *(Wrong([1], TypeError), Wrong("gpu", TypeError)),
                Wrong({"a": "x"}, TypeError, r"resources\['a'\]='x' is not allowed: expected a finite number"),
                Wrong({"a": -1}, ValueError, r"resources\['a'\]=-1 is not allowed"),
                Wrong({5: 1}, TypeError, "a key of resources=5 is not allowed: expected a string"),
                Wrong({"GPU": 1}, ValueError, "custom resources"),
            ],
            "scheduling_strategy": [],  # anything that Ray takes, or will
            "label_selector": [Wrong("zone", TypeError), Wrong({"a": 1}, TypeError, r"label_selector\['a'\]=1")],
            "runtime_env": [Wrong("env", TypeError), Wrong({1: 2}, TypeError, "a key of runtime_env=1")],
            "hedge": [Wrong("yes", TypeError), Wrong(1, TypeError)],
            "shared_memory": [Wrong(None, TypeError)],
            "start_timeout_s": [Wrong(0, ValueError), Wrong("60", TypeError)],
            "idle_s": [Wrong(-1, ValueError), Wrong(float("nan"), ValueError), Wrong(None, TypeError)],
        },
    ),
    Blocks: (
        {"sizes": [3]},
        {
            "sizes": [
                Wrong([], ValueError, "sizes is empty"),
                Wrong([1.5], TypeError, "sizes of dtype float64 are not allowed"),
                Wrong([-1, 2], ValueError, "sizes=-1 is not allowed"),
                Wrong([0], ValueError, "sizes are all 0"),
                Wrong(5, TypeError),
            ],
            "streams": [Wrong(0, ValueError), Wrong(1.5, TypeError), Wrong(2**70, ValueError)],
            "window": [Wrong(0, ValueError), Wrong("2048", TypeError), Wrong(2**70, ValueError)],
        },
    ),
    World: (
        {},
        {
            "rank": [Wrong(-1, ValueError), Wrong(1, ValueError), Wrong("0", TypeError), Wrong(0.0, TypeError)],
            "size": [Wrong(0, ValueError), Wrong("2", TypeError), Wrong(True, TypeError)],
        },
    ),
    Plan: (
        PLAN,
        {
            "order": [Wrong("shuffled", TypeError), Wrong(None, TypeError)],
            "length": [Wrong(0, ValueError, r"len\(dataset\)=0"), Wrong("5", TypeError, r"len\(dataset\)='5'")],
            "batch_size": [Wrong(0, ValueError), Wrong(None, TypeError)],
            "world": [Wrong((0, 2), TypeError), Wrong(None, TypeError)],
            "tail": [Wrong("wrap", ValueError), Wrong(None, ValueError), Wrong(np.arange(2), ValueError)],
            "seed": [Wrong(-1, ValueError), Wrong(None, TypeError)],
            "in_runs": [Wrong("yes", TypeError)],
            "batching": [Wrong("even", TypeError), Wrong(dict, TypeError)],
        },
    ),
    Deferred: (
        {"factory": list},
        {
            "factory": [Wrong(7, TypeError), Wrong(lambda one: one, TypeError, "factory=<function .* is not allowed")],
            "length": [Wrong(-1, ValueError), Wrong("5", TypeError)],
            "iterable": [Wrong("yes", TypeError), Wrong(None, TypeError)],
            "order": [Wrong("shuffled", TypeError), Wrong([1, 0], TypeError)],
        },
    ),
    PackedList: ({}, {"items": [Wrong(7, TypeError), Wrong(None, TypeError)]}),
}


def test_no_argument_is_missing() -> None:
    for made, (_, rows) in OTHERS.items():
        assert list(rows) == list(inspect.signature(made).parameters), made
        assert all(cases for name, cases in rows.items() if name != "scheduling_strategy"), made
    public = [getattr(headrace, name) for name in headrace.__all__]
    kinds = (Order, Executor, World, Plan, Deferred, PackedList)
    made = {one for one in public if isinstance(one, type) and issubclass(one, kinds)} - {Order, Executor}
    assert made == OTHERS.keys()


@pytest.mark.parametrize(
    ("made", "name", "case"),
    [
        pytest.param(made, name, case, id=f"{made.__name__}-{name}-{index}")
        for made, (_, rows) in OTHERS.items()
        for name, cases in rows.items()
        for index, case in enumerate(cases)
    ],
)
def test_a_wrong_argument(made: Callable[..., Any], name: str, case: Wrong) -> None:
    with pytest.raises(case.error, match=case.text or re.escape(f"{name}={case.value!r} is not allowed")):
        made(**OTHERS[made][0] | {name: case.value} | case.beside)
