"""The only place that determines rank and world size."""

import os

import torch.distributed as dist

from headrace.errors import bad_value
from headrace.types import World

_ALONE = World()
"""A world of one rank."""

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def resolve(distributed: bool | World | None) -> World:
    """Return this process's world as it is now; call it at iteration, not at construction.

    An initialised process group wins over the environment (`RANK` and `WORLD_SIZE`, which launchers
    set, and which may be missing or stale before the group exists). Without either the world is one rank.

    Args:
        distributed: The loader's argument: a `World` is taken as it is, False means one rank.

    Raises:
        ValueError: The environment's rank and world size are not numbers, or contradict each other.
    """
    if isinstance(distributed, World):
        return distributed
    if distributed is False:
        return _ALONE
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or size is None:
        return _ALONE
    try:
        return World(int(rank), int(size))
    except ValueError:
        bad_value(
            "RANK, WORLD_SIZE",
            (rank, size),
            "numbers with 0 <= RANK < WORLD_SIZE",
            "Start the script with torchrun, or pass distributed=World(rank, size), or unset both.",
        )


def of_environment(distributed: bool | World | None) -> bool:
    """Tell whether `resolve` reads the environment, since there is neither a `World` nor a process group."""
    return distributed in (None, True) and not (dist.is_available() and dist.is_initialized())


def environment() -> dict[str, str | None]:
    """Return the environment variables from which libraries read rank and world size, for workers; None means unset.

    Workers on other hosts have neither the rank's environment nor its process group, and may have those of another.
    """
    found = {name: os.environ.get(name) for name in _VARIABLES}
    if dist.is_available() and dist.is_initialized():
        found |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    return found
