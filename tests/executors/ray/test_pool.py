"""Ray's own: actors that die, stall or do not come, what cannot travel, and what is left behind."""

import importlib
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import headrace
from comparable import flat
from executors.contract_datasets import Squares, refuse
from executors.mortal_datasets import Mortal
from headrace import ClusterUnavailable, DataLoader, Deferred, MissingExtra, RayExecutor, WorkerDied
from headrace.executors.dispatch import rules
from headrace.executors.ray import actor as ray_actor
from headrace.executors.ray import cluster as ray_cluster
from headrace.executors.ray import listener as ray_listener
from headrace.executors.ray import pool as ray_pool
from headrace.executors.ray.idle import IDLE_ACTORS
from rays import PLANES, RAY, a_loader, ray_actors, undisturbed
from waiting import wait_until

planes = pytest.mark.parametrize("executor", PLANES.values(), ids=PLANES.keys())
needs_ray = pytest.mark.ray

pytestmark = pytest.mark.filterwarnings("ignore:epoch 0 was abandoned")


@needs_ray
@planes
@pytest.mark.parametrize("size", [4, 40_000])
def test_workers_that_die_are_not_seen(executor: RayExecutor, size: int, tmp_path: Path) -> None:
    """In whatever way: the batches, small ones or in slots, are those that would have come."""
    loader = a_loader(Mortal(tmp_path, ends=[7, 20], size=size), executor)
    assert [flat(batch) for batch in loader] == undisturbed(Mortal(tmp_path, size=size))
    assert loader.stats().restarts == 2


@needs_ray
@planes
@pytest.mark.parametrize("how", ["exit", "leave", "close"])
def test_workers_that_end_themselves(executor: RayExecutor, how: str, tmp_path: Path) -> None:
    if how == "leave" and executor is RAY:
        executor = replace(executor, idle_s=0)  # SystemExit ends an actor by and by
    loader = a_loader(Mortal(tmp_path, ends=[7], how=how), executor)
    assert [flat(batch) for batch in loader] == undisturbed(Mortal(tmp_path))


@needs_ray
def test_a_worker_that_sends_what_is_no_answer_is_replaced(tmp_path: Path) -> None:
    loader = a_loader(Mortal(tmp_path, ends=[7], how="scribble"), RAY)
    with pytest.warns(UserWarning, match=r"worker \d \(pid \d+ on .* sent what is no answer") as told:
        assert [flat(batch) for batch in loader] == undisturbed(Mortal(tmp_path))
    assert len(told) == loader.stats().restarts == 1


@needs_ray
@planes
def test_a_task_that_ends_every_worker_is_named(
    executor: RayExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "MOST_DEATHS", 3)
    loader = a_loader(Mortal(tmp_path, ends=[7], times=99), executor)
    reader = iter(loader)
    assert [next(reader)["index"].tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(WorkerDied) as caught:
        next(reader)
    assert any("samples [6, 7, 8]) ended 3 workers" in line for line in caught.value.__notes__)
    assert next(reader)["index"].tolist() == [9, 10, 11]


@needs_ray
@planes
def test_a_worker_that_stalls_is_helped_out(executor: RayExecutor, tmp_path: Path) -> None:
    """Stopped processes are what a node that was lost looks like, until Ray finds out after 14 s."""
    loader = a_loader(Mortal(tmp_path, ends=[16], how="SIGSTOP"), executor, num_workers=3)
    try:
        assert [flat(batch) for batch in loader] == undisturbed(Mortal(tmp_path))
        assert loader.stats().restarts == 0
    finally:
        stopped = [one for one in ray_actors() if one.status() == psutil.STATUS_STOPPED]
        for process in stopped:
            process.kill()
    assert len(stopped) == 1


def squares() -> list[Any]:
    return [batch["square"] for batch in undisturbed(Squares())]


@needs_ray
def test_time_that_the_rank_spends_elsewhere_is_no_waiting() -> None:
    """Nobody looked: that says nothing about the workers, nor about the head."""
    loader = a_loader(Squares(), persistent_workers=True)
    reader = iter(loader)
    pool: Any = reader._pool  # type: ignore[attr-defined]
    for away in (pool, pool._head):
        for clock in ("_started_s", "_observed_s", "_checked_s", "_looked_s", "_asked_s", "_seen_s"):
            if hasattr(away, clock):
                setattr(away, clock, getattr(away, clock) - 1000)
    assert [batch["square"].tolist() for batch in reader] == squares()


@needs_ray
def test_a_worker_that_finds_the_door_shut_goes_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that runs as another user."""
    monkeypatch.setattr(ray_listener.os, "getuid", lambda: 12345)
    monkeypatch.setattr(ray_listener, "_ROOT", 12345)
    loader = a_loader(Squares())
    assert [batch["square"].tolist() for batch in loader] == squares()
    assert loader.stats().restarts == 0


class Refused:
    """An index that nobody can pickle, or nobody unpickle."""

    def __init__(self, at: str) -> None:
        self.at = at

    def __reduce__(self) -> Any:
        if self.at == "rank":
            raise TypeError("it stays here")
        return int, ("no number",)


@needs_ray
@pytest.mark.parametrize("at", ["rank", "worker"])
@pytest.mark.parametrize("executor", [RAY, "process"])
def test_an_index_that_cannot_travel_is_the_error_of_its_batch_alone(executor: Any, at: str) -> None:
    indices: Any = [*range(8), Refused(at), *range(8, 12)]
    reader = iter(DataLoader(Squares(), batch_size=None, sampler=indices, num_workers=2, executor=executor))
    seen: list[Any] = []
    with pytest.raises(TypeError if at == "rank" else ValueError):
        seen += (batch["square"][1].item() for batch in reader)
    seen += (batch["square"][1].item() for batch in reader)
    assert len(seen) == (11 if at == "rank" else 12), "a sampler's error takes the place of the batch that was next"
    assert seen == [number for number in range(12) if number in seen]


@needs_ray
def test_without_hedging_a_stall_is_waited_for(tmp_path: Path) -> None:
    loader = a_loader(Mortal(tmp_path, ends=[16], how="SIGSTOP"), replace(RAY, hedge=False), timeout=2)
    reader = iter(loader)
    seen: list[list[int]] = []
    with pytest.raises(headrace.DeliveryTimeout) as caught:
        seen.extend(batch["index"].tolist() for batch in reader)
    assert any("(samples [15, 16, 17])" in line for line in caught.value.__notes__)
    for process in ray_actors():
        if process.status() == psutil.STATUS_STOPPED:
            process.kill()
    seen.extend(batch["index"].tolist() for batch in reader)
    assert seen == [[*range(first, first + 3)] for first in range(0, 30, 3)]


class Numbers(IterableDataset[int]):
    """Yields numbers; worker 1 may end at one of them."""

    def __init__(self, ends_at: int = -1) -> None:
        self.ends_at = ends_at

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for number in range(info.id, 40, info.num_workers):
            if number == self.ends_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield number


@needs_ray
@planes
def test_streams_end_with_their_worker(executor: RayExecutor) -> None:
    """Nobody else knows what was read."""
    expected = [batch.tolist() for batch in TorchLoader(Numbers(), batch_size=3, num_workers=2)]
    assert [flat(batch) for batch in a_loader(Numbers(), executor, seed=None)] == expected
    with pytest.raises(WorkerDied, match="worker 1"):
        list(a_loader(Numbers(ends_at=21), executor))


class Drawing(Dataset[Any]):
    """Samples that draw."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), headrace.rng().random()


@needs_ray
@planes
@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_sampler_draws_is_computed_anywhere(executor: RayExecutor, workers: int) -> None:
    """Its random numbers hang on the task, not on the worker."""
    batches = [[5, 3, 5], [0], [20, 21, 22, 23], [7, 7]]
    torch.manual_seed(8)
    seen = flat(
        list(a_loader(Drawing(), executor, batch_size=1, batch_sampler=batches, num_workers=workers, seed=None))
    )
    torch.manual_seed(8)
    again = flat(list(a_loader(Drawing(), RAY, batch_size=1, batch_sampler=batches, seed=None)))
    assert seen == again
    assert [batch[0] for batch in seen] == batches
    draws = [draw for batch in seen for draw in batch[1] + batch[2]]
    assert len(set(draws)) == 20


@needs_ray
def test_dead_workers_of_a_sampler_are_replaced(tmp_path: Path) -> None:
    batches = [[number, number + 1] for number in range(0, 30, 2)]
    loader = a_loader(Mortal(tmp_path, ends=[8]), batch_size=1, batch_sampler=batches, seed=None)
    assert [batch["index"].tolist() for batch in loader] == batches
    assert loader.stats().restarts == 1


@needs_ray
def test_a_dataset_that_cannot_travel_is_named() -> None:
    dataset = Squares()
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TypeError) as caught:
        iter(a_loader(dataset))
    assert "dataset.lock is a _thread.lock" in caught.value.__notes__[-1]
    assert "Deferred" in caught.value.__notes__[-1]


@needs_ray
def test_lambdas_and_local_classes_travel() -> None:
    class Local(Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            return {"index": index, "local": Local}

    first = next(iter(a_loader(Local(), collate_fn=lambda samples: samples[0])))
    assert first == {"index": 0, "local": Local}


class Unloadable(Squares):
    """Refuses to be unpickled in a worker."""

    def __setstate__(self, state: Any) -> None:
        raise ModuleNotFoundError("No module named 'only_here'", name="only_here")

    def __getstate__(self) -> Any:
        return {"some": "state"}


@needs_ray
@planes
def test_what_a_worker_cannot_load_is_an_error_that_says_what_to_do(executor: RayExecutor) -> None:
    with pytest.raises(ModuleNotFoundError, match="only_here") as caught:
        next(iter(a_loader(Unloadable(), executor)))
    assert any("unpickling the dataset" in line for line in caught.value.__notes__)
    assert any("runtime_env" in line for line in caught.value.__notes__)


@needs_ray
@planes
def test_a_hook_that_raises_is_an_error_at_the_first_batch(executor: RayExecutor) -> None:
    with pytest.raises(RuntimeError, match="refuses"):
        next(iter(a_loader(Squares(), executor, worker_init_fn=refuse)))


@needs_ray
def test_other_versions_on_a_node_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ray_pool.versions() | {"torch": "1.0.0"}
    monkeypatch.setattr(ray_pool, "versions", lambda: mine)
    with pytest.raises(ClusterUnavailable) as caught:
        next(iter(a_loader(Squares())))
    assert "torch 1.0.0" in str(caught.value)
    assert f"torch {torch.__version__.partition('+')[0]}" in str(caught.value)


@needs_ray
def test_a_cluster_without_room_is_an_error() -> None:
    executor = RayExecutor(num_cpus=1000, start_timeout_s=1.5)
    with pytest.raises(
        ClusterUnavailable, match=r"none of 2 Ray workers came up within 1.5 s: each needs 1000 CPU; .* of 8 CPU"
    ):
        next(iter(a_loader(Squares(), executor)))


@needs_ray
def test_a_cluster_with_little_room_gives_what_it_has(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(ray_pool, "_WARN_OF_FEW_S", 0.0)
    loader = a_loader(Squares(), RayExecutor(num_cpus=6, idle_s=0), batch_size=1, persistent_workers=True)
    batches = [flat(batch["square"]) for batch in loader]
    assert batches == [flat(batch["square"]) for batch in undisturbed(Squares(), batch_size=1)]
    wait_until(lambda: bool(list(loader)) and loader._iterator._few_warned)
    assert any("1 of 2 Ray workers have come up: each needs 6 CPU" in str(one.message) for one in recwarn)


@needs_ray
def test_a_large_dataset_is_warned_about_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "LARGE_BYTES", 2**20)
    dataset = torch.utils.data.TensorDataset(torch.zeros(3, 2**18))
    with pytest.warns(UserWarning, match=r"takes 3 MiB when it is pickled.*headrace.Deferred\(factory\)"):
        assert len(list(a_loader(dataset))) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        length = a_loader(Deferred(lambda: torch.utils.data.TensorDataset(torch.ones(3, 2**18)), length=3))
        assert next(iter(length))[0].shape == (3, 2**18)


@needs_ray
def test_actors_go_when_nobody_needs_them() -> None:
    IDLE_ACTORS.clear()
    wait_until(lambda: not ray_actors())
    assert len(list(a_loader(Squares(), replace(RAY, idle_s=0)))) == 13
    wait_until(lambda: not ray_actors())
    loader = a_loader(Squares(), replace(RAY, idle_s=0.5), persistent_workers=True)
    list(loader)
    assert ray_actors()
    del loader
    wait_until(lambda: not ray_actors())


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r'executor="ray" needs Ray: pip install "headrace\[ray\]"'):
        iter(a_loader(Squares(), RayExecutor()))


def test_a_client_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(MissingExtra, match=r'needs Ray and its client: pip install "headrace\[ray-client\]"'):
        iter(a_loader(Squares(), RayExecutor(address="ray://127.0.0.1:1")))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_where_nobody_listens_is_an_error_at_once(address: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ClusterUnavailable, match="there is no Ray cluster at"):
            iter(a_loader(Squares(), RayExecutor(address=address)))


@needs_ray
def test_a_cluster_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is still in Ray's file where its head was killed."""
    services = importlib.import_module("ray._private.services")
    found: Any = services.get_ray_address_from_environment
    ends = [socket.socket(), socket.socket()]
    for end in ends:
        end.bind(("127.0.0.1", 0))
    ends[0].listen()
    lives, ended = (f"127.0.0.1:{end.getsockname()[1]}" for end in ends)
    for address, expected in ((lives, False), (ended, True), (None, False)):
        monkeypatch.setattr(services, found.__name__, lambda *_, address=address: address)
        assert ray_cluster._has_ended() == expected
    monkeypatch.setattr(services, found.__name__, Mock(side_effect=ConnectionError("there is none")))
    assert not ray_cluster._has_ended()
    monkeypatch.delattr(services, found.__name__)
    assert not ray_cluster._has_ended()
    for end in ends:
        end.close()


@needs_ray
def test_another_cluster_than_the_one_joined_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has joined the Ray cluster at .* Leave the address out"):
        iter(a_loader(Squares(), RayExecutor(address="127.0.0.1:1")))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_cpus": -1}, ValueError, "num_cpus=-1 is not allowed: expected a finite number, 0 or more"),
        ({"num_cpus": "2"}, TypeError, "num_cpus='2' is not allowed"),
        ({"start_timeout_s": 0}, ValueError, "start_timeout_s=0 is not allowed: expected a finite number, more than 0"),
        ({"idle_s": float("nan")}, ValueError, "idle_s=nan is not allowed"),
        ({"address": 8}, TypeError, "address=8 is not allowed"),
        ({"resources": [1]}, TypeError, "resources="),
        ({"hedge": 1}, TypeError, "hedge=1 is not allowed: expected True or False"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        RayExecutor(**options)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="address='nonsense' is not allowed"):
        iter(a_loader(Squares(), RayExecutor(address="nonsense")))
