"""Loaders whose workers become more and fewer by themselves, in a time that the tests tell. Not a bit changes."""

import itertools
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comparable import flat
from executors.mortal_datasets import Mortal
from headrace import DataLoader
from headrace.cli.factory.remake import remade
from headrace.cli.tune.measuring import Subject
from headrace.delivery import growth, reader
from headrace.executors.process import pool as process_pool
from headrace.executors.process import room
from headrace.loader import readers
from headrace.tuning.settings import Setting
from launch import run_ranks
from rays import RAY, undisturbed
from waiting import wait_until

JOB = Path(__file__).parent / "growth_job.py"

WORKERS = [
    pytest.param({"multiprocessing_context": "fork"}, id="fork"),
    pytest.param({"executor": RAY}, id="ray", marks=[pytest.mark.ray, pytest.mark.slow]),
]


class Clock:
    """The reader's time: it goes on by a step each time it is asked for, and when it is told."""

    def __init__(self) -> None:
        self.now_s, self.step_s = 1.0, 1.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reader, "perf_counter", made)
    monkeypatch.setattr(readers, "rank_cpus", lambda: 64.0)
    return made


def a_loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": 3, "num_workers": 1, "max_workers": 4, "seed": 3} | options)


def read(batches: Any, clock: Clock, own_s: float = 0.0) -> Iterator[Any]:
    """Read on. The workers are as fast as there are many, and a batch is read when all of them are up.

    Args:
        batches: The reader.
        clock: Its time.
        own_s: The trainer's own time for a step, in seconds.
    """
    pool = batches._pool
    while True:
        wait_until(lambda: pool.poll() or pool.up == pool.workers)
        clock.step_s = 1 / pool.workers
        clock.now_s += own_s
        try:
            yield flat(next(batches))
        except StopIteration:
            return


@pytest.mark.parametrize("workers", WORKERS)
def test_more_while_the_trainer_waits_and_fewer_when_it_gets_slow(
    workers: dict[str, Any], clock: Clock, tmp_path: Path
) -> None:
    """Workers are killed on the way, as soon as there are more, and once again when there are fewer."""
    dataset = Mortal(tmp_path, [30, 500], length=1_800)
    loader = a_loader(dataset, **workers)
    batches: Any = iter(loader)
    pool = batches._pool
    found, sizes = [], [1]
    for batch in read(batches, clock):
        found.append(batch)
        if pool.workers != sizes[-1]:
            sizes.append(pool.workers)
            if "executor" not in workers:
                os.kill(pool._peers[0].process.pid, signal.SIGKILL)
        if pool.workers == 4:
            break
    assert sizes == [1, 2, 4]
    assert loader.stats().workers == 4
    for batch in read(batches, clock, own_s=1000.0):
        found.append(batch)
        if pool.workers != sizes[-1]:
            sizes.append(pool.workers)
    assert sizes == [1, 2, 4, 2, 1]
    assert found == undisturbed(Mortal(tmp_path, length=1_800))
    assert loader.num_workers == 1
    assert loader.stats().restarts >= 2


def grown(loader: DataLoader[Any], clock: Clock, number: int = 4) -> Any:
    """Read until there are so many workers; return the reader."""
    batches: Any = iter(loader)
    for _ in read(batches, clock):
        if loader.stats().workers == number:
            return batches
    raise AssertionError(f"there were never {number} workers")


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_all_get_more(tmp_path: Path) -> None:
    """In real time: each rank waits for the slowest one in every step, and that one waits for its workers."""
    found = run_ranks(JOB, 2, tmp_path)
    assert [rank["same"] for rank in found] == [True, True]
    assert [rank["fewest"] >= 2 for rank in found] == [True, True]
    assert found[0]["epochs"] == found[1]["epochs"]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_next_epoch_goes_on_with_the_number_that_was_found(persistent: bool, clock: Clock, tmp_path: Path) -> None:
    loader = a_loader(Mortal(tmp_path, length=300), persistent_workers=persistent)
    list(read(grown(loader, clock), clock))
    batches: Any = iter(loader)
    assert len(batches._pool._peers) == loader.stats().workers == 4
    assert len(batches._window._futures) == 8
    assert loader.num_workers == 1


def test_a_copy_begins_anew(clock: Clock, tmp_path: Path) -> None:
    loader = a_loader(Mortal(tmp_path, length=300))
    grown(loader, clock)
    copied = pickle.loads(pickle.dumps(loader))
    assert copied.max_workers == 4
    assert len(iter(copied)._pool._peers) == 1


def test_the_user_says_where_it_goes_on_from(clock: Clock, tmp_path: Path) -> None:
    loader = a_loader(Mortal(tmp_path, length=900), num_workers=2, max_workers=6)
    loader.resize_workers(3)
    batches: Any = iter(loader)
    assert loader.stats().workers == 3
    next(batches)
    loader.resize_workers(5)
    assert loader.stats().workers == 5
    for _ in read(batches, clock):
        if loader.stats().workers == 6:
            break
    assert loader.stats().workers == 6
    for wrong in (1, 7):
        with pytest.raises(ValueError, match=rf"workers={wrong} is not allowed: expected an integer in \[2, 6\]"):
            loader.resize_workers(wrong)


def test_no_growth_without_room(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def no_room(more: int, pids: Any, slot_bytes: int) -> int:
        asked.append((more, len(pids)))
        return 0

    monkeypatch.setattr(process_pool, "workers_that_fit", no_room)
    loader = a_loader(Mortal(tmp_path, length=300))
    assert len(list(read(iter(loader), clock))) == 100
    assert asked[0] == (1, 1)
    assert len(asked) < 5


def test_a_system_that_refuses_processes_stops_growth_and_not_the_epoch(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loader = a_loader(Mortal(tmp_path, length=300))
    batches: Any = iter(loader)
    start, refused = batches._pool._start, []

    def refuses(worker: int, *rest: Any) -> Any:
        if worker:
            refused.append(worker)
            raise OSError(24, "Too many open files")
        return start(worker, *rest)

    monkeypatch.setattr(batches._pool, "_start", refuses)
    assert list(read(batches, clock)) == undisturbed(Mortal(tmp_path, length=300))
    assert 1 <= len(refused) <= 4, "it is tried again, and less and less often"


class WaitsToStart:
    """A `worker_init_fn`: all workers but the first start when a gate is opened."""

    def __init__(self) -> None:
        self.gate, self.opener = os.pipe()

    def __call__(self, worker_id: int) -> None:
        if worker_id:
            os.read(self.gate, 1)

    def open(self, workers: int) -> None:
        os.write(self.opener, b"." * workers)

    def close(self) -> None:
        os.close(self.gate)
        os.close(self.opener)


def test_workers_that_have_not_started_are_no_evidence(clock: Clock, tmp_path: Path) -> None:
    """Without those that wait, there would be four, or one again, after a few batches."""
    gate = WaitsToStart()
    loader = a_loader(Mortal(tmp_path, length=900), worker_init_fn=gate)
    batches: Any = iter(loader)
    pool, clock.step_s = batches._pool, 0.01
    found = []
    while pool.workers == 1:
        found.append(flat(next(batches)))
    for _ in range(100):
        found.append(flat(next(batches)))
        assert (pool.workers, pool.up) == (2, 1)
    gate.open(3)
    for batch in read(batches, clock):
        found.append(batch)
        if pool.workers == 4:
            break
    assert pool.workers == 4
    assert found + [flat(batch) for batch in batches] == undisturbed(Mortal(tmp_path, length=900))
    gate.close()


def test_cpus_that_are_used_up_allow_no_more(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(readers, "rank_cpus", lambda: 1e-9)
    loader = a_loader(Mortal(tmp_path, length=300))
    for _ in read(iter(loader), clock):
        assert loader.stats().workers == 1


def test_without_max_workers_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(growth.Growth, "__init__", fails)
    loader = a_loader(Mortal(tmp_path), max_workers=None)
    assert len(list(loader)) == 10


def test_as_many_as_the_smallest_number(clock: Clock, tmp_path: Path) -> None:
    loader = a_loader(Mortal(tmp_path, length=300), num_workers=2, max_workers=2)
    for _ in read(iter(loader), clock):
        assert loader.stats().workers == 2


def test_an_older_pass_is_left_alone(clock: Clock, tmp_path: Path) -> None:
    """Two readers of one loader, each with workers of its own."""
    loader = a_loader(Mortal(tmp_path, length=300))
    older: Any = iter(loader)
    next(older)
    grown(loader, clock)
    for _ in itertools.islice(read(older, clock), 80):
        assert older._pool.workers == 1


def test_a_loader_that_is_made_anew_keeps_it_and_a_tuned_one_has_none() -> None:
    class Own(DataLoader[int]):
        pass

    loader = Own(range(9), 3, num_workers=2, max_workers=5, seed=1)
    again = remade(loader, {"batch_size": 1, "shuffle": None, "sampler": None, "batch_sampler": None})
    assert (type(again), again.num_workers, again.max_workers) == (Own, 2, 5)
    tuned = Subject(lambda: loader).remade(Setting("thread", 3, 2, 1))
    assert (tuned.num_workers, tuned.max_workers) == (3, None)


def test_how_many_workers_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    private: dict[Any, int | None] = {1: 300, 2: 100}
    monkeypatch.setattr(room, "private_memory", private.get)
    monkeypatch.setattr(room, "free_memory", lambda: 2_500)
    fit = room.workers_that_fit
    assert fit(8, [1, 2], slot_bytes=200) == 5  # 2,500 x 0.8 / (300 + 100)
    assert fit(3, [1, 2], slot_bytes=200) == 3
    assert fit(8, [1, 2], slot_bytes=20_000) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert fit(8, [1, 2], slot_bytes=200) == 2
    assert fit(8, [None, 3], slot_bytes=200) == 8, "nobody knows"
    monkeypatch.setattr(room, "free_memory", lambda: None)
    assert fit(8, [1, 2], slot_bytes=200) == 8


@pytest.mark.ray
@pytest.mark.slow
def test_ray_room_is_what_the_cluster_has_free(tmp_path: Path) -> None:
    loader = a_loader(Mortal(tmp_path, length=30), executor=RAY)
    batches: Any = iter(loader)
    next(batches)
    pool = batches._pool
    wait_until(lambda: pool.poll() or pool.up == 1)
    assert pool.room_for(1) == 1
    assert 1 <= pool.room_for(10**6) < 10**5
    pool._settings = pool._settings._replace(options=pool._settings.options | {"resources": {"no such thing": 1.0}})
    assert pool.room_for(1) == 0
