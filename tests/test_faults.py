"""Programs that are killed, forked, interrupted or left in the middle: nothing hangs or is left behind."""

import ctypes
import gc
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import get_worker_info

from headrace import DataLoader, DeliveryTimeout, WorkerDied
from headrace.executors.process import peer as executor
from headrace.testing import FakeDataset
from scripts import Script, ScriptServer
from waiting import LIMIT_S, wait_for_reapers, wait_until, wait_until_ended

pytestmark = pytest.mark.filterwarnings("ignore:epoch 0 was abandoned")

SECONDS = 30.0
"""How long workers may take to end on a busy machine, in seconds."""


Modes = pytest.mark.parametrize("options", [{}, {"seed": 0}], ids=["parity", "plan"])


class Numbers(torch.utils.data.Dataset[int]):
    """Sample i is i. Before sample 5, a worker calls `happens`."""

    def __init__(self, happens: Callable[[], Any] | None = None, length: int = 12) -> None:
        self.happens, self.length = happens, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == 5 and self.happens is not None and get_worker_info() is not None:
            self.happens()
        return index


# Scripts: each ends by itself, or is ended, while workers live.


Run = Callable[..., Script]


@pytest.fixture
def run(scripts: ScriptServer, tmp_path: Path) -> Run:
    """Run a program's text."""

    def run(text: str, *arguments: str) -> Script:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(text))
        return scripts.start(script, *arguments)

    return run


ENDLESS = """
    import multiprocessing, sys
    from headrace import DataLoader
    from test_faults import Numbers

    if __name__ == "__main__":
        multiprocessing.set_forkserver_preload(["test_faults"])
        loader = DataLoader(Numbers(length=10**6), num_workers=2, multiprocessing_context=sys.argv[1], seed=0)
        reader = iter(loader)
        for number in reader:
            if number == 40:
                print(*(worker.pid for worker in reader._workers), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_rank_that_is_killed_in_the_middle_are_gone_within_seconds(run: Run, start_method: str) -> None:
    with run(ENDLESS, start_method) as rank:
        workers = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
        assert len(workers) == 2
        rank.kill()
        wait_until_ended(workers, SECONDS)


BUSY = """
    import ctypes, multiprocessing, os, sys
    from headrace import DataLoader
    from test_faults import Numbers

    def be_long():
        os.write(1, b"%d\\n" % os.getpid())
        ctypes.PyDLL(None).sleep(300)  # which no Python code interrupts, of no thread

    if __name__ == "__main__":
        multiprocessing.set_forkserver_preload(["test_faults"])
        workers = int(sys.argv[2])
        loader = DataLoader(Numbers(be_long), sampler=[5] * 4, num_workers=workers, multiprocessing_context=sys.argv[1])
        reader = iter(loader)
        if workers == 1 and not (copy := os.fork()):
            sys.stdin.read()
            os._exit(0)
        next(reader)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not tell them")
@pytest.mark.parametrize("workers", [2, 1], ids=["alone", "copy"])
@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_workers_in_the_middle_of_a_long_sample_go_with_their_rank(run: Run, start_method: str, workers: int) -> None:
    """In the case "copy", a forked copy of the rank lives on beside the one worker."""
    with run(BUSY, start_method, str(workers)) as rank:
        processes = [psutil.Process(int(rank.stdout.readline())) for _ in range(workers)]
        rank.kill()
        wait_until_ended(processes, SECONDS)


LEAVING = """
    import os, sys
    from headrace import DataLoader
    from test_faults import Numbers

    for number in DataLoader(Numbers(length=10**6), num_workers=2, {options}):
        if number == 9:
            {then}
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "seed=0", "seed=0, persistent_workers=True"])
@pytest.mark.parametrize(
    ("then", "code", "complaint"),
    [
        ("break", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise LookupError('no such thing')", 1, "LookupError: no such thing"),
    ],
    ids=["break", "exit", "exception"],
)
def test_a_script_that_ends_in_its_loop(run: Run, options: str, then: str, code: int, complaint: str) -> None:
    with run(LEAVING.format(options=options, then=f"print(flush=True); {then}")) as rank:
        rank.stdout.readline()
        began = time.monotonic()
        last_words = rank.stderr.read()  # until the last process that holds it has ended
        assert rank.wait() == code
        assert time.monotonic() - began < SECONDS
    if complaint:
        assert last_words.count("Traceback") == 1
        assert last_words.splitlines()[-1] == complaint
    else:
        assert last_words == ""


OPEN = """
    from headrace import DataLoader
    from test_faults import Numbers

    if __name__ == "__main__":
        loader = DataLoader(Numbers(), {options})
        reader = iter(loader)
        next(reader)
        print(*(worker.pid for worker in reader._workers), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *("", "seed=0", "num_workers=2", "num_workers=2, seed=0", "num_workers=2, persistent_workers=True"),
        "num_workers=2, seed=0, persistent_workers=True",
        "num_workers=2, multiprocessing_context='spawn'",
        "num_workers=2, executor='thread'",
        "num_workers=2, executor='thread', persistent_workers=True",
    ],
)
def test_a_script_that_ends_with_an_open_iterator_says_nothing(run: Run, options: str) -> None:
    with run(OPEN.format(options=options)) as rank:
        pids, last_words = rank.communicate()
    assert (last_words, rank.returncode) == ("", 0)
    assert not [pid for pid in map(int, pids.split()) if psutil.pid_exists(pid)]


# Real interrupts: a process that has imported everything forks one copy per moment, and interrupts it.

INTERRUPTED = """
    import os, random, select, signal, sys, time
    import psutil
    import torch
    from headrace import DataLoader
    from test_faults import Numbers

    signal.signal(signal.SIGINT, signal.default_int_handler)
    draw = random.Random(0)
    for number in range(int(sys.argv[1])):
        tell, told = os.pipe()
        words, said = os.pipe()
        if not (copy := os.fork()):
            os.setsid()
            os.dup2(said, 2)
            os.close(words), os.close(tell), os.close(said)
            break
        os.close(told), os.close(said)
        os.read(tell, 1)
        time.sleep(draw.random() * 0.05)  # the moment is what is tested; nothing is waited for
        (os.killpg if number % 2 else os.kill)(copy, signal.SIGINT)
        last_words, presses = b"", 1
        while True:  # until all that hold the pipe have ended
            if not select.select([words], [], [], 3)[0]:
                presses += 1
                os.killpg(copy, signal.SIGINT if presses < 4 else signal.SIGKILL)
            elif more := os.read(words, 10_000):
                last_words += more
            else:
                break
        _, status = os.waitpid(copy, 0)
        text = last_words.decode()
        errors = text.count("Traceback") - text.count("During handling of the above exception")  # which are one
        print(os.waitstatus_to_exitcode(status), presses, errors, repr(text)[-3000:], flush=True)
        os.close(words), os.close(tell)
    else:
        sys.exit()
    os.write(told, b"x")
    while True:
        for options in ({}, {"seed": 0}):
            for batch in DataLoader(Numbers(length=60), num_workers=2, **options):
                pass
"""


@pytest.mark.slow
def test_an_interrupt_at_any_moment_ends_the_program_and_its_workers(run: Run) -> None:
    with run(INTERRUPTED, "24") as server:
        ends = server.stdout.read().splitlines()
    assert len(ends) == 24
    for end in ends:
        assert end.startswith(f"{-signal.SIGINT} 1 1 "), end


# What happens in a worker.


def crash() -> None:
    ctypes.string_at(0)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def close_descriptors() -> None:
    os.closerange(3, 4096)  # the worker's sockets among them


def fork_and_exit() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


@Modes
def test_a_sample_that_crashes_its_workers(options: dict[str, Any]) -> None:
    reader = iter(DataLoader(Numbers(crash), num_workers=2, **options))
    with pytest.raises(WorkerDied) as caught:
        list(reader)
    assert "killed by signal: Segmentation fault" in str(caught.value.__cause__)


@Modes
def test_a_worker_whose_descriptors_are_closed_is_an_error(options: dict[str, Any]) -> None:
    reader = iter(DataLoader(Numbers(close_descriptors), num_workers=2, timeout=LIMIT_S, **options))
    with pytest.raises((WorkerDied, OSError)):
        list(reader)
    if options:
        assert [int(one) for one in reader] == list(range(6, 12))


@Modes
def test_a_worker_may_fork(options: dict[str, Any]) -> None:
    assert [int(one) for one in DataLoader(Numbers(fork_and_exit), num_workers=2, **options)] == list(range(12))


@Modes
def test_a_worker_that_is_stopped_runs_into_the_timeout(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "GRACE_S", 0.2)
    reader = iter(DataLoader(Numbers(stop), num_workers=2, timeout=1, **options))
    with pytest.raises(DeliveryTimeout):
        list(reader)
    del reader
    gc.collect()
    wait_for_reapers()  # while the grace is short


class Forking(Numbers):
    """Sample 5 starts a process that holds copies of the worker's descriptors until the pipe is closed."""

    def __init__(self, pipe: int, writer: int) -> None:
        super().__init__(self.leave_child)
        self.pipe, self.writer = pipe, writer

    def leave_child(self) -> None:
        if not os.fork():
            os.close(self.writer)
            os.read(self.pipe, 1)
            os._exit(0)


@Modes
def test_a_child_of_a_worker_does_not_keep_it_alive(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "GRACE_S", 0.2)
    pipe, writer = os.pipe()
    reader = iter(DataLoader(Forking(pipe, writer), num_workers=2, **options))
    workers = [worker.pid for worker in reader._workers]
    assert [int(one) for one in reader] == list(range(12))
    wait_until(lambda: not any(map(psutil.pid_exists, workers)))  # psutil's own way would take the exit status
    os.close(writer)
    os.close(pipe)


# What happens in the rank.


@Modes
@pytest.mark.parametrize(
    "leave",
    [
        "os._exit(0)",
        "sys.exit(0)",
        "raise ValueError('of the copy')",
    ],
)
def test_a_forked_copy_of_the_rank_does_no_harm(run: Run, options: dict[str, Any], leave: str) -> None:
    program = f"""
        import os, sys
        from headrace import DataLoader
        from test_faults import Numbers

        reader = iter(DataLoader(Numbers(length=60), num_workers=2, **{options!r}))
        numbers = [int(next(reader)) for _ in range(5)]
        copy = os.fork()
        if not copy:
            {leave}
        os.waitpid(copy, 0)
        numbers += [int(number) for number in reader]
        assert numbers == list(range(60)), numbers
    """
    with run(program) as rank:
        _, last_words = rank.communicate()
        assert rank.returncode == 0, last_words


@Modes
def test_loaders_in_threads(options: dict[str, Any]) -> None:
    def read(number: int) -> list[list[int]]:
        loader = DataLoader(FakeDataset(20 + number), 2, num_workers=2, **options)
        return [[int(index) for batch in loader for index in batch["index"]] for _ in range(3)]

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(read, range(6)))
    assert results == [[list(range(20 + number))] * 3 for number in range(6)]
