"""What a worker process is doing: it writes its threads' stacks into memory when it gets a signal, even if it hangs."""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

_NAME = "headrace-stacks"
"""The name of the memory, by which it is found among the process's descriptors."""

_LIMIT_S = 2.0
"""Time limit for a process to write its stacks, in seconds; a process that is stopped writes none."""

_POLL_S = 0.02
"""The time between two looks, in seconds. What has not grown in between is complete."""

_file: Any = None
"""This process's memory, once `write_when_asked` was called."""


def _signal() -> int:
    # A real-time signal: programs use SIGUSR1 and SIGUSR2 for other things.
    return signal.SIGRTMIN + 9


def write_when_asked() -> None:
    """Write this process's stacks whenever `stacks_of` asks for them; only on Linux."""
    global _file  # noqa: PLW0603 - one for each process
    if _file is None and sys.platform == "linux":
        with suppress(OSError):  # no descriptor is left: then nobody can ask
            _file = os.fdopen(os.memfd_create(_NAME, os.MFD_CLOEXEC), "wb", buffering=0)
            faulthandler.register(_signal(), _file, all_threads=True)


def stacks_of_workers(workers: Iterable[tuple[object, int | None]]) -> list[str]:
    """Return the stacks of workers that tell, each below the worker's name.

    Args:
        workers: Each worker, and its process's number.
    """
    return [f"{worker}:\n{text}" for worker, pid in workers if (text := stacks_of(pid))]


def stacks_of(pid: int | None) -> str:
    """Ask a process of this machine for the stacks of its threads.

    Returns:
        The stacks, as `faulthandler` writes them; "" if the process does not tell: it is stopped, has ended, belongs to
        another user, or does not run on Linux.
    """
    if pid is None or (memory := _memory_of(pid)) is None:
        return ""
    with suppress(OSError):
        before = memory.stat().st_size
        os.kill(pid, _signal())
        deadline, size = time.monotonic() + _LIMIT_S, before
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            last, size = size, memory.stat().st_size
            if size == last > before:
                break
        return memory.read_bytes()[before:].decode(errors="replace").strip()
    return ""


def _memory_of(pid: int) -> Path | None:
    with suppress(OSError):  # the process has ended, or is another user's
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if os.readlink(descriptor).startswith(f"/memfd:{_NAME}"):
                    return descriptor
    return None
