"""Batches of any structure with their tensors replaced."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch


class Replacement(NamedTuple):
    """What replaces the parts of a batch.

    Attributes:
        of_tensor: Returns what replaces a tensor.
        of_object: Returns what replaces an object with a method `to`: it knows best what belongs on a device.
    """

    of_tensor: Callable[[torch.Tensor], torch.Tensor]
    of_object: Callable[[Any], Any]


def replaced(value: Any, by: Replacement) -> Any:
    """Return a batch with its tensors replaced; the batch itself stays as it is.

    Looked into are mappings, sequences, named tuples and dataclasses. Everything else stays, such as text, numbers and
    numpy arrays, and so do containers in which there is nothing to replace.

    Args:
        value: The batch, or a part of it.
        by: What replaces its parts.
    """
    if isinstance(value, torch.Tensor):
        return by.of_tensor(value)
    if isinstance(value, str | bytes | bytearray | memoryview | torch.dtype | type):
        return value
    if callable(getattr(type(value), "to", None)):
        return by.of_object(value)
    if isinstance(value, Mapping):
        items = dict(value)
        new = [replaced(one, by) for one in items.values()]
        return value if _same([*items.values()], new) else _like(value, dict(zip(items, new, strict=True)))
    if isinstance(value, Sequence):
        old = list(value)
        new = [replaced(one, by) for one in old]
        if _same(old, new):
            return value
        return type(value)(*new) if isinstance(value, tuple) and hasattr(value, "_fields") else _like(value, new)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        old = [getattr(value, name) for name in names]
        new = [replaced(one, by) for one in old]
        if _same(old, new):
            return value
        found = copy.copy(value)
        for name, one in zip(names, new, strict=True):
            object.__setattr__(found, name, one)  # it may be frozen
        return found
    return value


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Tell whether nothing was replaced. A container without tensors then stays, whatever type it is of."""
    return all(one is other for one, other in zip(old, new, strict=True))


def _like(value: Any, parts: Any) -> Any:
    """Return a mapping or sequence of the same type with other parts; a dict or list if that cannot be made."""
    try:
        if isinstance(value, MutableMapping) and type(value) is not dict:
            found = copy.copy(value)  # it may hold more than its items, such as a default
            found.update(parts)
            return found
        return type(value)(parts)
    except TypeError:
        return parts
