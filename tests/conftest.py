"""Fixtures for all tests: nothing that a test started may outlive it."""

import gc
import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from headrace.executors.ray.idle import IDLE_ACTORS
from rays import is_rays, ray_actors, ray_environment, ray_runs
from scheduling import RAY, RayApart, group_of
from scripts import ScriptServer
from waiting import LIMIT_S, wait_for_reapers, wait_until

settings.register_profile("headrace", deadline=None, derandomize=True)  # a busy machine breaks any deadline
settings.load_profile("headrace")

SERVERS: set[int] = set()
"""The pids of processes that serve the whole test run."""


@pytest.fixture(scope="session", autouse=True)
def _standing_helpers() -> None:
    """Start the processes that multiprocessing never ends, or the first test that needs one would fail."""
    resource_tracker.ensure_running()
    # Or each worker imports torch anew, and each rank what examples and optimizers need, seconds apiece.
    forkserver.set_forkserver_preload(["headrace.public", "torch._dynamo", "sklearn.datasets"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # also for ranks, which are several on this machine
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def scripts() -> Iterator[ScriptServer]:
    """Start the server that scripts are forked from."""
    server = ScriptServer()
    SERVERS.add(server.pid)
    yield server
    server.close()


@pytest.fixture(scope="module", autouse=True)
def _standing_objects() -> None:
    """Exclude existing objects from each test's garbage collection, which would take 0.1 s."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what needs Ray last, since no worker should be forked from a process full of its threads; before that plans'
    tests and integrations, which import much: forking a large process takes long."""
    large = ("plan", "integrations")
    items.sort(key=lambda item: (item.get_closest_marker("ray") is not None, item.path.parent.name in large))
    for item in items:
        if item.get_closest_marker("ray") and group_of(item.nodeid) != RAY:
            raise pytest.UsageError(f"{item.nodeid} needs Ray: name it so, or no process is kept for it")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Reserve one of three or more test processes for Ray."""
    enough = config.getoption("dist") == "load" and (config.getoption("numprocesses") or 0) >= 3
    return RayApart(config, log) if enough else None


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """Start one Ray for all tests."""
    os.environ.update(ray_environment())
    ray: Any = importlib.import_module("ray")
    ray.init("local", num_cpus=8, include_dashboard=False, logging_level="WARNING", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("ray"):
        request.getfixturevalue("ray_here")
    last, descriptors, shared = _last_process(), _descriptors(), _shared_memory()
    yield
    gc.collect()
    wait_for_reapers()
    if request.node.get_closest_marker("ray"):
        wait_until(lambda: len(ray_actors()) <= len(IDLE_ACTORS._idle))
    if not last or _last_process() != last:
        _, alive = psutil.wait_procs(_children(), timeout=LIMIT_S)
        assert not alive, f"processes left behind: {alive}"
    with suppress(AssertionError):
        wait_until(lambda: not _descriptors() - descriptors)
    assert not (left := _descriptors() - descriptors), f"descriptors left behind: {dict(left)}"
    made = {name for name in _shared_memory() - shared if not _is_of_others(name)}
    with suppress(AssertionError):  # the files of other test runs go in their own time
        wait_until(lambda: not made & _shared_memory())
    assert not (made & _shared_memory()), f"shared memory left behind: {made & _shared_memory()}"


def _last_process() -> str:
    """Return the number of the process or thread that the system started last; "" if it is unknown."""
    try:
        return Path("/proc/loadavg").read_text().split()[-1]
    except OSError:
        return ""


def _children() -> list[psutil.Process]:
    """Return the child processes, except those that serve the whole run."""
    servers = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid, *SERVERS}
    started = psutil.Process().children(recursive=True)
    return [child for child in started if child.pid not in servers and not _is_rays(child)]


def _is_rays(process: psutil.Process) -> bool:
    try:
        return is_rays(process)
    except psutil.NoSuchProcess:
        return True


def _descriptors() -> Counter[str]:
    """Count the open descriptors that can leak between processes, by kind."""
    held: Counter[str] = Counter()
    if not sys.platform.startswith("linux"):
        return held
    kinds = () if ray_runs() else ("socket", "pipe", "anon_inode")  # Ray connects and disconnects as it likes
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the one that lists the folder
            continue
        kind = target.split(":")[0]
        if kind in kinds or target.startswith(("/memfd", "/dev/shm")):
            held[kind] += 1
    return held


def _shared_memory() -> set[str]:
    """Return the names of torch's and Python's shared memory files."""
    names = os.listdir("/dev/shm") if sys.platform.startswith("linux") else []
    return {name for name in names if name.startswith(("torch_", "psm_"))}


def _is_of_others(name: str) -> bool:
    """Tell whether a file belongs to a living process that was not started here, such as another test run."""
    kind, number, *_ = name.split("_")
    try:
        creator = psutil.Process(int(number)) if kind == "torch" else psutil.Process()
        return os.getpid() not in [creator.pid, *(parent.pid for parent in creator.parents())]
    except psutil.NoSuchProcess:
        return False
