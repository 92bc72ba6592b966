"""What arguments are given in tests: datasets, and what a value beside others leads to."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset

from headrace.testing import FakeDataset


class Numbers(IterableDataset[int]):
    """0, 1, 2."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized:
    """Sample i is i, for every i."""

    def __getitem__(self, index: int) -> int:
        return index


class InBulk:
    """Sample i is i, asked for in lists."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


@dataclass(frozen=True)
class Wrong:
    """A value that is refused at construction.

    Attributes:
        value: Which.
        error: The error's type.
        text: What it says; by default the argument's name and the value.
        beside: Other arguments.
    """

    value: Any
    error: type[Exception]
    text: str = ""
    beside: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ignored:
    """A value without effect beside other arguments: a warning names it, when the loader is made.

    Attributes:
        value: Which.
        beside: The other arguments.
        text: What the warning says; by default the argument's name, and that it is ignored.
    """

    value: Any
    beside: dict[str, Any]
    text: str = ""


@dataclass(frozen=True)
class AsTorch:
    """A value that torch judges: it raises what torch raises, there or earlier, or gives the same batch.

    Attributes:
        value: Which.
        beside: Other arguments.
        text: What headrace's own error says; "" where it is torch's, to the letter.
    """

    value: Any
    beside: dict[str, Any] = field(default_factory=dict)
    text: str = ""


Case = Wrong | Ignored | AsTorch

FLAG = "is not allowed: expected True or False"


def arguments(dataset: Any = None, **options: Any) -> dict[str, Any]:
    return {"dataset": FakeDataset(5) if dataset is None else dataset, **options}
