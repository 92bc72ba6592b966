"""Hundreds of iterators, finished, abandoned and interrupted: what was held before is held after, and no more."""

import ctypes
import gc
import os
import random
import sys
import threading
from collections import Counter, deque
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from accelerators import ThreadBackend
from headrace import DataLoader
from headrace.delivery.device import backends
from interrupts import Interrupter, Small, default_interrupts
from waiting import wait_for_reapers

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:epoch 0 was abandoned")]


LENGTH = 8

WARM_UP = 34

ITERATORS = int(os.environ.get("HEADRACE_ITERATORS", "100"))

GROWTH_MIB = 8
"""How much memory may come on top after the warm-up, less than 0.1 MiB per iterator: a busy machine moves it by 5."""


def a_loader(draw: random.Random) -> DataLoader[Any]:
    options: dict[str, Any] = {"num_workers": draw.choice([1, 1, 1, 2]), "multiprocessing_context": "fork"}
    if draw.random() < 0.5:
        options["seed"] = 0
    if draw.random() < 0.2:
        options["persistent_workers"] = True
    if draw.random() < 0.1:
        options = {"executor": "inline"}
    if draw.random() < 0.3:
        options["device"] = "cpu"  # for which there is an accelerator here
    return DataLoader(Small(LENGTH), **options)


def finish(loader: DataLoader[Any], draw: random.Random, kept: deque[Any], interrupter: Interrupter) -> None:
    batches = list(loader)
    assert len(batches) == LENGTH
    if draw.random() < 0.2:
        kept.append(draw.choice(batches))


def abandon(loader: DataLoader[Any], draw: random.Random, kept: deque[Any], interrupter: Interrupter) -> None:
    reader = iter(loader)
    for _ in range(draw.randrange(LENGTH)):
        batch = next(reader)
        if draw.random() < 0.05:
            kept.append(batch)


def interrupt(loader: DataLoader[Any], draw: random.Random, kept: deque[Any], interrupter: Interrupter) -> None:
    try:
        interrupter.begin(draw.random() * 0.015)
        reader = iter(loader)
        for batch in reader:
            if draw.random() < 0.05:
                kept.append(batch)
        interrupter.end()
    except KeyboardInterrupt:
        pass


def held() -> tuple[int, Counter[str], int, int]:
    """Return memory of our own in bytes, headrace's objects by type, descriptors, and pieces of shared memory."""
    gc.collect()
    wait_for_reapers()
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    kinds = (type(one) for one in gc.get_objects())
    objects = Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("headrace"))
    objects.pop("_Plain", None)  # of these a cache keeps some, at most 64
    shared = Path("/proc/self/maps").read_text().count("memfd:headrace")
    return process.memory_full_info().uss, objects, process.num_fds(), shared


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts by /proc")
@pytest.mark.parametrize("use", [finish, abandon, interrupt], ids=lambda use: use.__name__)
def test_many_iterators_leave_nothing(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: complaints.append(repr(event.exc_value)))
    monkeypatch.setitem(backends.BACKENDS, "cpu", ThreadBackend)
    ThreadBackend(torch.device("cpu")).copy_stream()  # its thread stays
    draw = random.Random(f"leaks {use.__name__}")
    kept: deque[Any] = deque(maxlen=8)
    threads, interrupter = threading.active_count(), Interrupter()
    before = held()
    with default_interrupts():
        for number in range(WARM_UP + ITERATORS):
            if number == WARM_UP:
                kept.clear()
                before = held()
            use(a_loader(draw), draw, kept, interrupter)
    interrupter.close()
    kept.clear()
    after = held()
    assert after[3] == before[3] == 0, "shared memory is still mapped"
    assert ThreadBackend.locks.registered > 0
    assert ThreadBackend.locks.held == {}, "shared memory is still pinned"
    assert after[2] <= before[2], "descriptors are still open"
    assert after[1] == before[1], f"objects are still there: {after[1] - before[1]}"
    assert (after[0] - before[0]) / 2**20 < GROWTH_MIB
    assert psutil.STATUS_ZOMBIE not in [child.status() for child in psutil.Process().children()]
    assert threading.active_count() == threads
    assert set(complaints) <= {"KeyboardInterrupt()"}  # in a finalizer, where Python swallows it


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_iterators_whose_workers_start_afresh_leave_nothing(start_method: str) -> None:
    draw, kept, interrupter = random.Random(start_method), deque[Any](maxlen=2), Interrupter()
    before = held()
    for use in (finish, abandon):
        use(DataLoader(Small(LENGTH), num_workers=1, multiprocessing_context=start_method), draw, kept, interrupter)
    interrupter.close()
    kept.clear()
    after = held()
    assert after[1:] == (before[1], before[2], 0)
