"""Runs torch's DataLoader and headrace's on the same case and compares everything that can be seen of it, deeply."""

import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.utils.data

import headrace

LOADERS: tuple[type[torch.utils.data.DataLoader], ...] = (torch.utils.data.DataLoader, headrace.DataLoader)
SHARED = Path("/dev/shm")
OURS = re.compile("DataLoader|pin_memory|IterableDataset")

Make = Callable[[type[torch.utils.data.DataLoader]], torch.utils.data.DataLoader]
Use = Callable[[Any], Any]


@dataclass(frozen=True)
class Raised:
    """An exception in place of a batch: its type, below headrace's own, and the first line of its text."""

    kind: type[BaseException]
    line: str

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        kind = next(base for base in type(error).__mro__ if not base.__module__.startswith("headrace"))
        return cls(kind, str(error).partition("\n")[0])


def attempt(action: Callable[[], Any]) -> Any:
    """Return what the action returns, or how it failed."""
    try:
        return action()
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        raised = Raised.of(error)
        link: BaseException | None = error
        while link is not None:  # torch raises from a frame that holds the error, and so for long its workers
            link.__traceback__, link = None, link.__cause__ or link.__context__
        return raised


def steps(iterator: Iterator[Any], count: int) -> list[Any]:
    """Call `next()` so many times, whatever it raises."""
    return [attempt(lambda: next(iterator)) for _ in range(count)]


def same(theirs: Any, ours: Any, path: str = "") -> None:
    """Assert that two values are equal to the last bit, in type, and all the way down."""
    assert type(theirs) is type(ours), f"{path}: {type(theirs)} became {type(ours)}"
    if isinstance(theirs, torch.Tensor):
        _same_tensor(theirs, ours, path)
    elif isinstance(theirs, np.ndarray):
        for name in ("dtype", "shape", "strides"):
            assert getattr(theirs, name) == getattr(ours, name), f"{path}.{name}"
        assert theirs.flags.writeable == ours.flags.writeable, f"{path}.flags.writeable"
        if theirs.dtype == object:
            same(theirs.tolist(), ours.tolist(), path)
        else:
            assert theirs.tobytes() == ours.tobytes(), f"{path}: {theirs} became {ours}"
    elif isinstance(theirs, Mapping):
        assert list(theirs) == list(ours), f"{path}: keys {list(theirs)} became {list(ours)}"
        for key in theirs:
            same(theirs[key], ours[key], f"{path}[{key!r}]")
    elif isinstance(theirs, list | tuple):
        assert len(theirs) == len(ours), f"{path}: {theirs} became {ours}"
        for place, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            same(one, other, f"{path}[{place}]")
    elif isinstance(theirs, float):
        assert theirs.hex() == ours.hex(), f"{path}: {theirs} became {ours}"
    elif type(theirs).__eq__ is object.__eq__ and hasattr(theirs, "__dict__") and not isinstance(theirs, type):
        same(vars(theirs), vars(ours), f"vars({path})")
    else:
        assert theirs == ours, f"{path}: {theirs!r} became {ours!r}"


def _same_tensor(theirs: torch.Tensor, ours: torch.Tensor, path: str) -> None:
    for name in ("dtype", "shape", "layout", "device", "requires_grad", "is_leaf"):
        assert getattr(theirs, name) == getattr(ours, name), f"{path}.{name}"
    if theirs.layout is torch.sparse_csr:
        for part in ("crow_indices", "col_indices", "values"):
            same(getattr(theirs, part)(), getattr(ours, part)(), f"{path}.{part}()")
        return
    if theirs.layout is torch.sparse_coo:
        assert theirs.is_coalesced() == ours.is_coalesced(), f"{path}.is_coalesced()"
        for part in ("_indices", "_values"):
            same(getattr(theirs, part)(), getattr(ours, part)(), f"{path}.{part}()")
        return
    assert theirs.stride() == ours.stride(), f"{path}.stride(): {theirs.stride()} became {ours.stride()}"
    assert _bits(theirs) == _bits(ours), f"{path}: {theirs} became {ours}"


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def seed_everything(seed: int = 11) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def states() -> list[Any]:
    """Return the states of the three global generators."""
    return [torch.get_rng_state(), random.getstate(), list(np.random.get_state())]


def observe(make: Make, use: Use, loader_class: type[torch.utils.data.DataLoader]) -> dict[str, Any]:
    """Do what the case does with a fresh loader of the class; return everything that can be seen of it."""
    seed_everything()
    shared_before = set(SHARED.glob("torch_*"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = make(loader_class)
        result = use(loader)
    seen = {
        "result": result,
        "states": states(),
        "generator": None if loader.generator is None else loader.generator.get_state(),
        "warnings": [(one.category, str(one.message)) for one in caught if OURS.search(str(one.message))],
    }
    loader._iterator = None
    if loader_class is LOADERS[0]:
        # A worker of torch's that is told to end while it shares a tensor leaves the file behind. Those of workers that
        # live belong to others who test here, too.
        for file in set(SHARED.glob("torch_*")) - shared_before:
            if not psutil.pid_exists(int(file.name.split("_")[1])):
                file.unlink(missing_ok=True)
    return seen


def assert_parity(make: Make, use: Use) -> Any:
    """Assert that headrace's loader shows what torch's shows; return what the case returned."""
    theirs, ours = (observe(make, use, one) for one in LOADERS)
    same(theirs, ours)
    return ours["result"]


def one_epoch(loader: Any) -> list[Any]:
    return [attempt(lambda: len(loader)), list(loader)]


def two_epochs(loader: Any) -> list[Any]:
    return [*one_epoch(loader), *one_epoch(loader), torch.rand(())]


def three_epochs(loader: Any) -> list[Any]:
    return [list(loader), list(loader), attempt(lambda: len(loader)), list(loader)]


def abandoned(loader: Any) -> list[Any]:
    """Break off the first epoch, draw, and read two more."""
    return [list(islice(loader, 2)), torch.rand(()), list(loader), next(iter(loader), None), list(loader)]


def interleaved(loader: Any) -> list[Any]:
    """Read two iterators in turn: independent ones, or the same one twice where workers persist."""
    first, second = iter(loader), iter(loader)
    batches = list(zip(first, second, strict=False))
    return [batches, steps(first, 2), steps(second, 2), first is second]


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Return cells that show every allowed pair of values of two factors; greedy, and always the same."""
    missing = {
        frozenset({(one, left), (other, right)}): None
        for one, other in combinations(factors, 2)
        for left in factors[one]
        for right in factors[other]
        if allowed({one: left, other: right})
    }
    cells = []
    while missing:
        cell = dict(next(iter(missing)))
        for name in factors:
            if name not in cell:
                options = [value for value in factors[name] if allowed({**cell, name: value})]
                chosen = cell
                cell[name] = max(
                    options,
                    key=lambda value: sum(frozenset({(name, value), one}) in missing for one in chosen.items()),
                )
        cells.append({name: cell[name] for name in factors})
        for pair in combinations(cell.items(), 2):
            missing.pop(frozenset(pair), None)
    return cells


def name_of(cell: Mapping[str, Any]) -> str:
    return "-".join(str(value) for value in cell.values())
