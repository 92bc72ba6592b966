"""Doing the same for many shards, in several processes, with a line of progress."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from rich.console import Console
from torch._utils import cpu_count

from headrace.cli.terminal.screen import working
from headrace.errors import WorkerDied, whole_number

Result = TypeVar("Result")

MOST_JOBS = 512
"""The most processes that an option may ask for."""


def number_of_jobs(jobs: int | None) -> int:
    """Return the number of processes: the option `--jobs`, or one for each CPU.

    Raises:
        ValueError: It is < 1, or > `MOST_JOBS`.
    """
    return (
        cpu_count() or 1
        if jobs is None
        else whole_number("--jobs", jobs, low=1, high=MOST_JOBS, fix="Leave it out for one for each CPU.")
    )


def in_processes(
    function: Callable[..., Result],
    first: Sequence[Any],
    *others: Iterable[Any],
    jobs: int,
    what: str,
    console: Console,
) -> Iterator[Result]:
    """Yield what a function returns for each item, in order.

    Args:
        function: A forked process inherits it; for others it is pickled once.
        first: The first arguments of its calls.
        others: Its further arguments.
        jobs: How many processes.
        what: What is done, for the line of progress.
        console: Where the line is shown.

    Raises:
        WorkerDied: A process ended before it had returned.
    """
    # This process has no threads yet, so it may fork. A new interpreter would import torch first.
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    with (
        ProcessPoolExecutor(
            min(jobs, len(first)), context, initializer=_Called.begin, initargs=(function,)
        ) as processes,
        working(console, at_once=False) as show,
    ):
        try:
            for done, result in enumerate(processes.map(_Called.call, first, *others)):
                show(f"{what}: {done + 1:,} of {len(first):,}")
                yield result
        except BrokenProcessPool:
            raise WorkerDied(
                f"a process ended while it was {what}: by the system for lack of memory (then --jobs 1 helps), or by "
                "code that it called."
            ) from None


class _Called:
    """The function that a process calls."""

    function: Callable[..., Any]

    @classmethod
    def begin(cls, function: Callable[..., Any]) -> None:
        # Ctrl-C reaches all processes of a terminal. One that it ended here could leave a queue of the pool locked.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        cls.function = function

    @classmethod
    def call(cls, *arguments: Any) -> Any:
        return cls.function(*arguments)


def _end_with_parent() -> None:
    """End this process when the command's process is killed: nobody would fetch what it has done."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
