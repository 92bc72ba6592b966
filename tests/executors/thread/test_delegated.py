"""Batches that a thread computes exclusively while the caller waits with a limit: at the limit and after it."""

import gc
import random
import re
import signal
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import headrace
from executors.thread_datasets import Computed, Gated, Stream
from headrace import DataLoader, DeliveryTimeout
from headrace.randomness import Generators
from waiting import LIMIT_S, wait_for_reapers, wait_until


def keyed() -> float:
    return headrace.rng().random()


def of_all() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def nested() -> float:
    """Draw in a nested loader, which seeds the global generators and restores them."""
    return sum(value for ((_, value),) in DataLoader(Computed(2, lambda _: random.random()), seed=1, collate_fn=list))


def idle(batches: Any) -> bool:
    """Tell whether no worker computes a batch."""
    return not any(batches._pool._threads.current)


DRAWS = [keyed, of_all, nested]


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws", "ignore:epoch 0 was abandoned")
@pytest.mark.parametrize("late", [1, 7])
@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_computed_alone_is_waited_for_with_the_limit(draw: Any, late: int) -> None:
    """Covers the first batch, and batches of a dataset that draws. The next `next` waits for the same batch."""
    dataset = Gated(draw, late)
    expected = dataset.expected()
    batches = dataset.batches()
    read = [next(batches) for _ in range(late // 3)]
    while not dataset.reached.is_set():  # a busy machine may be at a sample before it, whose draws are its own
        with pytest.raises(DeliveryTimeout):
            next(batches)
    before = of_all(), Generators()
    for _ in range(2):
        with pytest.raises(DeliveryTimeout, match=r"timed out after 0\.2 seconds") as caught:
            next(batches)
        assert not before[1].moved()
        (note,) = caught.value.__notes__
        assert re.search(rf"worker thread [01] is at step {late // 3} of epoch 0 \(samples \[", note)
    assert list(DataLoader(Computed(3, str), seed=0, collate_fn=list))  # also while the batch is under way
    if late == 1:  # another's first batch waits for those that are computed side by side
        assert len(list(DataLoader(Computed(3, str), executor="thread", num_workers=1, collate_fn=list))) == 3
    dataset.gate.set()
    wait_until(lambda: idle(batches))
    assert read + list(batches) == expected


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws", "ignore:the training loop draws")
@pytest.mark.parametrize("late", [1, 7])
@pytest.mark.parametrize("draw", DRAWS)
def test_what_runs_on_after_the_limit_leaves_the_callers_generators(draw: Any, late: int) -> None:
    """Except for the numbers that the current sample draws itself, before the caller seeds the generators."""
    dataset = Gated(draw, late)
    expected = dataset.expected()
    batches = dataset.batches()
    read = [next(batches) for _ in range(late // 3)]
    with pytest.raises(DeliveryTimeout):
        next(batches)
    if draw is of_all:
        dataset.draw = keyed  # what it draws from now on
    random.seed(8), np.random.seed(8), torch.manual_seed(8)
    drawn = [of_all()]
    dataset.gate.set()
    wait_until(lambda: idle(batches))
    drawn.append(of_all())
    random.seed(8), np.random.seed(8), torch.manual_seed(8)
    assert drawn == [of_all(), of_all()]
    dataset.draw = draw
    assert read + list(batches) == expected


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
@pytest.mark.parametrize(("draw", "late"), [(keyed, 1), (of_all, 1), (nested, 1), (of_all, 7)])
def test_an_interrupt_ends_the_wait_for_another_thread(draw: Any, late: int) -> None:
    main, noticed = threading.main_thread(), threading.Event()

    def interrupt() -> None:
        # Again and again: one that comes just before a thread begins to wait for a lock shows only after the waiting.
        while threading.current_thread() is not main and not noticed.wait(0.05):
            signal.pthread_kill(main.ident, signal.SIGINT)  # type: ignore[arg-type]

    def notice(*_: Any) -> None:
        if not noticed.is_set():
            noticed.set()
            raise KeyboardInterrupt

    dataset = Gated(draw, late, interrupt)
    expected = dataset.expected()
    batches = iter(dataset.loader(timeout=60))
    read = [next(batches) for _ in range(late // 3)]
    generators = Generators()
    before = signal.signal(signal.SIGINT, notice)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not generators.moved()
    dataset.gate.set()
    assert read + list(batches) == expected


def test_a_stream_goes_on_after_the_limit() -> None:
    gate = threading.Event()
    numbers = iter(range(10))

    def draw() -> int:
        assert gate.wait(LIMIT_S)
        return next(numbers)

    batches = iter(DataLoader(Stream(draw), num_workers=1, executor="thread", batch_size=2, timeout=0.1, seed=0))
    for _ in range(2):
        with pytest.raises(DeliveryTimeout):
            next(batches)
    torch.rand(())  # nor does it matter that the caller draws
    gate.set()
    wait_until(lambda: idle(batches))
    with warnings.catch_warnings(record=True):
        assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_batch_that_is_computed_twice_is_waited_for_with_the_limit() -> None:
    """It is computed again since the caller drew during the first time."""
    barrier, gate = threading.Barrier(2), threading.Event()
    times: list[int] = []

    def compute(index: int) -> int:
        times.append(index)
        if times.count(1) == 1 and index == 1:
            barrier.wait(LIMIT_S)
            barrier.wait(LIMIT_S)
        elif index == 1:
            assert gate.wait(LIMIT_S)
        return index

    batches = iter(
        DataLoader(Computed(4, compute), num_workers=1, executor="thread", collate_fn=list, timeout=0.5, seed=0)
    )
    next(batches)
    barrier.wait(LIMIT_S)
    torch.rand(())
    barrier.wait(LIMIT_S)
    with pytest.raises(DeliveryTimeout):
        next(batches)
    gate.set()
    assert list(batches) == [[(index, index)] for index in (1, 2, 3)]
    assert times.count(1) == 2


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
@pytest.mark.parametrize("draw", [keyed, of_all])
def test_an_error_at_the_limit_or_after_it_holds_no_cycle(draw: Any) -> None:
    class Large:
        pass

    dataset = Gated(draw, 1)
    held: list[weakref.ref[Large]] = []

    def fail() -> None:
        large = Large()
        held.append(weakref.ref(large))
        assert dataset.gate.wait(LIMIT_S)
        raise KeyError(large)

    dataset.then = fail
    batches = dataset.batches()
    gc.disable()
    try:
        with pytest.raises(DeliveryTimeout):
            next(batches)
        dataset.gate.set()
        with pytest.raises(KeyError):
            next(batches)
        wait_until(lambda: not any(one() for one in held))
    finally:
        gc.enable()


def test_a_batch_under_way_does_not_keep_its_pool() -> None:
    dataset = Gated(keyed, 0)
    batches = dataset.batches()
    with pytest.raises(DeliveryTimeout):
        next(batches)
    del batches
    dataset.gate.set()
    wait_for_reapers()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace-worker")]
