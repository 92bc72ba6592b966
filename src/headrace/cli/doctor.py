"""`headrace doctor`: what this machine offers a loader, and what limits it."""

import multiprocessing
import os
import platform
import resource
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from headrace.errors import pip_install
from headrace.system import world
from headrace.system.limits import free_memory, usable_cpus
from headrace.version import __version__

_FEW_FILES = 1024
"""Fewer open files than these may be too few for many workers and shards."""

_PACKAGES = {
    "ray": ('executor="ray"', "ray"),
    "pillow": ("pictures in shards", "images"),
    "simplejpeg": ("JPEGs in shards, decoded faster", "jpeg"),
    "zstandard": ("shards compressed by zstd", "zstd"),
}
"""Optional packages: what each is for, and the extra that installs it."""


class Finding(NamedTuple):
    """Something about the machine.

    Attributes:
        topic: What it is about.
        value: What was found.
        advice: What to do about it; "" where nothing has to be done.
    """

    topic: str
    value: str
    advice: str = ""


def findings() -> list[Finding]:
    """Return what was found. Nothing is started, and no device is used."""
    return [*_versions(), *_workers(), *_limits(), *_accelerator()]


def run_doctor(console: Console) -> None:
    """Print what was found, and then the advice."""
    found = findings()
    table = Table(show_header=False, box=None, pad_edge=False)
    for one in found:
        table.add_row(one.topic, one.value)
    console.print(table)
    for one in found:
        if one.advice:
            console.print(f"\n{one.topic}: {one.advice}")


def _versions() -> Iterator[Finding]:
    yield Finding("headrace", __version__)
    yield Finding("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Finding("torch", torch.__version__)  # which names its build, unlike that of the package
    yield Finding("numpy", version("numpy"))
    for package, (use, extra) in _PACKAGES.items():
        try:
            yield Finding(package, version(package))
        except PackageNotFoundError:
            yield Finding(package, f"not installed; for {use}: {pip_install(extra)}")


def _workers() -> Iterator[Finding]:
    methods = multiprocessing.get_all_start_methods()
    yield Finding("processes start by", f"{multiprocessing.get_start_method(allow_none=True) or methods[0]} by default")
    shared = "anonymous memory files" if hasattr(os, "memfd_create") else "unlinked temporary files"
    yield Finding("shared memory", f"{shared}; /dev/shm is not needed")
    set_here = world.environment()
    if set_here.get("WORLD_SIZE"):
        ranks = ", ".join(f"{name}={value}" for name, value in set_here.items() if value)
        advice = "Without a process group each loader reads the share that these variables name, with a warning."
        yield Finding("ranks", ranks, advice)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads and threads != "1":
        advice = "Each worker process uses one torch thread all the same; the training process uses so many."
        yield Finding("OMP_NUM_THREADS", threads, advice)


def _limits() -> Iterator[Finding]:
    cores, usable = os.cpu_count() or 1, usable_cpus()
    advice = ""
    if usable < cores:
        advice = f"The machine has {cores}. More than {max(1, int(usable))} busy workers only wait for each other."
    yield Finding("CPUs", f"{usable:g}", advice)
    room = free_memory()
    if room is not None:
        yield Finding("memory", f"{room / 2**30:.1f} GiB left on the machine and in its control group")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = (
        "" if files == resource.RLIM_INFINITY or files >= _FEW_FILES else "Raise it for many workers: ulimit -n 4096."
    )
    yield Finding("open files", _shown(files), advice)
    yield Finding("locked memory", _shown(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], 1024, " KiB"))


def _accelerator() -> Iterator[Finding]:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        yield Finding("accelerator", "none")
        return
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    advice = ""
    if locked != resource.RLIM_INFINITY:
        advice = (
            "If slots cannot be registered as pinned memory, raise the limit of locked memory: ulimit -l unlimited."
        )
    yield Finding("accelerator", f"{torch.accelerator.device_count()} x {found.type}", advice)


def _shown(limit: int, unit: int = 1, name: str = "") -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit // unit:,}{name}"
