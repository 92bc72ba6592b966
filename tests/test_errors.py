"""Errors about arguments give the name, the value, the allowed range and the fix."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import (
    DeliveryTimeout,
    HeadraceError,
    MissingExtra,
    WorkerDied,
    bad_value,
    note,
    whole_number,
)


@pytest.mark.parametrize(
    ("own", "builtin"), [(WorkerDied, RuntimeError), (DeliveryTimeout, RuntimeError), (MissingExtra, ImportError)]
)
def test_one_tree_that_old_handlers_catch_too(own: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(own, HeadraceError)
    assert issubclass(own, builtin)
    copy = pickle.loads(pickle.dumps(own("what happened")))
    assert type(copy) is own
    assert str(copy) == "what happened"


def test_bad_value_text() -> None:
    with pytest.raises(ValueError, match=r"^colour='red' is not allowed: expected blue or green\. Mix it\.$"):
        bad_value("colour", "red", "blue or green", "Mix it.")


@pytest.mark.parametrize(
    "value",
    [3, np.int8(3), np.uint8(3), np.int64(3), np.uint64(3), np.array(3), torch.tensor(3)],
    ids=lambda value: type(value).__name__,
)
def test_integers_of_every_kind_become_int(value: Any) -> None:
    number = whole_number("n", value, low=3, high=3)
    assert type(number) is int
    assert number == 3


def test_bounds_are_inclusive() -> None:
    assert [whole_number("n", value, low=-1, high=2**64 - 1) for value in (-1, 0, 2**64 - 1)] == [-1, 0, 2**64 - 1]
    assert whole_number("n", 10**30, low=1) == 10**30
    assert whole_number("n", 0) == 0


@pytest.mark.parametrize(
    ("value", "bounds", "allowed"),
    [
        (-1, {}, "an integer >= 0"),
        (0, {"low": 1}, "an integer >= 1"),
        (5, {"low": 1, "high": 4}, "an integer in [1, 4]"),
        (0, {"low": 1, "high": 4}, "an integer in [1, 4]"),
        (2**64, {"high": 2**64 - 1}, f"an integer in [0, {2**64 - 1}]"),
    ],
)
def test_out_of_range_text(value: int, bounds: dict[str, int], allowed: str) -> None:
    with pytest.raises(ValueError, match="knob") as caught:
        whole_number("knob", value, fix="Turn it back.", **bounds)
    assert str(caught.value) == f"knob={value} is not allowed: expected {allowed}. Turn it back."


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, "bool"),
        (False, "bool"),
        (np.True_, "bool"),
        (2.0, "float"),
        (np.float64(2), "float64"),
        ("2", "str"),
        (None, "NoneType"),
        ([2], "list"),
    ],
)
def test_wrong_type_text(value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match="knob") as caught:
        whole_number("knob", value, low=1, fix="Turn it back.")
    assert str(caught.value).startswith(f"knob={value!r} is not allowed: expected an integer >= 1, got {kind}")
    assert str(caught.value).endswith(" Turn it back.")


@pytest.mark.parametrize(
    "value",
    [np.array(1.5), np.array(True), np.array([1, 2]), torch.tensor(1.5), torch.tensor(True), torch.tensor([1, 2])],
    ids=repr,
)
def test_arrays_and_tensors_that_are_no_integer_get_the_same_text(value: Any) -> None:
    """They have `__index__`, which refuses them only when called, or takes a boolean for a number."""
    with pytest.raises(TypeError, match=r"(?s)^knob=.* is not allowed: expected an integer >= 0.* Turn it back\.$"):
        whole_number("knob", value, fix="Turn it back.")


def test_an_object_that_is_raised_again_gets_a_note_once() -> None:
    error = ValueError("the one and only")
    for text in ("first", "first", "second"):
        note(error, text)
    assert error.__notes__ == ["headrace: first", "headrace: second"]
