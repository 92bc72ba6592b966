"""What this process may use of its machine: CPUs and memory, by affinity and control groups, and its share of them.

Control groups of both versions count, and those that are above this process's own: limits of a container are often set
there.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headrace.system import world

_ROOT, _GROUPS, _MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")

_ACTIVE_PART = 2
"""Of the file cache that was used lately, one part in so many counts as free, as in Linux' own `MemAvailable`."""

_NO_LIMIT = 2**60
"""A limit of this many bytes or more is none: version 1 of control groups writes 2^63 less a page."""


def usable_cpus() -> float:
    """Return how many CPUs this process may use, together with others of its control group."""
    allowed, quota = len(affinity()), cpu_quota()
    return float(allowed) if quota is None else min(float(allowed), quota)


def rank_cpus() -> float:
    """Return how many CPUs this rank may use, if the ranks on its machine share them equally.

    CPUs that it does not share with the process that started it were given to this rank alone.
    """
    ranks, allowed, quota = world.local_ranks(), affinity(), cpu_quota()
    own = float(len(allowed)) if _is_pinned(allowed) else len(allowed) / ranks
    return own if quota is None else min(own, quota / ranks)


def affinity() -> set[int]:
    """Return the CPUs that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _is_pinned(allowed: set[int]) -> bool:
    with suppress(OSError, AttributeError):
        return allowed < os.sched_getaffinity(os.getppid())
    return False


def cpu_quota(root: Path = _ROOT, groups: Path = _GROUPS) -> float | None:
    """Return how many CPUs the control group may use; None where it has no limit, or there is none.

    Args:
        root: Where control groups are mounted.
        groups: The file that names this process's.
    """
    quotas = []
    for folder, unified in _folders("cpu", root, groups):
        with suppress(OSError, ValueError, ZeroDivisionError):
            if unified:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0:  # -1: no limit
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def free_memory(root: Path = _ROOT, groups: Path = _GROUPS, meminfo: Path = _MEMINFO) -> int | None:
    """Return how many bytes processes can still allocate on this machine and in its control group; None if unknown.

    The cache of files counts as free, since the system gives it up when memory is needed.

    Args:
        root: Where control groups are mounted.
        groups: The file that names this process's.
        meminfo: The file with the machine's memory.
    """
    rooms = []
    with suppress(OSError, StopIteration, ValueError):
        lines = meminfo.read_text().splitlines()
        rooms.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    for folder, unified in _folders("memory", root, groups):
        most, used = ("max", "current") if unified else ("limit_in_bytes", "usage_in_bytes")
        with suppress(OSError, ValueError):  # no limit is "max" in version 2
            limit = int((folder / f"memory.{most}").read_text())
            if limit < _NO_LIMIT:
                rooms.append(limit - int((folder / f"memory.{used}").read_text()) + _cache(folder, unified))
    return max(0, min(rooms)) if rooms else None


def private_memory(pid: int) -> int | None:
    """Return the bytes of a process that it shares with no other; None if the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
    return None


def _cache(folder: Path, unified: bool) -> int:
    """Return the bytes of a control group's memory that hold parts of files, as far as they count as free."""
    prefix = "" if unified else "total_"
    with suppress(OSError, ValueError):
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0)) // _ACTIVE_PART
    return 0


def _folders(controller: str, root: Path, groups: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control group and of those above it, and whether they are of version 2."""
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            number, names, path = line.split(":", 2)
            unified = number == "0" and not names
            if not unified and controller not in names.split(","):
                continue
            top = root if unified else root / controller
            folder = top / path.lstrip("/")
            yield folder, unified
            yield from ((parent, unified) for parent in folder.parents if parent.is_relative_to(top))
