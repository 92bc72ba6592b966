"""Samplers of the user's on several ranks: does one split its indices over them, and what do its first steps hold?"""

import copy
import hashlib
import reprlib
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from headrace.randomness import callers_generators_kept

_PLAIN_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Torch's samplers that do not split an epoch over ranks."""

_OF_RANKS = frozenset(
    ("rank", "num_replicas", "world_size", "num_processes", "process_index", "data_parallel_rank", "dp_rank")
)
"""Attributes by which samplers know of ranks, apart from underscores before the name."""

_MOST_NESTED = 4
"""How many samplers may be around the one that splits."""

_STEPS = 4
"""How many steps of a sampler are compared."""


def splits(sampler: Any) -> bool:
    """Tell whether a sampler is known to split its indices over ranks: by its type, or by attributes about ranks."""
    return any(
        isinstance(part, DistributedSampler) or any(name.lstrip("_") in _OF_RANKS for name in dir(part))
        for part in _nested(sampler, _MOST_NESTED)
    )


def _nested(sampler: Any, depth: int) -> Iterator[Any]:
    """Yield a sampler and those that it takes its indices from."""
    yield sampler
    own: dict[str, Any] = getattr(sampler, "__dict__", {})
    for name, part in own.items() if depth else ():
        if isinstance(part, Sampler) or "sampler" in name:
            yield from _nested(part, depth - 1)


def deciding(loader: Any) -> Any:
    """Return the sampler that decides on a loader's samples: the user's batch sampler, or the sampler in torch's."""
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) is BatchSampler else batches


def warning_of(loader: Any) -> str:
    """Return the warning about a sampler that does not split, or is not known to; "" for others.

    Args:
        loader: A loader with a sampler or batch sampler of the user's, on several ranks.
    """
    sampler = deciding(loader)
    if loader.distributed is not None or splits(sampler):
        return ""
    kind = type(sampler).__name__
    if type(sampler) in _PLAIN_SAMPLERS:
        return (
            f"every rank reads the whole of what its {kind} draws, which knows of no ranks. "
            "Pass shuffle=True without a sampler, order=Weighted(...) or Subset(...), or a DistributedSampler; "
            "distributed=False says that it is meant."
        )
    return (
        f"your {kind} decides what each rank reads, and nothing in it tells that it knows of ranks: all of them "
        "may read the same. loader.verify() compares what their first steps hold. Leave it out and pass "
        "order=Balanced(labels), Weighted(...) or Subset(...), which are split, or give it attributes rank and "
        "num_replicas and split by them; distributed=False says that it is meant."
    )


def first_steps(loader: Any) -> str | None:
    """Return the first steps of a loader's sampler, shortened, with a checksum; None where nothing can be told.

    A copy of the sampler is asked, with the random generators as they are, and these are left as they were.
    """
    parts = [part for one in _nested(loader._index_sampler, _MOST_NESTED) for part in (one, getattr(one, "sampler", 0))]
    sources = [loader.dataset, *(vars(one).get("data_source") for one in parts if hasattr(one, "__dict__"))]
    with callers_generators_kept():
        try:
            sampler = copy.deepcopy(loader._index_sampler, {id(one): one for one in sources})
            steps = [_plain(step) for step in islice(iter(sampler), _STEPS)]
        except Exception:  # noqa: BLE001 - a sampler that cannot be copied; iterating raises its own errors
            return None
    samples = [*chain(*(step if isinstance(step, list) else [step] for step in steps))]
    if all(one == samples[0] for one in samples):  # ranks may share what is so little
        return None
    checksum = hashlib.blake2b(repr(steps).encode(), digest_size=4).hexdigest()
    return f"{reprlib.repr(steps)} #{checksum}"


def _plain(step: Any) -> Any:
    if isinstance(step, torch.Tensor) or hasattr(step, "tolist"):
        return step.tolist()
    return [_plain(one) for one in step] if isinstance(step, list | tuple) else step
