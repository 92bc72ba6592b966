"""Warnings about objects in a dataset that do not survive a fork."""

import multiprocessing.pool
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

MANY_OBJECTS = 1_000_000
"""Containers of this number of objects cause a warning: at 30 to 120 bytes each, a worker copies 30 to 120 MB."""

_DEPTH = 6
_LOOKED_AT = 400
_SAMPLED = 64
"""How many levels below the dataset, of its parts, and of one container's items are checked; in all within 1 ms."""

_NAMED = 3
"""The largest number of parts that a warning names."""

_LOCK = type(threading.Lock())
_CONTAINERS = (list, tuple, dict, set, frozenset)
_POOLS = (Executor, multiprocessing.pool.Pool)
_LEAVES = (
    *(str, bytes, int, float, torch.Tensor, threading.Thread, *_POOLS),
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType),
)

_warned: set[str] = set()


def warn_before_fork(dataset: Any) -> None:
    """Warn about parts of a dataset that cause problems in forked workers; once per process for each kind.

    The kinds are: large containers of Python objects, whose memory every worker copies; running threads and pools,
    which do not run in a worker; and tensors on an accelerator, which a worker cannot use. The dataset's attributes are
    searched, and the objects and containers in them a few levels deep, which covers torch's wrappers.

    Args:
        dataset: The dataset that the workers will inherit.
    """
    found_parts = list(parts(dataset)) if len(_warned) < len(_KINDS) else []
    for kind, (describe, consequence) in _KINDS.items():
        found = [f"{path} ({what})" for path, part in found_parts if (what := describe(part))]
        if found and kind not in _warned:
            _warned.add(kind)
            more = [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
            warnings.warn(f"{', '.join(found[:_NAMED] + more)}: {consequence}", stacklevel=2)


def parts(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dataset and its parts, nearest first, each with the expression that leads to it."""
    waiting: deque[tuple[str, Any, int]] = deque([("dataset", dataset, 0)])
    seen: set[int] = set()
    while waiting and len(seen) < _LOOKED_AT:
        path, part, depth = waiting.popleft()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        if depth < _DEPTH and not issubclass(type(part), _LEAVES):
            room = _LOOKED_AT - len(waiting)
            waiting.extend((path + step, inner, depth + 1) for step, inner in islice(_inside(part), room))


def _inside(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the direct parts of an object or a container, without calling user code."""
    for name, inner in attributes_of(part).items():
        yield f".{name}", inner
    if issubclass(type(part), dict):
        for key, inner in islice(dict.items(part), _SAMPLED):
            yield f"[{key!r}]" if type(key) in (str, int) else "[...]", inner
    elif issubclass(type(part), list | tuple):
        base: Any = list if issubclass(type(part), list) else tuple
        for number, inner in enumerate(islice(base.__iter__(part), _SAMPLED)):
            yield f"[{number}]", inner


def attributes_of(part: Any) -> dict[str, Any]:
    """Return an object's own `__dict__`, without calling its code; an empty one if it has none."""
    try:
        found = object.__getattribute__(part, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _many_objects(part: Any) -> str:
    """Describe a large container of different objects.

    A list of a few repeated objects is ignored, since they are on a few pages. Keys always differ.
    """
    if not issubclass(type(part), _CONTAINERS):
        return ""
    base: Any = next(one for one in _CONTAINERS if issubclass(type(part), one))
    count = base.__len__(part)
    if count < MANY_OBJECTS:
        return ""
    if base in (list, tuple):
        sample = base.__getitem__(part, slice(None, None, count // _SAMPLED))
        if len(set(map(id, sample))) <= len(sample) // 2:
            return ""
    return f"{count:,} objects"


def _running(part: Any) -> str:
    """Describe a thread that runs, a pool with such a thread, or a lock that is held."""
    kind = type(part)
    if kind is _LOCK:
        return "a lock that is held" if part.locked() else ""
    if issubclass(kind, threading.Thread):
        return "a running thread" if _runs(part) else ""
    if issubclass(kind, _POOLS):
        held = attributes_of(part).values()
        # Where a pool keeps its threads: as attributes, or in a set.
        if any(_runs(one) or (type(one) is set and any(map(_runs, one))) for one in held):
            return f"a {kind.__name__} in use"
    return ""


def _runs(part: Any) -> bool:
    current = threading.current_thread()  # the one that forks goes on in the worker
    return any(part is thread for thread in threading.enumerate() if thread is not current)


def _on_accelerator(part: Any) -> str:
    # Such a tensor exists only where its device is initialised; a forked process cannot initialise it again.
    if issubclass(type(part), torch.Tensor) and part.device.type not in ("cpu", "meta"):
        return f"a tensor on {part.device}"
    return ""


_KINDS: dict[str, tuple[Callable[[Any], str], str]] = {
    "objects": (
        _many_objects,
        "reading an object writes its reference count, so that each forked worker copies the memory of all that it "
        "reads. Hold them in a headrace.PackedList(...) or in a numpy array, which workers share.",
    ),
    "threads": (
        _running,
        "threads do not run in a forked worker, and what they hold is never let go there, so that waiting for their "
        "work hangs. Start them in the worker, when they are first used; or leave them out in __getstate__ and pass "
        'multiprocessing_context="spawn" or "forkserver".',
    ),
    "accelerator": (
        _on_accelerator,
        "a forked worker cannot use the accelerator. Keep the dataset's tensors on the CPU and move each batch, or "
        'pass multiprocessing_context="spawn" or "forkserver".',
    ),
}
