"""Ctrl-C at every line that the loader executes: nothing hangs, is left half done, or is left behind."""

import _thread
import gc
import multiprocessing.process
import os
import signal
import sys
import threading
from contextlib import nullcontext
from typing import Any

import pytest

import headrace
from headrace import DataLoader
from headrace.executors.dispatch.pool import DispatchedPool
from headrace.system.interrupts import Droppable, InterruptsHeld
from headrace.tuning.growing import Growing
from interrupts import AtLine, Small, default_interrupts
from waiting import LIMIT_S, wait_for_reapers

FOLDERS = (os.path.dirname(headrace.__file__), os.path.dirname(multiprocessing.process.__file__))

LENGTH = 5

STRIDE = 83
"""The distance of interrupted lines; a prime, so that loops are hit at different places."""


def numbers(batches: Any) -> list[int]:
    return [int(batch[0, 0]) for batch in batches]


def interrupted_once(loader: DataLoader[Any], at: AtLine) -> None:
    """Read an epoch, going on after an interrupt as a notebook's user would."""
    seen: list[int] = []
    reader = None
    try:
        with at.armed():
            reader = iter(loader)
            seen.extend(int(batch[0, 0]) for batch in reader)
    except KeyboardInterrupt:
        if reader is not None:
            state = loader.state_dict()
            assert state["samples"] + LENGTH * state["epoch"] - len(seen) in (0, 1), f"interrupted at {at.place}"
            seen.extend(int(batch[0, 0]) for batch in reader)
            missing = sorted(set(range(LENGTH)) - set(seen))
            assert seen == [number for number in range(LENGTH) if number not in missing], f"out of order: {seen}"
            assert len(missing) <= 1, f"more is lost than the batch that was on its way: {missing}"


@pytest.mark.slow
@pytest.mark.skipif(sys.implementation.name != "cpython", reason="counts lines as CPython traces them")
@pytest.mark.parametrize("options", [{}, {"seed": 0}], ids=["parity", "plan"])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_interrupt_at_any_line_tears_nothing(
    persistent: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"num_workers": 1, "persistent_workers": persistent, "timeout": 60, **options}
    interrupted_everywhere(options, 1 + 7 * persistent + 13 * len(options), STRIDE, monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(sys.implementation.name != "cpython", reason="counts lines as CPython traces them")
@pytest.mark.parametrize(
    "options",
    [
        {"executor": "inline"},
        {"executor": "thread", "num_workers": 2, "timeout": 60},
        {"executor": "thread", "num_workers": 1, "persistent_workers": True},
    ],
    ids=["inline", "thread", "thread-persistent"],
)
def test_an_interrupt_at_any_line_tears_nothing_in_this_process(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_everywhere(options | {"seed": 0}, 1, 7, monkeypatch)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("headrace-worker")]
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.skipif(sys.implementation.name != "cpython", reason="counts lines as CPython traces them")
def test_an_interrupt_at_any_line_of_growing_tears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a second worker as soon as one step was noted."""
    sizes: list[int] = []
    note, resize = Growing.note, DispatchedPool.resize

    def noted(rules: Growing, *figures: Any) -> int:
        if note(rules, *figures) == 1:
            rules.go_on_from(2)
        return rules.workers

    monkeypatch.setattr(Growing, "note", noted)
    monkeypatch.setattr(DispatchedPool, "resize", lambda pool, workers: (sizes.append(workers), resize(pool, workers)))
    options = {"num_workers": 1, "max_workers": 2, "timeout": 60, "seed": 0}
    interrupted_everywhere(options, 1, STRIDE, monkeypatch)
    assert sizes.count(2) > 20


def interrupted_everywhere(options: dict[str, Any], line: int, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt an epoch at a line, another one some lines later, and so on to the end of all lines."""
    complaints: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: complaints.append(event.exc_type))
    with default_interrupts():
        while True:
            loader = DataLoader(Small(LENGTH), **options)
            at = AtLine(line, FOLDERS)
            interrupted_once(loader, at)
            if loader.persistent_workers:
                loader.set_epoch(0)
                assert numbers(loader) == list(range(LENGTH)), f"the epoch after an interrupt at {at.place}"
            del loader
            gc.collect()
            assert not complaints, f"interrupted at {at.place}"
            if at.place is None:
                break
            line += stride
    assert line > 1000, "the test must have gone through the lines"


def drop_interrupted(things: list[Any]) -> int:
    """Drop the last of some objects when an interrupt is pending."""
    for _ in iter(_thread.interrupt_main, None):
        pass
    del things[-1:]
    for _ in range(2):  # the next round looks for it; from Python 3.12 on not every line and not every call does
        pass
    return len(things)


class Noted(Droppable):
    """Records what runs when it is dropped; more interrupts may come."""

    def __init__(self, done: list[str], interrupts: int = 0) -> None:
        self.done, self.interrupts = done, interrupts

    def _dropped(self) -> None:
        self.done.append("begun")
        if self.done.count("begun") <= self.interrupts:
            signal.raise_signal(signal.SIGINT)
        self.done.append("done")


@pytest.fixture
def complaints(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Python's reports of exceptions that nobody caught."""
    made: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: made.append(event.exc_value))
    return made


@pytest.mark.parametrize(
    ("interrupts", "done"), [(0, ["begun", "done"]), (1, ["begun", "begun", "done"]), (2, ["begun", "begun"])]
)
def test_an_interrupt_while_something_is_dropped_comes_after_it(
    complaints: list[Any], interrupts: int, done: list[str]
) -> None:
    noted: list[str] = []
    with default_interrupts():
        one = Noted(noted, interrupts)
        with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
            del one
            noted.append(f"after {len(noted)}")
    assert [word for word in noted if not word.startswith("after")] == done
    assert not complaints


def test_an_interrupt_just_before_something_is_dropped_is_not_lost(complaints: list[Any]) -> None:
    done: list[str] = []
    things = [Noted(done)]
    with default_interrupts(), pytest.raises(KeyboardInterrupt):
        drop_interrupted(things)
    assert done[-1] == "done"
    assert not complaints


def test_what_is_garbage_is_dropped_like_anything_else() -> None:
    done: list[str] = []
    one: Any = Noted(done)
    one.itself = one
    del one
    assert not done
    gc.collect()
    assert done == ["begun", "done"]


@pytest.mark.parametrize(
    "options",
    [{}, {"seed": 0}, {"seed": 0, "persistent_workers": True}, {"executor": "thread"}, {"executor": "inline"}],
    ids=repr,
)
def test_an_interrupt_just_before_a_reader_is_dropped_is_not_lost(
    complaints: list[Any], options: dict[str, Any]
) -> None:
    loader = DataLoader(Small(LENGTH), num_workers=1, **options)
    readers = [iter(loader)]
    next(readers[0])
    workers = readers[0]._workers
    del loader
    with default_interrupts(), pytest.raises(KeyboardInterrupt):
        drop_interrupted(readers)
    assert not readers
    wait_for_reapers()
    assert not complaints
    assert not any(worker.is_alive() for worker in workers)


class Handlers(Small):
    def __getitem__(self, index: int) -> Any:
        return repr(signal.getsignal(signal.SIGINT))


def test_forked_workers_have_the_handler_of_their_rank() -> None:
    (names,) = DataLoader(Handlers(LENGTH), batch_size=LENGTH, num_workers=1, multiprocessing_context="fork")
    assert set(names) == {repr(signal.getsignal(signal.SIGINT))}


def test_a_process_forked_by_another_thread_has_the_handler_from_before() -> None:
    codes: list[int] = []

    def fork() -> None:
        child = os.fork()
        if not child:
            os._exit(signal.getsignal(signal.SIGINT) is not handler)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with default_interrupts():
        handler = signal.getsignal(signal.SIGINT)
        with InterruptsHeld(), InterruptsHeld():
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join(LIMIT_S)
            assert signal.getsignal(signal.SIGINT) is not handler
        assert signal.getsignal(signal.SIGINT) is handler
    assert codes == [0]
