"""How many more worker processes there is memory for."""

from collections.abc import Sequence

from headrace.system import world
from headrace.system.limits import free_memory, private_memory

_SHARE = 0.8
"""More workers may take this share of the free memory. The rest is for the trainer, and for larger batches to come."""


def workers_that_fit(more: int, pids: Sequence[int | None], slot_bytes: int) -> int:
    """Return how many of `more` workers there is memory for; all of them where the system does not tell.

    A new worker needs what the largest present one does not share with others, and its part of the shared memory of
    batches. All ranks on the machine may start workers at the same time, so each counts on an equal part.

    Args:
        more: The number of workers that may be started.
        pids: The processes of the present workers.
        slot_bytes: The shared memory of their batches, in bytes.
    """
    found = [size for pid in pids if pid is not None and (size := private_memory(pid)) is not None]
    free = free_memory()
    if not found or free is None:
        return more
    each = max(found) + slot_bytes // len(pids)
    return min(more, int(_SHARE * free / world.local_ranks() / max(1, each)))
