"""Finds what a fetch changes: in the dataset, and in the globals, classes and modules that its code names."""

import ctypes
import functools
import io
import itertools
import random
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.cli.verify.digest import digest
from headrace.cli.verify.reads import of_library
from headrace.datasets.fork_safety import parts

_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random, torch.Generator)
_CONTAINERS = (list, dict, set, deque)
_LARGEST_BYTES = 1 << 20
"""The size of the largest array that is watched for changes, in bytes."""


class Content(NamedTuple):
    """The content of an object at a moment.

    Attributes:
        kind: The name of its type.
        value: Its value in words, or a digest of it.
        draws: Whether it is a random generator.
    """

    kind: str
    value: str | bytes
    draws: bool


class Change(NamedTuple):
    """An object whose content a fetch has changed.

    Attributes:
        draws: Whether it is a random generator.
        words: Where it is, and how it has changed.
    """

    draws: bool
    words: str


class Watch:
    """Keeps the contents of all objects that a fetch could change.

    The dataset, and the random generators in modules, are watched from now on. Other objects are watched from the
    moment when code that names them is entered.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self._roots: dict[str, tuple[Mapping[str, Any], str]] = {}  # a namespace, and the name in it
        self._before: dict[str, Content] = {}
        self._entered: set[CodeType] = set()
        self._classes: set[type] = set()
        self._add("dataset", {"dataset": dataset}, "dataset")
        for _, part in parts(dataset):
            for kind in type(part).__mro__:
                self._add_class(kind)
        for module_name, module in list(sys.modules.items()):
            if _of_user(module):
                for name, value in list(vars(module).items()):
                    if issubclass(type(value), _GENERATORS):
                        self._add(f"{module_name}.{name}", vars(module), name)

    def enter(self, code: CodeType, namespace: Mapping[str, Any]) -> None:
        """Watch the objects that a function of the user refers to by name, before the function runs."""
        if code in self._entered:
            return
        self._entered.add(code)
        for name in code.co_names:
            value: Any = namespace.get(name)
            if issubclass(type(value), type):
                self._add_class(value)
            elif not issubclass(type(value), ModuleType):
                self._add(f"{namespace.get('__name__')}.{name}", namespace, name)
            elif _of_user(value):
                for inner in code.co_names:
                    self._add(f"{value.__name__}.{inner}", vars(value), inner)

    def changes(self) -> list[Change]:
        """Return the objects whose content has changed since the watch began."""
        roots = dict(self._roots)
        for kind in self._classes:
            roots |= _attributes(kind)
        after: dict[str, Content] = {}
        for path, (namespace, name) in roots.items():
            if name in namespace:
                after |= _contents(path, namespace[name])
        changed = []
        for path, now in after.items():
            was = self._before.get(path)
            if was is None:
                changed.append(Change(now.draws, f"{path} (a {now.kind}) is new"))
            elif was != now and isinstance(was.value, str) and isinstance(now.value, str):
                changed.append(Change(now.draws, f"{path} went from {was.value:.40} to {now.value:.40}"))
            elif was != now:
                changed.append(Change(now.draws, f"{path} (a {now.kind}){'' if now.draws else ' changed'}"))
        return changed

    def _add(self, path: str, namespace: Mapping[str, Any], name: str) -> None:
        if path not in self._roots:
            self._roots[path] = namespace, name
            if name in namespace:
                self._before |= _contents(path, namespace[name])

    def _add_class(self, kind: Any) -> None:
        if kind not in self._classes and _of_user(sys.modules.get(kind.__module__)):
            self._classes.add(kind)
            for path, root in _attributes(kind).items():
                self._add(path, *root)


def _attributes(kind: type) -> dict[str, tuple[Mapping[str, Any], str]]:
    names = [name for name in vars(kind) if not name.startswith("__")]
    return {f"{kind.__module__}.{kind.__qualname__}.{name}": (vars(kind), name) for name in names}


def _of_user(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not of_library(file)


def _contents(root: str, value: Any) -> dict[str, Content]:
    """Return the contents of a value's parts, by the expression that leads to each."""
    found: dict[str, Content] = {}
    for path, part in _parts(root, value):
        held = _value_of(part)
        if held is not None:
            kind = type(part)
            name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
            name = name.replace("_generator.", "").replace("_C.", "").removeprefix("_thread.")
            found[path] = Content(name, held, issubclass(kind, _GENERATORS))
    return found


def _parts(root: str, value: Any) -> Iterator[tuple[str, Any]]:
    for step, part in parts(value):
        path = root + step.removeprefix("dataset")
        yield path, part
        if type(part) is threading.local:  # each thread has its own attributes
            for name, inner in vars(part).items():
                yield from _parts(f"{path}.{name}", inner)


def _value_of(part: Any) -> str | bytes | None:
    """Return a value that shows whether an object has changed; None if it is not watched."""
    kind = type(part)
    if issubclass(kind, random.SystemRandom):
        return None
    if issubclass(kind, np.random.Generator):
        return digest(part.bit_generator.state).whole
    if issubclass(kind, np.random.BitGenerator):
        return digest(part.state).whole
    if issubclass(kind, np.random.RandomState | torch.Generator):
        return digest(part.get_state()).whole
    if issubclass(kind, random.Random):
        return digest(part.getstate()).whole
    if part is None or kind in (int, float, bool, str, bytes, itertools.count):
        return repr(part)
    if issubclass(kind, _CONTAINERS):
        base: Any = next(one for one in _CONTAINERS if issubclass(kind, one))
        return f"{base.__len__(part)} items"
    if kind is functools._lru_cache_wrapper:
        return f"{part.cache_info().currsize} items"
    if issubclass(kind, ctypes._SimpleCData):  # as of a multiprocessing.Value
        return repr(part.value)
    if kind in (io.FileIO, io.BufferedReader, io.BytesIO) and not part.closed:
        return f"byte {part.tell()}"
    if (kind is np.ndarray and not part.dtype.hasobject and part.nbytes <= _LARGEST_BYTES) or (
        kind is torch.Tensor and part.nbytes <= _LARGEST_BYTES
    ):
        return digest(part).whole
    return None
