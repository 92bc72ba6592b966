"""Processes that are forked together."""

import gc
import multiprocessing
import os
import signal
import threading
from ast import literal_eval
from multiprocessing import connection
from pathlib import Path
from socket import socket, socketpair
from typing import Any

import pytest

from headrace.executors.link.wire import hang_up
from headrace.executors.process import forks
from headrace.executors.process.forks import Process, fork_all, forks_together
from scripts import ScriptServer

FORK = multiprocessing.get_context("fork")
LIMIT_S = 60


inherited: list[Any] = [[]]


def echo(end: socket) -> None:
    """Answer each message with facts about this process, until the socket is closed."""
    process = multiprocessing.current_process()
    while end.recv(1):
        told = (
            gc.isenabled(),
            any(one is inherited for one in gc.get_objects()),
            process.name,
            multiprocessing.get_start_method(),
        )
        end.sendall(repr(told).encode())


class Three:
    """Three processes, and the rank's ends of their sockets."""

    def __init__(self) -> None:
        self.pairs = [socketpair() for _ in range(3)]
        self.ends = [mine for mine, _ in self.pairs]
        self.processes = [Process(FORK, target=echo, args=(its,), daemon=True) for _, its in self.pairs]

    def fork(self) -> None:
        """Fork the processes."""
        fork_all([(process, [its]) for process, (_, its) in zip(self.processes, self.pairs, strict=True)])

    def told(self, number: int) -> Any:
        """The answer of one process."""
        self.ends[number].settimeout(LIMIT_S)
        self.ends[number].sendall(b"?")
        return literal_eval(self.ends[number].recv(1000).decode())

    def end(self) -> None:
        """End the processes that exist."""
        for end in self.ends:
            hang_up(end)
        for process in self.processes:
            if process.pid is not None:
                process.join(LIMIT_S)
                process.close()


@pytest.fixture
def three() -> Any:
    made = Three()
    yield made
    made.end()


def test_each_has_its_own_sockets_and_pipes_alone(three: Three) -> None:
    three.fork()
    assert [process.is_alive() for process in three.processes] == [True] * 3
    for number in (1, 2, 0):
        three.told(number)
        process = three.processes[number]
        process.kill()
        assert connection.wait([process.sentinel], LIMIT_S), "nobody else holds what tells that it ended"
        assert three.ends[number].recv(1) == b"", "nor its socket"
    assert all(its.fileno() < 0 for _, its in three.pairs), "the rank has let go of theirs"


@pytest.mark.parametrize("collects", [True, False])
def test_a_process_collects_garbage_as_the_rank_does_but_not_among_what_it_inherited(
    three: Three, collects: bool
) -> None:
    before, frozen = gc.isenabled(), gc.get_freeze_count()
    (gc.enable if collects else gc.disable)()
    try:
        three.fork()
        assert gc.isenabled() == collects
        assert [three.told(number)[:2] for number in range(3)] == [(collects, False)] * 3
        assert gc.get_freeze_count() <= frozen, "the rank goes on looking through its own"
    finally:
        (gc.enable if before else gc.disable)()


def test_it_is_a_process_like_any_other(three: Three) -> None:
    three.fork()
    assert set(three.processes) <= set(multiprocessing.active_children())
    names = [three.told(number)[2] for number in range(3)]
    assert names == [process.name for process in three.processes]
    assert all(name.startswith("ForkProcess-") for name in names)
    three.processes[1].kill()
    three.processes[1].join(LIMIT_S)
    assert three.processes[1].exitcode == -signal.SIGKILL
    assert [process.is_alive() for process in three.processes] == [True, False, True]


def test_where_one_fork_fails_those_before_it_are_started(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    forks = [os.fork]

    def refuse() -> int:
        if not forks:
            raise BlockingIOError("no more processes")
        return forks.pop()()

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(BlockingIOError):
        three.fork()
    assert [process.pid is not None for process in three.processes] == [True, False, False]
    assert three.told(0)
    assert gc.isenabled()
    assert all(its.fileno() < 0 for _, its in three.pairs)


def test_where_descriptors_run_out_none_is_started_and_none_is_lost(
    three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = len(os.listdir("/proc/self/fd"))
    pairs = [forks.socketpair] * 2

    def refuse() -> tuple[socket, socket]:
        if not pairs:
            raise OSError("no more descriptors")
        return pairs.pop()()

    with monkeypatch.context() as patch:
        patch.setattr(forks, "socketpair", refuse)
        with pytest.raises(OSError, match="no more descriptors"):
            three.fork()
    assert [process.pid for process in three.processes] == [None] * 3
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == held - 3, "the three sockets that were theirs"


def test_what_another_thread_forks_meanwhile_keeps_nothing(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, codes = os.fork, list[int]()

    def stranger() -> None:
        held = [popen.rank_lives for popen in forks._being_forked] + [its.fileno() for _, its in three.pairs]
        pid = fork()
        if not pid:
            links = {Path(f"/proc/self/fd/{one}").exists() for one in held}
            os._exit(0 if links == {False} and not forks._lock.locked() and not forks._being_forked else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def interrupted() -> int:
        thread = threading.Thread(target=stranger)
        thread.start()
        thread.join()
        return fork()

    monkeypatch.setattr(os, "fork", interrupted)
    three.fork()
    assert codes == [0] * 3
    assert all(three.told(number) for number in range(3))


def test_what_was_printed_before_is_printed_once(scripts: ScriptServer, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os\n"
        "from headrace.executors.process.forks import Process, fork_all\n"
        "os.register_at_fork(after_in_parent=lambda: print('forked'))\n"
        "fork_all([(Process(multiprocessing.get_context('fork'), target=int), []) for _ in range(3)])\n"
    )
    with scripts.start(script) as rank:
        told, complaints = rank.communicate()
    assert (told.split(), complaints) == (["forked"] * 3, "")


def test_a_daemonic_process_starts_none() -> None:
    def job() -> None:
        mine, its = socketpair()
        try:
            fork_all([(Process(FORK, target=int), [its])])
        except AssertionError as error:
            os._exit(7 if "daemonic" in str(error) and its.fileno() < 0 <= mine.fileno() else 1)

    process = FORK.Process(target=job, daemon=True)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 7


def test_only_plain_forks_are_done_together() -> None:
    class Own(multiprocessing.context.ForkContext):
        class Process(multiprocessing.context.ForkProcess):
            pass

    assert forks_together(FORK)
    assert not forks_together(multiprocessing.get_context("spawn"))
    assert not forks_together(Own())
