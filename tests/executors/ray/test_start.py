"""How Ray's actors start: before a loader needs them, few at a time, and without what they do not need yet."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from torch._utils import cpu_count
from torch.utils.data import Dataset

from comparable import flat
from executors.contract_datasets import Squares
from headrace import ClusterUnavailable, RayExecutor
from headrace.executors.dispatch import pool as dispatch_pool
from headrace.executors.ray import cluster as ray_cluster
from headrace.executors.ray import pool as ray_pool
from headrace.executors.ray.cluster import import_ray, starts_at_once
from headrace.executors.ray.idle import IDLE_ACTORS
from headrace.executors.ray.launch import actor_class
from rays import RAY, a_loader, ray_actors, undisturbed
from waiting import wait_until

ray_only = pytest.mark.ray


@pytest.fixture
def no_actors() -> Iterator[None]:
    """Begin and end without idle actors."""
    end_idle_actors()
    yield
    end_idle_actors()


def end_idle_actors() -> None:
    gc.collect()  # an error's traceback may hold a pool
    IDLE_ACTORS.clear()
    wait_until(lambda: not ray_actors())


def wait_for_starts() -> None:
    ray: Any = import_ray()
    calls = [one.last_call for one in IDLE_ACTORS._idle]
    assert len(ray.wait(calls, num_returns=len(calls), timeout=60)[0]) == len(calls)


def reads_with(loader: Any, pids: set[int]) -> bool:
    """Read an epoch; tell whether these processes were its workers."""
    return bool(list(loader)) and {peer.setup_result.pid for peer in loader._iterator._peers if peer.up} == pids


def squares(batches: Any) -> list[Any]:
    return [flat(batch["square"]) for batch in batches]


@ray_only
@pytest.mark.slow
@pytest.mark.usefixtures("no_actors")
def test_ray_actors_that_started_before_serve_the_next_loader() -> None:
    RAY.prestart(2)
    wait_for_starts()
    started = {actor.pid for actor in ray_actors()}
    RAY.prestart(1)
    RAY.prestart(2)  # they are there already
    assert len(IDLE_ACTORS._idle) == len(started) == 2
    loader = a_loader(Squares(), persistent_workers=True)
    assert squares(loader) == squares(undisturbed(Squares()))
    wait_until(partial(reads_with, loader, started))
    assert not IDLE_ACTORS._idle
    del loader
    replace(RAY, num_cpus=0.25).prestart(0)  # actors with other options may hold the resources that it needs
    wait_until(lambda: not ray_actors())


@ray_only
@pytest.mark.slow
@pytest.mark.usefixtures("no_actors")
def test_ray_actors_that_no_loader_takes_end() -> None:
    RAY.prestart(2, keep_s=0)
    assert len(IDLE_ACTORS._idle) <= 2
    wait_until(lambda: not IDLE_ACTORS._idle and not IDLE_ACTORS._handles)
    wait_until(lambda: not ray_actors())


@ray_only
@pytest.mark.slow
@pytest.mark.usefixtures("no_actors")
def test_ray_actors_that_died_before_a_loader_came_are_replaced() -> None:
    RAY.prestart(2)
    wait_for_starts()
    died = ray_actors()
    for actor in died:
        actor.kill()
    psutil.wait_procs(died, timeout=60)
    loader = a_loader(Squares())
    assert squares(loader) == squares(undisturbed(Squares()))


@ray_only
@pytest.mark.slow
@pytest.mark.usefixtures("no_actors")
def test_no_more_ray_actors_start_at_once_than_there_are_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_pool, "starts_at_once", lambda ray: 1)
    loader = a_loader(Squares(), num_workers=3, batch_size=1, persistent_workers=True)
    reader = iter(loader)
    pool: Any = reader._pool  # type: ignore[attr-defined]
    assert len(pool._peers) == 1
    (first,) = pool._peers
    IDLE_ACTORS.end(pool._head.job, first.actor)  # while it starts
    seen = [next(reader)]
    assert pool._peers[0] is not first
    assert squares([*seen, *reader]) == squares(undisturbed(Squares(), batch_size=1))
    most = 0
    while sum(peer.up for peer in pool._peers) < 3:
        pool._pump(0.05)
        most = max(most, sum(not peer.up for peer in pool._peers))
    assert most <= 1
    assert [peer.worker for peer in pool._peers] == [0, 1, 2]
    del reader, loader, pool, first
    again = iter(a_loader(Squares(), num_workers=3))
    pool = again._pool  # type: ignore[attr-defined]
    assert len(pool._peers) == 3  # idle actors need not start


@ray_only
def test_ray_actors_that_do_not_come_up_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others might come up elsewhere. Nor does the pool wait for any of them when it is closed."""
    monkeypatch.setattr(ray_pool, "starts_at_once", lambda ray: 1)
    monkeypatch.setattr(ray_pool, "_WARN_OF_FEW_S", 0.0)
    reader = iter(a_loader(Squares(), RayExecutor(num_cpus=1000, start_timeout_s=0.5, idle_s=0), num_workers=3))
    pool: Any = reader._pool  # type: ignore[attr-defined]
    assert len(pool._peers) == 1
    monkeypatch.setattr(dispatch_pool, "CHECK_WORKERS_S", 0.1)
    with pytest.raises(ClusterUnavailable, match="none of 3 Ray workers came up"):
        next(reader)
    assert len(pool._peers) == 3


@ray_only
def test_ray_nodes_of_this_machine_count_its_cpus_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ray: Any = import_ray()
    assert starts_at_once(ray) == min(8, cpu_count() or 1)
    monkeypatch.setattr(ray_cluster.platform, "node", lambda: "another machine")
    assert starts_at_once(ray) == 8


@ray_only
@pytest.mark.slow
def test_a_ray_actor_runs_before_it_imports_torch() -> None:
    """It is sent by value; what it imports, it imports with the garbage collector off."""
    cloudpickle: Any = __import__("ray.cloudpickle").cloudpickle
    script = (
        "import pickle, sys, gc\n"
        "kind = pickle.loads(sys.stdin.buffer.read())\n"
        "assert not {'torch', 'headrace', 'numpy'} & sys.modules.keys()\n"
        "actor = kind()\n"
        "assert {'torch', 'headrace.executors.ray.actor'} <= sys.modules.keys()\n"
        "assert not gc.isenabled() and gc.get_freeze_count()\n"
        "print(kind.__name__, actor.ready())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=cloudpickle.dumps(actor_class()), capture_output=True, check=False
    )
    assert done.stdout.split() == [b"Actor", b"None"], done.stderr.decode()


class Collecting(Dataset[Any]):
    """Tells whether the garbage collector is on."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return gc.isenabled()


@ray_only
@pytest.mark.parametrize("executor", [RAY, replace(RAY, shared_memory=False)], ids=["slots", "store"])
def test_the_garbage_collector_is_on_in_ray_workers(executor: RayExecutor) -> None:
    assert [flat(batch) for batch in a_loader(Collecting(), executor, batch_size=4)] == [[1] * 4] * 2


@ray_only
@pytest.mark.slow
@pytest.mark.usefixtures("no_actors")
def test_a_ray_node_that_cannot_import_headrace_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "headrace.py").write_text("raise ImportError('no such package on this node')\n")
    error: Any = import_ray().exceptions.RaySystemError
    executor = replace(RAY, runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}}, idle_s=0)
    loader = a_loader(Squares(), executor)
    with pytest.raises(error, match="no such package on this node"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (partial(RAY.prestart, "4"), TypeError, "num_workers='4' is not allowed: expected an integer >= 0"),
        (partial(RAY.prestart, True), TypeError, "num_workers=True is not allowed"),
        (partial(RAY.prestart, -1), ValueError, "num_workers=-1 is not allowed"),
        (
            partial(RAY.prestart, 4, keep_s=-1),
            ValueError,
            "keep_s=-1 is not allowed: expected a finite number, 0 or more",
        ),
        (partial(RAY.prestart, 4, keep_s="60"), TypeError, "keep_s='60' is not allowed"),
    ],
    ids=["text", "flag", "negative", "negative_time", "text_time"],
)
def test_wrong_arguments_of_prestart_are_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_numpys_numbers_become_pythons() -> None:
    executor = RayExecutor(num_cpus=np.float32(0.5), idle_s=np.int64(3), resources={"disk": np.int32(1)})
    assert [type(one) for one in (executor.num_cpus, executor.idle_s)] == [float, int]
    assert repr(executor.options["resources"]) == "{'disk': 1}"


@pytest.mark.ray
def test_a_key_that_ray_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match=r"runtime_env=\{'pipp': .* is not allowed: expected keys of .*'pip'"):
        next(iter(a_loader(Squares(), replace(RAY, runtime_env={"pipp": ["numpy"]}))))
