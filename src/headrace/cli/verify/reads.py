"""Records what a fetch reads that no seed determines: entropy, clocks, and the process, thread or host it runs in."""

import builtins
import datetime
import linecache
import multiprocessing
import os
import platform
import random
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

from headrace import errors


class Call(NamedTuple):
    """A call whose result no seed determines.

    Attributes:
        kind: "entropy", "clock", or "identity" (of the process, thread, worker or host).
        what: What it reads, in words.
        where: The line of the user's code that led to it.
    """

    kind: str
    what: str
    where: str


@contextmanager
def recorded(entered: Callable[[CodeType, Mapping[str, Any]], None] | None = None) -> Iterator[list[Call]]:
    """Record the calls in this thread, by any name, that read entropy, clocks, or an identity.

    Args:
        entered: Called with each function of the user's before it runs: its code, and the globals of its module.
    """
    calls: list[Call] = []

    def note(kind: str, what: str, frame: FrameType | None, direct: bool) -> None:
        while frame is not None and (frame.f_code in _PASSED or (not direct and of_library(frame.f_code.co_filename))):
            frame = frame.f_back
        if frame is not None and not of_library(frame.f_code.co_filename):
            file, line = frame.f_code.co_filename, frame.f_lineno
            source = linecache.getline(file, line).strip()
            call = Call(kind, what, f"{_shortened(file)}:{line} in {frame.f_code.co_name}: {source}")
            if call not in calls:
                calls.append(call)

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            kind_and_name = _builtin(argument)
            if kind_and_name:
                kind, what = kind_and_name
                note(kind, what, frame, direct=kind != "entropy")
        elif event == "call" and frame.f_code in _FUNCTIONS:
            kind, what, unseeded = _FUNCTIONS[frame.f_code]
            if unseeded is None or frame.f_locals.get(unseeded) is None:
                note(kind, what, frame.f_back, direct=kind != "entropy")
        elif event == "call" and entered is not None and not of_library(frame.f_code.co_filename):
            entered(frame.f_code, frame.f_globals)

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield calls
    finally:
        sys.setprofile(before)


_CLOCKS = (
    *("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time"),
    *("process_time_ns", "thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns"),
)
_CLOCKS_OR_GIVEN = ("ctime", "localtime", "gmtime", "strftime")

_BUILTINS: dict[Any, tuple[str, str]] = {
    os.urandom: ("entropy", "the system's entropy"),
    **{getattr(time, name): ("clock", f"the clock (time.{name})") for name in _CLOCKS if hasattr(time, name)},
    **{getattr(time, name): ("clock", f"the clock, unless given a time (time.{name})") for name in _CLOCKS_OR_GIVEN},
    os.times: ("clock", "the clock (os.times)"),
    os.getpid: ("identity", "the process's number (os.getpid)"),
    os.getppid: ("identity", "the number of the process's parent (os.getppid)"),
    threading.get_ident: ("identity", "the thread's number (threading.get_ident)"),
    threading.get_native_id: ("identity", "the thread's number (threading.get_native_id)"),
    socket.gethostname: ("identity", "the host's name (socket.gethostname)"),
    os.uname: ("identity", "the host's name (os.uname)"),
    os.getcwd: ("identity", "the current folder (os.getcwd)"),
    builtins.id: ("identity", "an address in memory (id)"),
    builtins.hash: ("identity", "a hash, which for text is another in each process (hash)"),
}

_FUNCTIONS: dict[CodeType, tuple[str, str, str | None]] = {
    # The last item is the argument that is None if the call is unseeded.
    random.Random.__init__.__code__: ("entropy", "the system's entropy (an unseeded random.Random)", "x"),
    random.Random.seed.__code__: ("entropy", "the system's entropy (random.seed without a seed)", "a"),
    random.SystemRandom.random.__code__: ("entropy", "the system's entropy", None),
    torch.random.seed.__code__: ("entropy", "the system's entropy (torch.seed)", None),
    get_worker_info.__code__: ("identity", "the worker (torch.utils.data.get_worker_info)", None),
    threading.current_thread.__code__: ("identity", "the thread (threading.current_thread)", None),
    multiprocessing.current_process.__code__: ("identity", "the process (multiprocessing.current_process)", None),
    multiprocessing.parent_process.__code__: ("identity", "the process (multiprocessing.parent_process)", None),
    platform.node.__code__: ("identity", "the host's name (platform.node)", None),
    Path.cwd.__func__.__code__: ("identity", "the current folder (os.getcwd)", None),  # type: ignore[attr-defined]
    type(os.environ).__getitem__.__code__: ("identity", "the environment (os.environ)", None),
}

_PASSED = {
    # Functions that only pass a request on.
    Mapping.get.__code__,
    os.getenv.__code__,
}


def _builtin(called: Any) -> tuple[str, str] | None:
    owner = getattr(called, "__self__", None)
    if isinstance(owner, torch.Generator) and called.__name__ == "seed":
        return "entropy", "the system's entropy (torch.Generator.seed)"
    if isinstance(owner, type) and issubclass(owner, datetime.date) and called.__name__ in ("now", "today", "utcnow"):
        return "clock", f"the clock ({owner.__name__}.{called.__name__})"
    try:
        return _BUILTINS.get(called)
    except TypeError:  # a method of something that cannot be hashed
        return None


def _folders(*files: str) -> tuple[str, ...]:
    """Return the folders both as given, as code imported from there names them, and with links resolved."""
    return tuple({f"{folder}{os.sep}" for file in files for folder in (file, str(Path(file).resolve()))})


_STANDARD = _folders(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_PACKAGES = _folders(*(str(Path(str(package.__file__)).parent) for package in (np, torch, errors)))


@lru_cache(None)
def of_library(file: str) -> bool:
    """Tell whether code is part of Python, numpy, torch or headrace: then its caller is to blame."""
    if file.startswith(("<", *_PACKAGES)):
        return True
    # Python's folder may contain the folder of all other packages.
    rest = [file.removeprefix(folder) for folder in _STANDARD if file.startswith(folder)]
    return any(not one.startswith(("site-packages", "dist-packages")) for one in rest)


def _shortened(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
