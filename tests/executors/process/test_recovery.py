"""Workers that die under a plan: the batches do not change. A task that ends them again and again is named."""

import array
import fcntl
import gc
import os
import re
import resource
import signal
import termios
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from comparable import flat
from executors.mortal_datasets import (
    Gated,
    HalfWritten,
    KillsAtStart,
    KillsUnpickled,
    ManyParts,
    Mortal,
    first,
)
from headrace import DataLoader, DeliveryTimeout, WorkerDied
from headrace.executors.dispatch import rules
from waiting import LIMIT_S

pytestmark = [
    pytest.mark.filterwarnings("ignore:epoch 0 was abandoned"),
    pytest.mark.filterwarnings("ignore:DataLoader worker"),  # of a death, which tests look for where it matters
]

BATCH = 3


@pytest.fixture(autouse=True)
def _nobody_is_helped_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a task may be overdue: a second copy of it would be counted, too."""
    monkeypatch.setattr(rules, "OVERDUE_S", 1000.0)


def a_loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": BATCH, "num_workers": 2, "seed": 3, "multiprocessing_context": "fork"} | options
    return DataLoader(dataset, **options)


def undisturbed(dataset: Any, **options: Any) -> list[Any]:
    """The batches of a run in which no worker dies."""
    return [flat(batch) for batch in DataLoader(dataset, seed=3, **{"batch_size": BATCH, **options})]


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline
        os.sched_yield()


def read_on(reader: Any) -> tuple[list[int], list[BaseException]]:
    """Read to the end despite errors; return the samples and the errors."""
    seen, errors = [], []
    while True:
        try:
            seen += next(reader)["index"].tolist()
        except StopIteration:
            return seen, errors
        except WorkerDied as error:
            errors.append(error)


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Callable[..., Gated]]:
    made: list[Gated] = []

    def make(*samples: int, **options: Any) -> Gated:
        made.append(Gated(tmp_path, samples, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("how", "start_method", "workers"),
    [
        *product(("SIGKILL", "SIGSEGV", "SIGTERM", "exit", "leave", "close"), ("fork",), (1, 2)),
        *product(("SIGKILL", "exit"), ("forkserver",), (1, 2)),
        ("SIGKILL", "spawn", 2),
    ],
)
def test_a_death_is_not_seen(tmp_path: Path, how: str, start_method: str, workers: int) -> None:
    dataset = Mortal(tmp_path, [10, 20], how)
    loader = a_loader(dataset, num_workers=workers, shuffle=True, multiprocessing_context=start_method)
    reader = iter(loader)
    assert [flat(batch) for batch in reader] == undisturbed(dataset, shuffle=True)
    assert loader.stats().restarts == 2
    assert dataset.counts()[10] == dataset.counts()[20] == 2


@pytest.mark.parametrize("how", ["copy", "scribble"])
def test_a_worker_that_sends_what_is_no_answer_is_replaced(tmp_path: Path, how: str) -> None:
    dataset = Mortal(tmp_path, [10], how)
    loader = a_loader(dataset)
    reader = iter(loader)
    with pytest.warns(UserWarning, match=r"worker \d \(pid \d+\) sent what is no answer .* or forked a copy") as told:
        batches = [flat(batch) for batch in reader]
    assert batches == undisturbed(dataset)
    assert len([one for one in told if one.category is UserWarning]) == loader.stats().restarts == 1


@pytest.mark.parametrize("how", ["copy", "scribble"])
def test_where_torch_decides_it_is_an_error_that_says_why(tmp_path: Path, how: str) -> None:
    reader = iter(a_loader(Mortal(tmp_path, [10], how), seed=None))
    with pytest.raises(WorkerDied, match="exited unexpectedly") as caught:
        list(reader)
    assert any("sent what is no answer" in note and "it was killed for that" in note for note in notes(caught))


def test_in_any_order_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    dataset = Mortal(tmp_path, [4, 10, 11, 20], "SIGKILL")
    batches = [flat(batch) for batch in a_loader(dataset, in_order=False)]
    assert sorted(batches, key=lambda batch: batch["index"]) == undisturbed(dataset)


def test_what_was_answered_before_is_kept(gated: Any) -> None:
    dataset = gated(2)
    reader = iter(a_loader(dataset, batch_size=1, num_workers=1, prefetch_factor=4))
    wait_until(lambda: dataset.counts()[2] == 1)  # so that 0 and 1 are in the socket
    os.kill(reader._workers[0].pid, signal.SIGKILL)
    os.write(dataset.opener, b"xx")  # the dying one may take one
    assert [flat(batch) for batch in reader] == undisturbed(dataset, batch_size=1)
    assert dataset.counts() == {index: 1 + (index == 2) for index in range(30)}


def test_others_compute_it_at_once(gated: Any) -> None:
    """The replacement never comes up: the work does not wait for it."""
    dataset = gated(0)
    gate, opener = os.pipe()

    def block_the_second(worker_id: int) -> None:
        if worker_id == 0 and any(worker == 0 for _, worker, _ in dataset.begun()):
            os.read(gate, 1)

    reader = iter(a_loader(dataset, batch_size=1, worker_init_fn=block_the_second, timeout=LIMIT_S))
    assert reader._pool.wait([reader._window._futures[1]], LIMIT_S), "the second worker is up"
    wait_until(lambda: dataset.counts()[0] == 1)
    os.kill(reader._workers[0].pid, signal.SIGKILL)  # the first task is the first worker's
    os.write(dataset.opener, b"xx")
    assert [int(batch["index"]) for batch in reader] == list(range(30))
    assert [index for index, worker, _ in dataset.begun() if worker == 0] == [0]
    os.write(opener, b"x")
    os.close(gate)
    os.close(opener)


def test_tasks_of_a_dead_worker_come_first_and_in_order(gated: Any) -> None:
    """The other worker is at its own tasks, so the replacement gets those of the dead one, in their old order."""
    dataset = gated(0, 1)
    reader = iter(a_loader(dataset, batch_size=1))
    pool, window = reader._pool, list(reader._window._futures)
    wait_until(lambda: dataset.counts()[0] + dataset.counts()[1] == 2)
    for worker in (0, 1):
        victim = pool._peers[worker]
        os.kill(victim.process.pid, signal.SIGKILL)
        while pool._peers[worker] is victim or not pool._peers[worker].up:
            assert not pool.wait(window[:1], 0.01)
        assert [future.number for future in pool._peers[worker].unanswered] == [worker, worker + 2]
    os.write(dataset.opener, b"xxxx")
    assert [int(batch["index"]) for batch in reader] == list(range(30))


def test_batches_that_the_user_holds_stay(tmp_path: Path) -> None:
    dataset = Mortal(tmp_path, [12, 18], size=20_000)
    reader = iter(a_loader(dataset, num_workers=1))
    held = list(reader)
    assert [flat(batch) for batch in held] == undisturbed(dataset)
    assert all(batch["drawn"].shape == (BATCH, 20_000) for batch in held)


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_every_worker_dies_at_once(tmp_path: Path, start_method: str) -> None:
    dataset = Mortal(tmp_path)
    loader = a_loader(dataset, num_workers=3, multiprocessing_context=start_method)
    reader = iter(loader)
    batches = [flat(next(reader))]
    wait_until(lambda: all(worker.pid is not None for worker in reader._workers))
    victims = [worker.pid for worker in reader._workers]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    batches += [flat(batch) for batch in reader]
    assert batches == undisturbed(dataset)
    assert loader.stats().restarts == 3
    assert not {worker.pid for worker in reader._workers} & set(victims)


def test_kills_at_the_start_are_no_fault_of_the_first_task(tmp_path: Path) -> None:
    dataset = Mortal(tmp_path)
    loader = a_loader(dataset, num_workers=1, worker_init_fn=KillsAtStart(tmp_path, 9, "SIGKILL"))
    assert [flat(batch) for batch in loader] == undisturbed(dataset)
    assert loader.stats().restarts == 9


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_deaths_while_unpickling(tmp_path: Path, start_method: str) -> None:
    dataset = KillsUnpickled(tmp_path, times=1)
    loader = a_loader(dataset, num_workers=1, multiprocessing_context=start_method)
    assert [flat(batch) for batch in loader] == undisturbed(dataset)
    assert loader.stats().restarts == 1


@pytest.mark.parametrize(
    ("how", "most", "workers", "deadly"),
    [("exit", 2, 1, (0,)), ("SIGSEGV", 2, 2, (0, 1)), ("exit", 2, 2, (1,)), ("SIGKILL", 10, 2, (1,))],
)
def test_workers_that_never_come_up_are_an_error(
    tmp_path: Path, how: str, most: int, workers: int, deadly: tuple[int, ...]
) -> None:
    """Two that end alike are enough, unless they may have been killed from outside."""
    dataset = Mortal(tmp_path, length=10_000)
    start = KillsAtStart(tmp_path, 10_000, how, deadly)
    loader = a_loader(dataset, num_workers=workers, worker_init_fn=start)
    reader = iter(loader)
    with pytest.raises(WorkerDied, match=r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly") as caught:
        list(reader)
    assert any(told in str(caught.value.__cause__) for told in ("exit code 7", "Killed", "Segmentation fault"))
    (note,) = notes(caught)
    assert "before it could do a task: worker_init_fn may have ended it" in note
    assert reader.broken  # type: ignore[attr-defined]
    assert loader.stats().restarts == most - 1


def test_the_first_death_is_a_warning_and_the_others_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = a_loader(Mortal(tmp_path, [10, 20], "exit"), num_workers=1)
    with pytest.warns(UserWarning, match="DataLoader worker") as told:
        list(loader)
    (warning,) = [str(one.message) for one in told]
    how = r"worker 0 \(pid \d+\) exited unexpectedly with exit code 7, at step {0} of epoch 0 \(samples \[{1}"
    assert re.match("DataLoader " + how.format(3, "9, 10, 11"), warning)
    (logged,) = caplog.messages
    assert re.match("restart 2: DataLoader " + how.format(6, "18, 19, 20"), logged)


def notes(caught: Any) -> list[str]:
    return list(caught.value.__notes__)


@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_samples_that_end_their_workers_are_named(tmp_path: Path, workers: int, how: str) -> None:
    dataset = Mortal(tmp_path, [0, 10, 11, 13, 29], how, times=1000)
    loader = a_loader(dataset, num_workers=workers)
    reader = iter(loader)
    seen, errors = read_on(reader)
    assert seen == [index for index in range(30) if index // BATCH not in (0, 3, 4, 9)]
    cause = "is killed by signal: Killed" if how == "SIGKILL" else "exited unexpectedly with exit code 7"
    for error, step in zip(errors, [0, 3, 4, 9], strict=True):
        assert isinstance(error, RuntimeError)
        assert str(error).startswith("DataLoader worker (pid(s) ")
        assert cause in str(error.__cause__)
        (note,) = error.__notes__
        samples = [BATCH * step + one for one in range(BATCH)]
        assert note.startswith(f"headrace: step {step} of epoch 0 (samples {samples}) ended 5 workers")
        assert cause in note
    assert loader.stats().restarts == 4 * 5
    assert [dataset.counts()[index] for index in (0, 10, 13, 29)] == [5] * 4


def test_a_large_batch_half_in_its_slot(tmp_path: Path) -> None:
    dataset = HalfWritten(tmp_path, length=8, size=1_000_000)
    expected = DataLoader(dataset, seed=3, collate_fn=first)
    for batch, plain in zip(a_loader(dataset, batch_size=1, num_workers=1, collate_fn=first), expected, strict=True):
        assert batch[0] == plain[0]
        assert torch.equal(batch[1], plain[1])
    assert dataset.counts()[5] == 2


def test_a_batch_half_in_the_socket(tmp_path: Path) -> None:
    """16 parts of 16,000 bytes do not fit into a socket's buffer: it holds a part of a message."""
    dataset = ManyParts(tmp_path, length=6, size=4_000)
    reader = iter(a_loader(dataset, batch_size=1, num_workers=1, collate_fn=first))
    end, waiting = reader._pool._peers[0].wire.end, array.array("i", [0])

    def half_written() -> bool:
        fcntl.ioctl(end, termios.FIONREAD, waiting)
        return waiting[0] > 16_000

    wait_until(half_written)
    os.kill(reader._workers[0].pid, signal.SIGKILL)
    assert [flat(batch) for batch in reader] == undisturbed(dataset, batch_size=1, collate_fn=first)
    assert dataset.counts()[0] == 32


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc")
@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_a_worker_that_is_stopped_is_replaced(tmp_path: Path, start_method: str) -> None:
    dataset = Mortal(tmp_path, [10], "SIGSTOP")
    loader = a_loader(dataset, multiprocessing_context=start_method, num_workers=1)  # nobody helps it out
    with pytest.warns(UserWarning, match=r"worker \d \(pid \d+\) has been stopped by SIGSTOP, and is kill") as caught:
        batches = [flat(batch) for batch in loader]
    assert batches == undisturbed(dataset)
    assert loader.stats().restarts == 1
    assert [one.filename for one in caught if one.category is UserWarning] == [__file__]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc")
def test_where_torch_decides_a_stopped_worker_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match="exited unexpectedly") as caught:
        list(a_loader(Mortal(tmp_path, [10], "SIGSTOP"), seed=None))
    assert any("has been stopped by SIGSTOP; it was killed for that" in note for note in notes(caught))


@pytest.mark.parametrize("options", [{"sampler": range(30), "seed": None}, {"seed": None}])
def test_where_torch_decides_a_death_is_an_error(tmp_path: Path, options: dict[str, Any]) -> None:
    loader = a_loader(Mortal(tmp_path, [10]), **options)
    with pytest.raises(WorkerDied):
        list(loader)
    assert loader.stats().restarts == 0


def test_persistent_workers(tmp_path: Path) -> None:
    dataset = Mortal(tmp_path, [10])
    loader = a_loader(dataset, persistent_workers=True)
    expected = undisturbed(dataset)
    assert [flat(batch) for batch in loader] == expected
    pool = loader._iterator
    for worker in pool._workers:  # idle now
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda pid=worker.pid: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    loader.set_epoch(0)
    assert [flat(batch) for batch in loader] == expected
    assert loader._iterator is pool
    assert loader.stats().restarts == 3


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_reader_dropped_in_the_middle_of_a_restart(tmp_path: Path, start_method: str) -> None:
    """The fixture of all tests checks processes and descriptors."""
    dataset = Mortal(tmp_path, [3])
    reader = iter(a_loader(dataset, num_workers=1, batch_size=1, multiprocessing_context=start_method))
    assert [int(next(reader)["index"]) for _ in range(3)] == [0, 1, 2]
    pool, (before,) = reader._pool, reader._workers
    while pool._peers[0].process is before:
        pool.wait([reader._window._futures[0]], 0.01)
    del reader, pool, before
    gc.collect()


def test_a_forked_copy_of_the_rank_replaces_nobody(tmp_path: Path) -> None:
    dataset = Mortal(tmp_path)
    reader = iter(a_loader(dataset))
    batches = [flat(next(reader))]
    os.kill(reader._workers[0].pid, signal.SIGKILL)
    copy = os.fork()
    if not copy:
        try:
            list(reader)
        except RuntimeError as error:
            os._exit(3 if "a forked copy" in str(error) else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 3
    assert batches + [flat(batch) for batch in reader] == undisturbed(dataset)


def test_where_no_process_can_be_had_it_is_an_error(tmp_path: Path) -> None:
    reader = iter(a_loader(Mortal(tmp_path, [3]), num_workers=1))
    next(reader)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(WorkerDied) as caught:
            next(reader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert any("it could not be replaced" in note for note in notes(caught))
    assert reader.broken


def test_a_timeout_says_what_is_slow_and_where(gated: Any) -> None:
    dataset = gated(6, 7)
    reader = iter(a_loader(dataset, batch_size=2, timeout=0.3))
    batches = [next(reader) for _ in range(3)]
    wait_until(lambda: dataset.counts()[6] == 1)
    with pytest.raises(DeliveryTimeout) as caught:
        next(reader)
    assert str(caught.value) == "DataLoader timed out after 0.3 seconds"
    note, *stacks = notes(caught)
    ((worker, process),) = [(worker, process) for index, worker, process in dataset.begun() if index == 6]
    state = ", sleeping" if Path("/proc/self/stat").exists() else ""
    assert f"worker {worker} (pid {process}{state}) has step 3 of epoch 0 (samples [6, 7])" in note
    assert "batches asked for after it" in note
    if Path("/proc/self/stat").exists():
        assert "__getitem__" in stacks[0], "where the worker is that has it"
    os.write(dataset.opener, b"xxxx")
    batches += list(reader)
    assert [flat(batch) for batch in batches] == undisturbed(dataset, batch_size=2)


def test_a_timeout_names_what_goes_before(gated: Any) -> None:
    dataset = gated(0)
    reader = iter(a_loader(dataset, batch_size=1, num_workers=1, timeout=0.2, in_order=False, prefetch_factor=3))
    pool = reader._pool
    wait_until(lambda: dataset.counts()[0] == 1)
    assert not pool.wait(list(reader._window._futures), 0.01)
    assert pool.describe(list(reader._window._futures)[1:]).endswith(
        "has step 0 of epoch 0 (samples [0]) and step 1 of epoch 0 (samples [1]) and step 2 of epoch 0 (samples [2]); "
        "1 of 1 workers are up; of the 1 batches asked for after it 0 are done"
    )
    os.write(dataset.opener, b"x")
    assert len(list(reader)) == 30
