"""The only place that determines rank and world size."""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from headrace.errors import bad_value
from headrace.types import World

_ALONE = World()
"""A world of one rank."""

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def resolve(distributed: bool | World | DeviceMesh | None) -> World:
    """Return this process's world as it is now; call it at iteration, not at construction.

    An initialised process group wins over the environment (`RANK` and `WORLD_SIZE`, which launchers
    set, and which may be missing or stale before the group exists). Without either the world is one rank.

    Args:
        distributed: The loader's argument: a `World` is taken as it is, False means one rank. Of a `DeviceMesh` all
            dimensions count, the last one fastest; ranks with equal coordinates in it read the same.

    Raises:
        ValueError: The environment's rank and world size are not numbers, or contradict each other; or this process
            does not belong to the mesh.
    """
    if isinstance(distributed, World):
        return distributed
    if isinstance(distributed, DeviceMesh):
        place = distributed.get_coordinate()
        if place is None:
            fix = "Make the loader only on the mesh's ranks, or pass a mesh of all that read."
            bad_value("distributed", distributed, f"a mesh that rank {dist.get_rank()} belongs to", fix)
        return World(int(np.ravel_multi_index(place, distributed.shape)), distributed.size())
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


def is_given(distributed: object) -> bool:
    """Tell whether the loader's argument says by itself whose share this process reads."""
    return isinstance(distributed, World | DeviceMesh)


def of_environment(distributed: object) -> bool:
    """Tell whether `resolve` reads the environment, since there is no world, mesh or process group."""
    return (distributed is None or distributed is True) and not (dist.is_available() and dist.is_initialized())


def local_ranks() -> int:
    """Return how many ranks run on this machine, as far as this process can know.

    Launchers set `LOCAL_WORLD_SIZE`. Without it, the ranks of an initialised group are taken to be on this machine, but
    no more than it has accelerators, where it has some.
    """
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    if given.isdigit() and int(given):
        return int(given)
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    ranks = dist.get_world_size()
    return min(ranks, torch.accelerator.device_count()) if torch.accelerator.is_available() else ranks


def environment() -> dict[str, str | None]:
    """Return the environment variables from which libraries read rank and world size, for workers; None means unset.

    Workers on other hosts have neither the rank's environment nor its process group, and may have those of another.
    """
    found = {name: os.environ.get(name) for name in _VARIABLES}
    if dist.is_available() and dist.is_initialized():
        found |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    return found
