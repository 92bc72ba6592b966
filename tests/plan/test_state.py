"""The format of states: what it keeps, and every kind of damage it refuses."""

from typing import Any

import pytest

from headrace import StateMismatch
from headrace.plan.state import State

GOOD = State(mode="plan", seed=7, length=100, order="Shuffled()", epoch=3, samples=48)


def test_it_comes_back_from_its_dictionary() -> None:
    assert State.read(GOOD.as_dict()) == GOOD
    assert all(type(value) in (int, str) for value in GOOD.as_dict().values())


def test_the_keys_are_frozen() -> None:
    """Checkpoints on disk, and those that drop unknown keys, depend on them."""
    assert sorted(GOOD.as_dict()) == sorted(
        ["version", "mode", "seed", "length", "order", "epoch", "samples", "rank_local"]
    )


def test_the_dictionary_is_a_copy() -> None:
    first = GOOD.as_dict()
    first["epoch"] = 99
    assert GOOD.as_dict()["epoch"] == 3


def test_keys_that_a_user_added_are_ignored() -> None:
    assert State.read(GOOD.as_dict() | {"learning_rate": 0.1}) == GOOD


@pytest.mark.parametrize("given", [None, 3, "state", [("epoch", 1)]])
def test_what_is_no_dictionary_is_refused(given: Any) -> None:
    with pytest.raises(StateMismatch, match="is no state"):
        State.read(given)


@pytest.mark.parametrize("name", sorted(GOOD.as_dict()))
def test_a_missing_key_is_named(name: str) -> None:
    with pytest.raises(StateMismatch, match=f"has no '{name}'"):
        State.read({key: value for key, value in GOOD.as_dict().items() if key != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 2),
        ("version", "1"),
        ("version", None),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", None),
        ("seed", 1.0),
        ("length", -2),
        ("length", "100"),
        ("epoch", -1),
        ("epoch", True),
        ("epoch", 2**63),
        ("samples", -1),
        ("samples", [4]),
        ("samples", 2**80),
        ("mode", 4),
        ("order", b"Shuffled()"),
        ("rank_local", {}),
    ],
)
def test_a_wrong_value_is_shown(name: str, value: Any) -> None:
    with pytest.raises(StateMismatch, match=name) as caught:
        State.read(GOOD.as_dict() | {name: value})
    assert repr(value) in str(caught.value)
