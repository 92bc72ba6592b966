"""What only threads can do, and what only they can spoil."""

import gc
import random
import re
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

import headrace
from headrace import DataLoader, DeliveryTimeout
from headrace.executors.thread import FALSE_ALARMS
from headrace.randomness import Generators
from headrace.testing import FakeDataset
from waiting import wait_for_reapers, wait_until

LIMIT_S = 20


class Computed(Dataset[tuple[int, Any]]):
    """Calls a function for each sample."""

    def __init__(self, length: int, compute: Any) -> None:
        self.length, self.compute = length, compute

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.compute(index)


def read(dataset: Any, workers: int = 2, **options: Any) -> list[Any]:
    return list(DataLoader(dataset, num_workers=workers, executor="thread", collate_fn=list, **options))


def test_batches_are_computed_at_the_same_time() -> None:
    """Those after the first, which is tried alone; they would wait in vain otherwise."""
    barrier = threading.Barrier(2)
    dataset = Computed(5, lambda index: index and barrier.wait(LIMIT_S) >= 0)
    assert [index for ((index, _),) in read(dataset)] == [0, 1, 2, 3, 4]


def test_nothing_is_copied() -> None:
    seen: set[int] = set()
    dataset = Computed(4, lambda _: seen.add(id(dataset)))
    read(dataset)
    assert seen == {id(dataset)}


def test_worker_info_is_the_threads_own() -> None:
    ids = [info.id for batch in read(Computed(40, lambda _: get_worker_info()), seed=0) for _, info in batch]
    assert set(ids) <= {0, 1}
    assert get_worker_info() is None
    infos = read(Computed(2, lambda _: get_worker_info()), seed=9)
    ((_, info),) = infos[1]
    assert (info.num_workers, info.seed) == (2, 9 + info.id)
    assert isinstance(info.dataset, Computed)


def test_collation_needs_no_shared_memory() -> None:
    (batch,) = DataLoader(
        FakeDataset(3), batch_size=3, num_workers=1, executor="thread", collate_fn=lambda data: default_collate(data)
    )
    assert not batch["torch"].is_shared()


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
@pytest.mark.parametrize("begins", [0, 13])
@pytest.mark.parametrize("timeout", [0, 60])
def test_a_dataset_that_draws_gets_its_bits_one_batch_at_a_time(draw: Any, begins: int, timeout: float) -> None:
    threads: list[str] = []

    def compute(index: int) -> float:
        threads.append(threading.current_thread().name)
        return float(draw()) if index >= begins else 0.0

    dataset = Computed(40, compute)
    expected = list(DataLoader(dataset, batch_size=2, seed=4, collate_fn=list))
    threads.clear()
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"draws from the global generator of .*headrace\.rng") as said:
        assert read(dataset, batch_size=2, seed=4, timeout=timeout) == expected
    assert sum("global generator" in str(one.message) for one in said) == 1
    assert set(threads[-10:]) == {"headrace-worker-0" if timeout else threading.current_thread().name}
    if begins and not timeout:
        assert len(set(threads)) > 1


def test_the_callers_draws_are_told_from_the_datasets() -> None:
    torch.manual_seed(1)
    expected = [torch.rand(()).item() for _ in range(40)]
    torch.manual_seed(1)
    barrier = threading.Barrier(2)
    threads: list[str] = []

    def compute(index: int) -> float:
        threads.append(threading.current_thread().name)
        if 0 < index <= FALSE_ALARMS and threading.current_thread() is not threading.main_thread():
            barrier.wait(LIMIT_S)  # begun before the caller draws...
            barrier.wait(LIMIT_S)  # ...and done after
        return headrace.rng().random()

    drawn, values = [], []
    loader = DataLoader(
        Computed(40, compute), num_workers=1, executor="thread", collate_fn=list, seed=4, prefetch_factor=1
    )

    def train() -> None:
        for step, batch in enumerate(loader):
            values.append(batch)
            meets = step < FALSE_ALARMS
            if meets:
                barrier.wait(LIMIT_S)
            drawn.append(torch.rand(()).item())
            if meets:
                barrier.wait(LIMIT_S)

    with pytest.warns(UserWarning, match="the training loop draws") as said:
        train()
    assert drawn == expected
    assert values == list(DataLoader(Computed(40, lambda _: headrace.rng().random()), collate_fn=list, seed=4))
    assert len([one for one in said if "draws" in str(one.message)]) == 1


class Nested(Dataset[float]):
    """Each sample is what a loader of its own reads, in threads or in a forked process."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        inner = Computed(4, lambda _: random.random())
        loader = DataLoader(inner, seed=index, collate_fn=list, **self.options)
        return sum(number for batch in loader for _, number in batch)


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws", "ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ({"executor": "thread", "num_workers": 3}, {"executor": "thread", "num_workers": 2}),
        ({"executor": "thread", "num_workers": 2}, {"num_workers": 0, "fetch_threads": 2}),
        ({"num_workers": 0, "fetch_threads": 3}, {"executor": "thread", "num_workers": 2}),
        ({"executor": "thread", "num_workers": 2, "timeout": 60}, {"executor": "thread", "num_workers": 2}),
        (
            {"executor": "thread", "num_workers": 2, "timeout": 60},
            {"executor": "thread", "num_workers": 2, "timeout": 60},
        ),
        ({"executor": "thread", "num_workers": 2}, {"executor": "thread", "num_workers": 2, "timeout": 60}),
        ({"executor": "thread", "num_workers": 2, "timeout": 60}, {"num_workers": 0, "fetch_threads": 2}),
    ],
)
def test_loaders_within_loaders(outer: dict[str, Any], inner: dict[str, Any]) -> None:
    expected = list(DataLoader(Nested(), batch_size=2, seed=0))
    batches = DataLoader(Nested(**inner), batch_size=2, seed=0, **outer)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in expected]


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
def test_a_forked_worker_may_have_threads_of_its_own() -> None:
    threads = iter(DataLoader(Computed(40, str), num_workers=2, executor="thread", collate_fn=list))
    next(threads)
    expected = [batch.tolist() for batch in DataLoader(Nested(), batch_size=2, seed=0)]
    nested = Nested(executor="thread", num_workers=2)
    loader = DataLoader(nested, batch_size=2, seed=0, num_workers=1, multiprocessing_context="fork")
    assert [batch.tolist() for batch in loader] == expected


class Stream(IterableDataset[float]):
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __iter__(self) -> Any:
        return (self.draw() for _ in range(8))


def test_a_stream_that_draws_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="depends on chance"):
        assert len(read(Stream(random.random), workers=1, seed=0)) == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, other = (read(Stream(lambda: headrace.rng().random()), workers=2, seed=0) for _ in range(2))
    assert one == other
    assert len({number for (number,) in one}) == 16


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
def test_a_users_sampler_gets_numbers_that_come_again() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(6)
        runs.append(read(Computed(8, lambda _: random.random()), sampler=[3, 1, 4, 1, 5], batch_size=2))
    assert runs[0] == runs[1]
    numbers = [number for batch in runs[0] for _, number in batch]
    assert len(set(numbers)) == 5


def test_the_hook_runs_in_each_thread_and_leaves_the_callers_generators() -> None:
    seen: list[int] = []

    def init(worker_id: int) -> None:
        random.seed(worker_id)
        seen.append(get_worker_info().id)  # type: ignore[union-attr]

    random.seed(5)
    expected = random.random()
    random.seed(5)
    read(Computed(4, str), worker_init_fn=init)
    assert sorted(seen) == [0, 1]
    assert random.random() == expected


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_a_hook_that_raises_is_raised_at_every_batch(kind: type[BaseException]) -> None:
    def init(worker_id: int) -> None:
        raise kind("no licence")

    loader = iter(DataLoader(Computed(3, str), num_workers=1, executor="thread", worker_init_fn=init))
    for _ in range(3):
        with pytest.raises(kind, match="no licence"):
            next(loader)


def test_passes_that_are_abandoned_leave_no_tasks() -> None:
    loader = DataLoader(
        Computed(40, lambda _: 0), num_workers=2, executor="thread", collate_fn=list, persistent_workers=True, seed=0
    )
    for _ in range(50):
        batches = iter(loader)
        next(batches)
        assert batches._pool.owed <= 4
        loader.set_epoch(0)


def test_a_nested_loader_leaves_the_outer_samples_generator() -> None:
    def compute(index: int) -> tuple[float, float]:
        first = headrace.rng().random()
        list(DataLoader(Computed(2, lambda _: headrace.rng().random()), seed=index, collate_fn=list))
        return first, headrace.rng().random()

    dataset = Computed(6, compute)
    plain = Computed(6, lambda _: (headrace.rng().random(), headrace.rng().random()))
    expected = list(DataLoader(plain, seed=2, collate_fn=list))
    assert list(DataLoader(dataset, seed=2, collate_fn=list)) == expected
    assert read(dataset, seed=2) == expected


class Gated(Dataset[Any]):
    """Each sample is an index and what `draw` returns; one of them waits for a gate, in the middle of its draws.

    Args:
        draw: What is drawn.
        late: Which sample waits.
        then: Called by that before it waits.
    """

    def __init__(self, draw: Any, late: int, then: Any = lambda: None) -> None:
        self.draw, self.late, self.then = draw, late, then
        self.reached, self.gate = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        first = self.draw()
        if index == self.late:
            self.reached.set()
            self.then()
            assert self.gate.wait(LIMIT_S)
        return index, first, self.draw()

    def batches(self, **options: Any) -> Any:
        return iter(self.loader(timeout=0.2, **options))

    def loader(self, **options: Any) -> DataLoader[Any]:
        return DataLoader(
            self, num_workers=2, executor="thread", batch_size=3, seed=3, shuffle=False, collate_fn=list, **options
        )

    def expected(self) -> list[Any]:
        """What is read inline."""
        self.gate.set()
        expected = list(DataLoader(self, batch_size=3, seed=3, collate_fn=list))
        self.gate.clear()
        self.reached.clear()
        return expected


def keyed() -> float:
    return headrace.rng().random()


def of_all() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def nested() -> float:
    """Draw in a loader within, which seeds the global generators and puts them back."""
    return sum(value for ((_, value),) in DataLoader(Computed(2, lambda _: random.random()), seed=1, collate_fn=list))


def idle(batches: Any) -> bool:
    """Whether no worker is at work."""
    return not any(batches._pool._crew.at)


DRAWS = [keyed, of_all, nested]


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws", "ignore:epoch 0 was abandoned")
@pytest.mark.parametrize("late", [1, 7])
@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_computed_alone_is_waited_for_with_the_limit(draw: Any, late: int) -> None:
    """The first batch, and those of a dataset that draws; the next `next` waits for the same batch."""
    dataset = Gated(draw, late)
    expected = dataset.expected()
    batches = dataset.batches()
    read = [next(batches) for _ in range(late // 3)]
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
    """But for what the sample under way draws itself, here last: then the caller has not seeded them yet."""
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
    """Since the caller has drawn while it was computed the first time."""
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


SCRIPT = """
import sys, threading
from headrace import DataLoader
from torch.utils.data import Dataset
class Slow(Dataset):
    def __len__(self): return 100
    def __getitem__(self, index):
        if index > 1: threading.Event().wait(0.3)
        return index
loader = iter(DataLoader(Slow(), num_workers=4, executor="thread"))
print(next(loader), next(loader))
{last}
"""
LATE = """
from torch.utils.data import Subset
try:
    next(iter(DataLoader(Subset(Slow(), [2]), num_workers=1, executor="thread", timeout=0.1)))
except RuntimeError:
    sys.exit(4)
"""


@pytest.mark.parametrize(("last", "code"), [("", 0), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", -2), (LATE, 4)])
def test_the_interpreter_ends_while_threads_compute(last: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(last=last)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (code, "tensor([0]) tensor([1])\n")
    assert "Fatal" not in done.stderr
    assert "terminate" not in done.stderr
    assert "ignored" not in done.stderr
