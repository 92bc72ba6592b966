"""Failures of processes: each ends in an error that says what happened, and leaves nothing behind."""

import gc
import os
import signal
import textwrap
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pickle import PicklingError
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from executors.contract_datasets import (
    Blocked,
    Deadly,
    Fragile,
    FragileOnes,
    Large,
    Secretive,
    Squares,
    Unpicklable,
    refuse,
)
from headrace import DataLoader, DeliveryTimeout, HeadraceError, WorkerDied
from headrace.executors.process import peer
from headrace.executors.process import pool as process
from scripts import Script, ScriptServer
from waiting import LIMIT_S, wait_for_reapers, wait_until_ended

RANK = """
    import multiprocessing
    import signal
    import sys
    from headrace import DataLoader
    from executors.contract_datasets import Squares

    multiprocessing.set_forkserver_preload(["headrace.public"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    if __name__ == "__main__":
        loader = DataLoader(Squares(), num_workers=2, multiprocessing_context=sys.argv[1], persistent_workers=True)
        reader = iter(loader)
        next(reader)
        print(*(worker.pid for worker in reader._workers), flush=True)
        {then}
"""


Start = Callable[[str, str], tuple[Script, list[psutil.Process]]]


@pytest.fixture
def start_rank(scripts: ScriptServer, tmp_path: Path) -> Start:
    """Start a process with a loader that has delivered one batch; return it and its workers."""

    def start(then: str, start_method: str) -> tuple[Script, list[psutil.Process]]:
        script = tmp_path / "rank.py"
        script.write_text(textwrap.dedent(RANK).format(then=then))
        rank = scripts.start(script, start_method)
        pids = rank.stdout.readline().split()
        assert len(pids) == 2
        workers = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):  # the rank may have ended, and its workers with it
                workers.append(psutil.Process(int(pid)))
        return rank, workers

    return start


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_workers_end_when_their_rank_is_killed(start_rank: Start, start_method: str) -> None:
    rank, workers = start_rank("sys.stdin.read()", start_method)
    with rank:
        rank.kill()
    wait_until_ended(workers)


@pytest.mark.parametrize(
    ("then", "signal_number"),
    [
        pytest.param("signal.pause()", signal.SIGINT, id="interrupted"),
        pytest.param("pass", None, id="reader still open at exit"),
        pytest.param("raise ValueError('user error')", None, id="exception"),
        pytest.param("os._exit(0)", None, id="exit without cleaning up"),
    ],
)
def test_a_rank_that_ends_takes_its_workers_along(start_rank: Start, then: str, signal_number: int | None) -> None:
    rank, workers = start_rank(f"import os; {then}", "fork")
    with rank:
        if signal_number is not None:
            os.kill(rank.pid, signal_number)
        rank.wait()
        complaints = rank.stderr.read()
    wait_until_ended(workers)
    assert complaints.count("Traceback") == (1 if "raise" in then or signal_number else 0), complaints


def test_a_forked_copy_of_the_rank_does_not_keep_workers_alive(start_rank: Start) -> None:
    """A process that user code forks inherits every descriptor; the workers must not depend on it."""
    fork = "import os; print(os.getpid(), flush=True) if os.fork() else (sys.stdout.close(), sys.stdin.read())"
    rank, workers = start_rank(f"{fork}; sys.stdin.read()", "fork")
    with rank:
        rank.stdout.readline()
        copies = set(psutil.Process(rank.pid).children()) - set(workers)
        rank.kill()
        try:
            wait_until_ended(workers)
        finally:
            for copy in copies:
                copy.kill()


@pytest.mark.parametrize(
    ("signal_number", "cause"),
    [(signal.SIGKILL, "is killed by signal: Killed"), (None, "exited unexpectedly with exit code 7")],
)
def test_where_torch_decides_a_dead_worker_is_an_error_that_says_why(signal_number: int | None, cause: str) -> None:
    reader = iter(DataLoader(Deadly(signal_number), num_workers=2))
    with pytest.raises(WorkerDied, match=r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly") as caught:
        list(reader)
    assert isinstance(caught.value, RuntimeError)
    assert cause in str(caught.value.__cause__)


def test_batches_finished_before_a_death_are_delivered() -> None:
    reader = iter(DataLoader(Deadly(signal.SIGKILL), num_workers=1, batch_size=3))
    assert [next(reader)["square"][:, 1].tolist() for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    with pytest.raises(WorkerDied):
        next(reader)


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_an_interruption_while_unpickling_loses_nothing(options: dict[str, Any]) -> None:
    Fragile.interrupted = False
    loader = DataLoader(FragileOnes(), batch_size=None, num_workers=1, seed=0, **options)
    reader = iter(loader)
    assert [next(reader).number for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        next(reader)
    assert loader.state_dict()["samples"] == 3
    assert [one.number for one in reader] == list(range(3, 37))
    assert [one.number for one in loader] == list(range(37))


def test_persistent_workers_that_died_are_replaced_at_the_next_epoch() -> None:
    loader = DataLoader(Deadly(signal.SIGKILL), num_workers=1, batch_size=3, persistent_workers=True)
    with pytest.raises(WorkerDied):
        list(loader)
    assert next(iter(loader))["square"].shape == (3, 2)


def test_a_death_is_noticed_where_children_are_ignored(scripts: ScriptServer, tmp_path: Path) -> None:
    """Runs in a separate process: with SIGCHLD ignored, nobody can wait for children, multiprocessing included."""
    script = tmp_path / "ignoring.py"
    script.write_text(
        "import signal\n"
        "from headrace import DataLoader\n"
        "from executors.contract_datasets import Deadly\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "list(DataLoader(Deadly(signal.SIGKILL), num_workers=2, seed=0))\n"
    )
    with scripts.start(script) as rank:
        _, complaints = rank.communicate()
    assert "WorkerDied: DataLoader worker" in complaints


def test_an_exception_that_cannot_travel_keeps_its_reason() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Caught RuntimeError in DataLoader worker.*Secret: the real reason"):
        next(iter(DataLoader(Secretive(), num_workers=1, seed=0)))


def test_workers_do_what_they_have_to_before_their_end_where_the_interpreter_ends_at_once(
    scripts: ScriptServer, tmp_path: Path
) -> None:
    script = tmp_path / "ending.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        from multiprocessing import util
        from pathlib import Path
        from headrace import DataLoader
        from executors.contract_datasets import Squares

        def last_word(worker):
            util.Finalize(None, Path(sys.argv[1], f"worker {worker}").touch, exitpriority=1)

        list(DataLoader(Squares(), num_workers=3, worker_init_fn=last_word, multiprocessing_context="fork"))
        """)
    )
    with scripts.start(script, str(tmp_path)) as rank:
        assert rank.wait() == 0
    assert sorted(path.name for path in tmp_path.glob("worker *")) == ["worker 0", "worker 1", "worker 2"]


def test_workers_end_where_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    reader = iter(DataLoader(Squares(), num_workers=2, seed=0))
    workers = reader._workers
    monkeypatch.setattr(process._thread, "start_new_thread", refused)
    assert len(list(reader)) == 37
    assert [worker.exitcode for worker in workers] == [0, 0]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_an_ended_worker_is_not_alive_while_another_thread_reaps_it(
    start_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the system call that reaps it and the next line of that thread."""
    reaped, asked = threading.Event(), threading.Event()
    waitpid = os.waitpid

    def and_wait(pid: int, flags: int) -> tuple[int, int]:
        result = waitpid(pid, flags)
        if threading.current_thread() is not threading.main_thread() and result[0] == workers[0].pid:
            reaped.set()
            asked.wait(LIMIT_S)
        return result

    reader = iter(DataLoader(Squares(), num_workers=1, seed=0, multiprocessing_context=start_method))
    workers = reader._workers
    monkeypatch.setattr(os, "waitpid", and_wait)
    for _ in reader:
        pass
    assert reaped.wait(LIMIT_S)
    seen = workers[0].is_alive(), workers[0].exitcode
    asked.set()
    assert seen == (False, 0)
    wait_for_reapers()


def test_a_finished_pool_needs_no_garbage_collector() -> None:
    gc.disable()
    try:
        reader = iter(DataLoader(Large(), num_workers=1, seed=0))
        loans = weakref.ref(reader._pool._peers[0].wire.loans)  # type: ignore[union-attr]
        assert len(list(reader)) == 6
        del reader
        wait_for_reapers()
        assert loans() is None or not len(loans())  # type: ignore[arg-type]
    finally:
        gc.enable()


def test_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "GRACE_S", 0.2)
    loader = DataLoader(Blocked(tmp_path / "pipe"), num_workers=1, timeout=0.3, seed=0)
    with pytest.raises(DeliveryTimeout, match=r"DataLoader timed out after 0\.3 seconds"):
        next(iter(loader))
    assert issubclass(DeliveryTimeout, RuntimeError)
    assert issubclass(DeliveryTimeout, HeadraceError)
    gc.collect()
    wait_for_reapers()  # while the grace is short


def test_worker_init_fn_that_raises_shows_at_the_first_batch() -> None:
    reader = iter(DataLoader(Squares(), num_workers=2, worker_init_fn=refuse, seed=0))
    with pytest.raises(RuntimeError, match="worker 0 refuses"):
        next(reader)


def test_a_batch_that_cannot_be_pickled_is_an_error_in_its_place() -> None:
    reader = iter(DataLoader(Unpicklable(), num_workers=1, batch_size=None, seed=0))
    for _ in range(2):
        with pytest.raises(Exception, match=r"Can't (get|pickle) local object") as caught:
            next(reader)
        assert any("the batch cannot be pickled: batch is a function (Unpicklable" in n for n in caught.value.__notes__)


def test_a_dataset_that_cannot_be_pickled_names_the_way_out() -> None:
    dataset = Squares()
    dataset.transform = SimpleNamespace(steps=[refuse, lambda sample: sample])  # type: ignore[attr-defined]
    with pytest.raises((AttributeError, PicklingError)) as caught:
        iter(DataLoader(dataset, num_workers=2, multiprocessing_context="spawn", seed=0))
    assert any("but dataset.transform.steps[1] is a function (" in note for note in caught.value.__notes__)
    assert any("must be picklable" in note for note in caught.value.__notes__)


def test_persistent_workers_are_the_same_processes_and_end_with_the_loader() -> None:
    loader: DataLoader[Any] = DataLoader(Squares(), num_workers=2, persistent_workers=True, seed=0)
    list(loader)
    pids = [worker.pid for worker in loader._iterator._workers]
    list(loader)
    assert [worker.pid for worker in loader._iterator._workers] == pids
    loader._iterator = None  # what Lightning does at its end
    wait_for_reapers()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert len(list(loader)) == 37
