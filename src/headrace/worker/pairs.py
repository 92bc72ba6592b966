"""Datasets that read the raw samples of a batch in one call and decode them one by one: `read_many` and `decode`."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.utils.data import ConcatDataset, StackDataset, Subset

from headrace.datasets.deferred import Deferred, built

_PAIR = ("read_many", "decode")
_OTHERS = ("__getitem__", "__getitems__")
_NAMES = (*_PAIR, *_OTHERS)


class Pair(Protocol):
    """Reads raw samples and decodes them; torch's wrappers around such datasets do so, too."""

    def read(self, indices: list[Any]) -> Sequence[Any]:
        """Return the raw samples at the indices, in their order."""

    def decode(self, raw: Any) -> Any:
        """Return the sample of a raw one."""


class WrongCount(ValueError):
    """A dataset returned another number of raw samples than it was asked for: its code is wrong, not a sample."""


def pair_of(dataset: Any, by_part: bool = False) -> Pair | None:
    """Return how to read from a dataset by `read_many` and `decode`; None if it is to be asked otherwise.

    A class that overrides `__getitem__` or `__getitems__` of one with the pair, and not the pair, is asked by what it
    overrides. A wrapper that only passes on attributes has no pair. `Subset`, `ConcatDataset` and `StackDataset` have
    it if a dataset in them has; a subclass of theirs that overrides how they fetch has not.

    Args:
        dataset: The dataset.
        by_part: Whether a `StackDataset` decodes all samples of one dataset before those of the next, as in torch, so
            that both draw the same numbers. It then decodes while it reads.
    """
    dataset = built(dataset)
    if _has_pair(dataset):
        return _Own(dataset)
    if _fetches_as(dataset, Subset):
        inner = pair_of(dataset.dataset, by_part)
        return None if inner is None else _OfSubset(dataset.indices, inner)
    if _fetches_as(dataset, ConcatDataset):
        # One that is built late is not built before a sample of it is read.
        late = any(isinstance(part, Deferred) for part in dataset.datasets)
        return _OfConcatenation(dataset) if late or any(map(pair_of, dataset.datasets)) else None
    if _fetches_as(dataset, StackDataset):
        parts = dataset.datasets
        paired = any(map(pair_of, parts.values() if isinstance(parts, dict) else parts))
        return _OfStack(parts, by_part) if paired else None
    return None


def _has_pair(dataset: Any) -> bool:
    bases = [vars(base) for base in type(dataset).__mro__]
    depth = {name: next((at for at, one in enumerate(bases) if name in one), len(bases)) for name in _NAMES}
    own = getattr(dataset, "__dict__", {})
    if not all((depth[name] < len(bases) or name in own) and callable(getattr(dataset, name)) for name in _PAIR):
        return False
    return min(depth[name] for name in _PAIR) <= min(depth[name] for name in _OTHERS)


def _fetches_as(dataset: Any, kind: type) -> bool:
    return isinstance(dataset, kind) and all(
        getattr(type(dataset), name, None) is getattr(kind, name, None) for name in _OTHERS
    )


class _Own:
    """Reads by the methods `read_many` and `decode` that a dataset itself has."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.decode: Callable[[Any], Any] = dataset.decode

    def read(self, indices: list[Any]) -> Sequence[Any]:
        raws: Sequence[Any] = self._dataset.read_many(indices)
        return _counted(raws, len(indices), self._dataset, "read_many")


class _Single:
    """A dataset without the pair, beside others that have it: what is read is the index."""

    def __init__(self, dataset: Any) -> None:
        self.decode: Callable[[Any], Any] = built(dataset).__getitem__

    def read(self, indices: list[Any]) -> Sequence[Any]:
        return indices


class _Whole:
    """A dataset with `__getitems__` beside others that have the pair: it reads samples and decodes nothing."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = built(dataset)

    def read(self, indices: list[Any]) -> Sequence[Any]:
        return _counted(self._dataset.__getitems__(indices), len(indices), self._dataset, "__getitems__")

    def decode(self, raw: Any) -> Any:
        return raw


class _OfSubset:
    def __init__(self, chosen: Sequence[Any], inner: Pair) -> None:
        self._chosen, self._inner = chosen, inner
        self.decode = inner.decode

    def read(self, indices: list[Any]) -> Sequence[Any]:
        return self._inner.read([self._chosen[index] for index in indices])


class _OfConcatenation:
    """Reads once from each dataset that has samples in the batch; each raw sample comes with its dataset's number."""

    def __init__(self, dataset: Any) -> None:
        self._datasets: list[Any] = dataset.datasets
        self._ends: list[int] = dataset.cumulative_sizes
        self._pairs: dict[int, Pair] = {}

    def read(self, indices: list[Any]) -> Sequence[Any]:
        places: dict[int, list[int]] = {}
        inside: dict[int, list[Any]] = {}
        for place, index in enumerate(indices):
            number, own = self._located(index)
            places.setdefault(number, []).append(place)
            inside.setdefault(number, []).append(own)
        raws: list[Any] = [None] * len(indices)
        for number, own_indices in inside.items():
            if number not in self._pairs:
                self._pairs[number] = pair_of(self._datasets[number]) or _Single(self._datasets[number])
            for place, raw in zip(places[number], self._pairs[number].read(own_indices), strict=True):
                raws[place] = number, raw
        return raws

    def _located(self, index: Any) -> tuple[int, Any]:
        """Return the number of the dataset that an index belongs to, and the index in that, as torch does."""
        if index < 0:
            if -index > self._ends[-1]:
                raise ValueError("absolute value of index should not exceed dataset length")
            index += self._ends[-1]
        number = bisect_right(self._ends, index)
        if number == len(self._ends):
            raise IndexError("list index out of range")
        return number, index - self._ends[number - 1] if number else index

    def decode(self, raw: Any) -> Any:
        number, own = raw
        return self._pairs[number].decode(own)


class _OfStack:
    """Reads once from each dataset; a raw sample is a tuple of theirs."""

    def __init__(self, parts: Any, by_part: bool) -> None:
        self._names = list(parts) if isinstance(parts, dict) else None
        self._by_part = by_part
        datasets = parts.values() if isinstance(parts, dict) else parts
        self._parts = [pair_of(one, by_part) or _other(one) for one in datasets]

    def read(self, indices: list[Any]) -> Sequence[Any]:
        columns: list[Sequence[Any]] = []
        for part in self._parts:
            raws = part.read(indices)
            columns.append([part.decode(raw) for raw in raws] if self._by_part else raws)
        return list(zip(*columns, strict=True))

    def decode(self, raw: Any) -> Any:
        sample = raw if self._by_part else [part.decode(own) for part, own in zip(self._parts, raw, strict=True)]
        return tuple(sample) if self._names is None else dict(zip(self._names, sample, strict=True))


def _other(dataset: Any) -> Pair:
    """Return how `StackDataset` reads from a dataset that has not the pair."""
    return _Whole(dataset) if callable(getattr(built(dataset), "__getitems__", None)) else _Single(dataset)


def _counted(raws: Any, count: int, dataset: Any, method: str) -> Sequence[Any]:
    """Return raw samples if they are as many as there were indices."""
    name = f"{type(dataset).__name__}.{method}"
    try:
        found = len(raws)
    except TypeError:
        kind = type(raws).__name__
        raise WrongCount(
            f"{name} returned a {kind} for {count} indices: expected a sequence with one item for each index, in order"
        ) from None
    if found != count:
        raise WrongCount(f"{name} returned {found} items for {count} indices: expected one for each index, in order")
    sequence: Sequence[Any] = raws
    return sequence
