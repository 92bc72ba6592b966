"""What every test is held to: nothing it started may outlive it."""

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

from headrace.executors.ray.idle import BENCH
from rays import is_rays, ray_actors, ray_runs
from scheduling import RAY, RayApart, group_of
from waiting import LIMIT_S, wait_for_reapers, wait_until

HELPERS = ("resource_tracker", "forkserver")  # multiprocessing's own, one each for the life of the test run


@pytest.fixture(scope="session", autouse=True)
def _standing_helpers() -> None:
    """Start what multiprocessing keeps for ever, so that the first test to need it is not blamed."""
    resource_tracker.ensure_running()
    # Or each worker imports torch anew, and each rank what examples and optimizers need, seconds apiece.
    forkserver.set_forkserver_preload(["headrace", "torch._dynamo", "sklearn.datasets"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # also for ranks, which are several on this machine
        forkserver.ensure_running()


@pytest.fixture(scope="module", autouse=True)
def _standing_objects() -> None:
    """Keep what stands already out of each test's collection of garbage, which would take a tenth of a second."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what needs Ray last, since no worker should be forked from a process full of its threads; before that what
    imports what makes a process large, plans' tests and integrations."""
    large = ("plan", "integrations")
    items.sort(key=lambda item: (item.get_closest_marker("ray") is not None, item.path.parent.name in large))
    for item in items:
        if item.get_closest_marker("ray") and group_of(item.nodeid) != RAY:
            raise pytest.UsageError(f"{item.nodeid} needs Ray: name it so, or no process is kept for it")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep one of three processes or more for Ray."""
    enough = config.getoption("dist") == "load" and (config.getoption("numprocesses") or 0) >= 3
    return RayApart(config, log) if enough else None


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """Start one Ray for all tests."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Workers must be able to import what tests hand them; and they are to start as fast as can be.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - that is its name
    ray: Any = importlib.import_module("ray")
    ray.init("local", num_cpus=8, include_dashboard=False, logging_level="WARNING", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("ray"):
        request.getfixturevalue("ray_here")
    before = _held()
    yield
    gc.collect()
    wait_for_reapers()
    if request.node.get_closest_marker("ray"):
        wait_until(lambda: len(ray_actors()) <= len(BENCH._idle))
    children = [child for child in psutil.Process().children(recursive=True) if not _is_helper(child)]
    _, alive = psutil.wait_procs(children, timeout=LIMIT_S)
    assert not alive, f"processes left behind: {alive}"
    with suppress(AssertionError):
        wait_until(lambda: not _held() - before, 2)  # others who test here have shared memory for moments, too
    left = _held() - before
    assert not left, f"left behind: {dict(left)}"


def _is_helper(process: psutil.Process) -> bool:
    try:
        return any(name in part for part in process.cmdline() for name in HELPERS) or is_rays(process)
    except psutil.NoSuchProcess:
        return True


def _held() -> Counter[str]:
    """Count the descriptors that can leak between processes, and the shared memory files, by kind."""
    held: Counter[str] = Counter()
    ray = ray_runs()
    if not sys.platform.startswith("linux"):
        return held
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:  # the one that lists the folder
            continue
        kind = target.split(":")[0]
        if ray and kind in ("socket", "pipe", "anon_inode"):  # Ray connects and disconnects as it likes
            continue
        if kind in ("socket", "pipe", "anon_inode") or target.startswith(("/memfd", "/dev/shm")):
            held[kind] += 1
    held["/dev/shm"] += len([path for path in Path("/dev/shm").glob("torch_*") if not _is_a_stranger_s(path)])
    held["/dev/shm"] += len(list(Path("/dev/shm").glob("psm_*")))
    return held


def _is_a_stranger_s(path: Path) -> bool:
    """Tell whether a file of torch's is that of a process that lives, and was not started here: others test, too."""
    try:
        creator = psutil.Process(int(path.name.split("_")[1]))
        return os.getpid() not in [creator.pid, *(parent.pid for parent in creator.parents())]
    except psutil.NoSuchProcess:
        return False
