"""Threads as workers: they compute at the same time, and share the global generators."""

import random
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

import headrace
from executors.thread_datasets import Computed, Gated, Stream
from headrace import DataLoader, DeliveryTimeout
from headrace.executors.thread import compute_lock
from headrace.executors.thread.serial import FALSE_ALARMS
from headrace.testing import FakeDataset
from headrace.worker.seeding import worker_base_seed
from scripts import ScriptServer
from waiting import LIMIT_S


def read(dataset: Any, workers: int = 2, **options: Any) -> list[Any]:
    return list(DataLoader(dataset, num_workers=workers, executor="thread", collate_fn=list, **options))


def test_batches_are_computed_at_the_same_time() -> None:
    """This holds after the first batch, which is computed alone. Otherwise the barrier would time out."""
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
    assert (info.num_workers, info.seed) == (2, worker_base_seed((9, 0), 0) + info.id)
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
    """Each sample is read by a nested loader, in threads or in a forked process."""

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
def test_the_interpreter_ends_while_threads_compute(
    scripts: ScriptServer, tmp_path: Path, last: str, code: int
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(last=last))
    with scripts.start(tmp_path / "script.py") as script:
        told, complaints = script.communicate()
    assert (script.returncode, told) == (code, "tensor([0]) tensor([1])\n")
    assert "Fatal" not in complaints
    assert "terminate" not in complaints
    assert "ignored" not in complaints


def test_a_thread_that_others_wait_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch of a loader is computed alone: it waits for the threads of all loaders."""
    monkeypatch.setattr(compute_lock, "_LONG_S", 0.0)
    hanging = Gated(lambda: 0.0, 3)
    reader = iter(DataLoader(hanging, batch_size=3, num_workers=1, executor="thread", seed=1))
    next(reader)
    assert hanging.reached.wait(LIMIT_S)
    other = DataLoader(range(4), num_workers=1, executor="thread", seed=1, timeout=0.1)
    named = r"worker thread 0 is at step 1 of epoch 0 \(samples \[3, 4, 5\]\) of a Gated"
    with pytest.warns(UserWarning, match=named), pytest.raises(DeliveryTimeout) as caught:
        next(iter(other))
    assert any(re.search(named, note) for note in caught.value.__notes__)
    hanging.gate.set()
