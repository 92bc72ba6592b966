"""The ways in which an iterable dataset is written: what `iter` returns, and where its place is kept."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

LENGTH = 12


def first() -> int:
    """The first number of the worker's copy: copies can be told apart."""
    info = get_worker_info()
    return 0 if info is None else 100 * info.id


class Own(IterableDataset[int]):
    """Its own iterator, which `__iter__` resets."""

    def __iter__(self) -> Iterator[int]:
        self.first = first()
        self.read = 0
        return self

    def __next__(self) -> int:
        if self.read == LENGTH:
            raise StopIteration
        self.read += 1
        return self.first + self.read - 1


class OwnWithState(Own):
    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class OwnSkipping(Own):
    """Its `load_state_dict` needs what `__iter__` creates."""

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        while self.read < state["read"]:
            next(self)


class OwnCounting(Own):
    """Counts its passes, which show in the numbers."""

    passes = -1
    read = 0

    def __iter__(self) -> Iterator[int]:
        super().__iter__()
        self.passes += 1
        return self

    def __next__(self) -> int:
        return 1000 * self.passes + super().__next__()

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read, self.passes = state["read"], state["passes"]


class Generator(IterableDataset[int]):
    """Its `__iter__` is a generator."""

    def __iter__(self) -> Iterator[int]:
        yield from range(first(), first() + LENGTH)


class GeneratorWithState(IterableDataset[int]):
    """Keeps the place in the pass, and begins the next pass at 0."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        while self.read < LENGTH:
            self.read += 1
            yield first() + self.read - 1
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class GeneratorBeginningThere(IterableDataset[int]):
    """A state is where the pass begins that comes next; at its end it is its end."""

    begin = read = 0

    def __iter__(self) -> Iterator[int]:
        self.read, self.begin = self.begin, 0
        while self.read < LENGTH:
            self.read += 1
            yield first() + self.read - 1

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["read"]


class GeneratorCounting(IterableDataset[int]):
    """Counts its passes, which show in the numbers, at their ends."""

    read = passes = 0

    def __iter__(self) -> Iterator[int]:
        while self.read < LENGTH:
            self.read += 1
            yield 1000 * self.passes + first() + self.read - 1
        self.read = 0
        self.passes += 1

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read, self.passes = state["read"], state["passes"]


class Place:
    """An iterator with a state."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.read == LENGTH:
            raise StopIteration
        self.read += 1
        return first() + self.read - 1

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class IteratorWithState(IterableDataset[int]):
    """Its iterator keeps the place, and it itself nothing."""

    def __iter__(self) -> Any:
        return Place()


FORMS = {
    form.__name__: form
    for form in (
        Own,
        OwnWithState,
        OwnSkipping,
        OwnCounting,
        Generator,
        GeneratorWithState,
        GeneratorBeginningThere,
        GeneratorCounting,
        IteratorWithState,
    )
}
