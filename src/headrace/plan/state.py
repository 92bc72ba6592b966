"""What a loader needs to go on where another stopped: a few integers and strings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import StateMismatch, shown, whole_number

VERSION = 1

_MAX = 2**63 - 1


@dataclass(frozen=True)
class State:
    """A place in the epochs of a loader. Under a plan it is the same on every rank, and any world may go on from it.

    Attributes:
        version: Of this format.
        mode: What decides on the samples: "plan", "parity" (torch's own samplers), "sampler" (the user's), "stream"
            (an iterable dataset) or "datapipe" (whose place nobody knows).
        seed: The plan's, or a keyed stream's; 0 where there is none.
        length: Samples in the dataset; -1 where nobody knows.
        order: The order and its parameters in words, or the sampler's type.
        epoch: From 0.
        samples: How many of the epoch's samples have been delivered, over all ranks; elsewhere than in a plan, in whole
            batches of this rank's.
        rank_local: JSON of what only the same rank of the same world can go on from; "" if there is nothing like that.
    """

    mode: str
    seed: int
    length: int
    order: str
    epoch: int
    samples: int
    rank_local: str = ""
    version: int = VERSION

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a new dictionary of integers and strings, always under the same keys."""
        return dict(vars(self))  # asdict() takes ten times as long

    @classmethod
    def read(cls, given: object) -> "State":
        """Return the state in a dictionary that `as_dict` made, perhaps long ago and elsewhere.

        Raises:
            StateMismatch: It is none: the text says what is wrong with it.
        """
        if not isinstance(given, Mapping):
            raise StateMismatch(
                f"state={shown(given)} is no state: expected the dictionary that state_dict() returned."
            )
        missing = [name for name in cls.__dataclass_fields__ if name not in given]
        if missing:
            raise StateMismatch(
                f"the state has no {', '.join(map(repr, missing))}, only {sorted(map(str, given))}: it is not one that "
                "this loader's state_dict() returned. Save and load the dictionary whole."
            )
        if given["version"] != VERSION:
            raise StateMismatch(
                f'state["version"] is {given["version"]!r}, and this headrace reads version {VERSION}. '
                "Load it with the release that saved it."
            )
        fields: dict[str, Any] = {}
        for name, kind in cls.__annotations__.items():
            value = given[name]
            if kind is str and not isinstance(value, str):
                raise StateMismatch(f'state["{name}"] is {value!r}, not a string: the state was changed by hand.')
            fields[name] = value if kind is str else _whole(name, value)
        return cls(**fields)


def _whole(name: str, value: object) -> int:
    high = 2**64 - 1 if name == "seed" else _MAX
    try:
        return whole_number(
            f'state["{name}"]', value, low=-1 if name == "length" else 0, high=high, fix="It was changed by hand."
        )
    except (TypeError, ValueError) as error:
        raise StateMismatch(str(error)) from None


def mismatch(what: str, saved: object, mine: object, fix: str) -> StateMismatch:
    """Return the error for a state that belongs to another loader, with both values."""
    return StateMismatch(f"the state was saved with {what}={saved!r}, this loader has {mine!r}. {fix}")
