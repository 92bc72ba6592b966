"""`get_worker_info` for threads: torch keeps one info per process, and each worker thread needs its own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker

from headrace.executors.thread.compute_lock import this_thread


def patch_get_worker_info() -> None:
    """Make torch's `get_worker_info` return the info of the calling thread, if it has one.

    Users import the function by name, usually before this runs. Therefore its code is replaced instead of the name.
    """
    vars(torch_worker)["_headrace_info"] = _info
    torch_worker.get_worker_info.__code__ = _get_worker_info.__code__


@contextmanager
def worker_info(info: Any) -> Iterator[None]:
    """Make `get_worker_info` return `info` in this thread."""
    before = this_thread.info
    this_thread.info = info
    try:
        yield
    finally:
        this_thread.info = before


def _get_worker_info() -> Any:
    return _headrace_info(_worker_info)  # type: ignore[name-defined]  # noqa: F821 - torch's module has both


def _info(of_process: Any) -> Any:
    # Torch's collation asks in order to collate into shared memory, which threads do not need.
    asked_by = sys._getframe(2).f_globals.get("__name__")
    own = None if asked_by == default_collate.__module__ else this_thread.info
    return of_process if own is None else own
