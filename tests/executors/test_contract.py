"""One suite over every executor: whatever runs the work, the user sees the same. Inline is the reference."""

import gc
import os
import platform
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from accelerators import ThreadBackend
from executors.contract_datasets import (
    COLLATE_S,
    DECODE_S,
    READ_S,
    Broken,
    BrokenDraws,
    BrokenReads,
    BulkReads,
    Busy,
    BusySingly,
    BusyStream,
    Echo,
    Exhausted,
    Large,
    Resetting,
    Squares,
    Stream,
    TooFew,
    as_list,
    collate_busily,
    collate_nothing,
)
from headrace import DataLoader, ProcessExecutor, RayExecutor, ThreadExecutor
from headrace.delivery.device import backends
from headrace.telemetry.stages import StageTimes
from headrace.telemetry.stats import Meter
from headrace.testing import FakeDataset
from rays import RAY
from waiting import wait_for_reapers, wait_until

Make = Callable[..., DataLoader[Any]]

CELLS = {
    "inline": {"executor": "inline"},
    "inline-fetch": {"executor": "inline", "fetch_threads": 3},
    "thread-1": {"executor": "thread", "num_workers": 1},
    "thread-2": {"executor": "thread", "num_workers": 2},
    "thread-2-timeout": {"executor": "thread", "num_workers": 2, "timeout": 60},
    "thread-2-fetch-persistent": {
        "executor": ThreadExecutor(),
        "num_workers": 2,
        "fetch_threads": 3,
        "persistent_workers": True,
    },
    "process-fork-1": {"num_workers": 1, "multiprocessing_context": "fork"},
    "process-fork-2": {"num_workers": 2, "multiprocessing_context": "fork"},
    "process-fork-2-persistent": {
        "num_workers": 2,
        "multiprocessing_context": "fork",
        "persistent_workers": True,
        "prefetch_factor": 3,
    },
    "process-fork-2-fetch": {"num_workers": 2, "multiprocessing_context": "fork", "fetch_threads": 3},
    "process-spawn-2": {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True},
    "process-forkserver-2": {
        "num_workers": 2,
        "multiprocessing_context": "forkserver",
        "executor": ProcessExecutor(),
    },
    "process-forkserver-2-persistent": {
        "num_workers": 2,
        "multiprocessing_context": "forkserver",
        "persistent_workers": True,
    },
    "ray-2": {"num_workers": 2, "executor": RAY},
    "ray-2-store-persistent": {
        "num_workers": 2,
        "executor": replace(RAY, shared_memory=False),
        "persistent_workers": True,
    },
    "ray-2-fetch": {"num_workers": 2, "executor": RAY, "fetch_threads": 3},
    # Staged for an accelerator, which `_accelerator` puts in the place of the CPU.
    "inline-device": {"executor": "inline", "device": "cpu"},
    "thread-2-device": {"executor": "thread", "num_workers": 2, "device": "cpu"},
    "process-fork-2-device": {"num_workers": 2, "multiprocessing_context": "fork", "device": "cpu"},
    "process-fork-2-device-persistent": {
        "num_workers": 2,
        "multiprocessing_context": "fork",
        "persistent_workers": True,
        "device": "cpu",
        "device_prefetch": 3,
    },
    "ray-2-device": {"num_workers": 2, "executor": RAY, "device": "cpu"},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test in every cell, but in spawned workers only what their start may change: it takes seconds."""
    spawned = (test_bits_equal_inline, test_worker_info)
    if "make" in metafunc.fixturenames:
        cells = [name for name in CELLS if "spawn" not in name or metafunc.function in spawned]
        marks = {name: [pytest.mark.ray] if name.startswith("ray") else [] for name in cells}
        metafunc.parametrize(
            "make", [pytest.param(CELLS[name], id=name, marks=marks[name]) for name in cells], indirect=True
        )


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "cpu", ThreadBackend)


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Make:
    """Make a loader that follows a plan and runs on one of the executors."""

    def make(dataset: Any, **options: Any) -> DataLoader[Any]:
        options = {"seed": 7} | request.param | options
        if isinstance(dataset, IterableDataset) or options.get("batch_size", 1) is None:
            options.pop("fetch_threads", None)  # there are no lists of samples to fetch
        return DataLoader(dataset, **options)

    return make


def flat(batches: Any) -> list[Any]:
    """Batches as comparable values."""
    if isinstance(batches, torch.Tensor):
        return batches.tolist()
    if isinstance(batches, dict):
        return [(name, flat(value)) for name, value in batches.items() if name not in ("worker", "workers")]
    if isinstance(batches, list | tuple):
        return [flat(batch) for batch in batches]
    return batches


def test_bits_equal_inline(make: Make) -> None:
    for options in ({"batch_size": 4, "shuffle": True}, {"batch_size": None}, {"batch_size": 5, "drop_last": True}):
        expected = DataLoader(FakeDataset(23), seed=7, executor="inline", **options)
        loader = make(FakeDataset(23), **options)
        for _ in range(2):
            batches = [flat(batch) for batch in loader]
            assert batches == [flat(batch) for batch in expected]
            assert len(batches) == len(loader) == len(expected)


def test_tensors_of_mixed_kinds_collate_alike(make: Make) -> None:
    loader = make([torch.zeros(2), torch.ones(2, dtype=torch.float64), torch.ones(2, requires_grad=True)], batch_size=3)
    (batch,) = loader
    assert batch.dtype is torch.float64
    assert batch.requires_grad


def test_epochs_are_shuffled_anew_and_come_again(make: Make) -> None:
    loader = make(FakeDataset(23), batch_size=4, shuffle=True)
    first, second = flat(list(loader)), flat(list(loader))
    assert first != second
    loader.set_epoch(0)
    assert flat(list(loader)) == first


def test_callers_generators_are_untouched(make: Make) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    assert len(list(make(FakeDataset(9), batch_size=2, shuffle=True))) == 5
    assert torch.rand(3).tolist() == expected


def test_worker_info(make: Make) -> None:
    loader = make(Squares(), batch_size=None)
    expected = {(worker, loader.num_workers) for worker in range(loader.num_workers)} or {(-1, 0)}
    seen: set[tuple[int, int]] = set()

    def read_an_epoch() -> bool:
        seen.update((sample["worker"], sample["workers"]) for sample in loader)
        return seen >= expected or isinstance(loader.executor, RayExecutor)

    wait_until(read_an_epoch)  # one may be over before the second worker is up
    assert seen
    assert seen <= expected


def test_errors_arrive_in_their_place_and_the_reader_goes_on(make: Make) -> None:
    reader = iter(make(Broken(), batch_size=None))
    for index in range(37):
        if index % 5 == 4:
            with pytest.raises(Broken.ERRORS[index % 3], match=f"sample {index} is broken") as caught:
                next(reader)
            assert any(f"sample {index}, position {index} of epoch 0" in note for note in caught.value.__notes__)
        else:
            assert next(reader)["square"].tolist() == [index * index, index]
    with pytest.raises(StopIteration):
        next(reader)
    with pytest.raises(StopIteration):
        next(reader)


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (BrokenDraws(37), {"batch_size": 4, "shuffle": True}),
        (Broken(), {"batch_size": 5}),
        (Broken(), {"batch_size": None}),
    ],
)
def test_replaced_samples_equal_inlines(make: Make, dataset: Any, options: dict[str, Any]) -> None:
    expected = DataLoader(dataset, seed=7, executor="inline", on_error="replace", **options)
    loader = make(dataset, on_error="replace", **options)
    for epoch in range(2):
        assert [flat(batch) for batch in loader] == [flat(batch) for batch in expected]
        assert loader.stats().replacements == expected.stats().replacements
        assert loader.stats().replaced == 7 * (epoch + 1)


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
@pytest.mark.parametrize(
    "options", [{"batch_size": 4, "shuffle": True}, {"batch_size": 7}, {"batch_size": None}], ids=str
)
def test_bulk_reads_equal_single_ones(make: Make, options: dict[str, Any]) -> None:
    """Whole, and with broken samples: `BrokenReads` has the same samples as `BrokenDraws`."""
    expected = DataLoader(FakeDataset(23), seed=7, executor="inline", **options)
    assert [flat(batch) for batch in make(BulkReads(23), **options)] == [flat(batch) for batch in expected]
    expected = DataLoader(BrokenDraws(37), seed=7, executor="inline", on_error="replace", **options)
    loader = make(BrokenReads(37), on_error="replace", **options)
    assert [flat(batch) for batch in loader] == [flat(batch) for batch in expected]
    assert loader.stats().replacements == expected.stats().replacements
    assert loader.stats().replaced == 7


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
def test_a_bulk_read_that_fails_is_its_batchs_error(make: Make) -> None:
    reader = iter(make(BrokenReads(12), batch_size=4))
    next(reader)
    with pytest.raises(KeyError, match="sample 4 is broken") as caught:
        next(reader)
    assert caught.value.__notes__[0] == "headrace: while fetching samples [4, 5, 6, 7], position 4 of epoch 0, step 1"
    with pytest.raises(ValueError, match="sample 9 is broken") as wrong:
        next(reader)
    assert wrong.value.__notes__[0] == "headrace: while fetching sample 9, position 9 of epoch 0, step 2"


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
def test_a_bulk_read_of_another_length_is_an_error(make: Make) -> None:
    reader = iter(make(TooFew(12), batch_size=4, on_error="replace"))
    next(reader)
    with pytest.raises(ValueError, match=r"TooFew\.read_many returned 3 items for 4 indices") as caught:
        next(reader)
    assert "while fetching samples [4, 5, 6, 7], position 4 of epoch 0, step 1" in caught.value.__notes__[0]
    assert next(reader)["index"].tolist() == [8, 9, 10, 11]


def test_errors_say_where_they_come_from(make: Make) -> None:
    for collate_fn, what in (
        (None, "fetching sample 4, position 4"),
        (collate_nothing, "collating samples [0, 1, 2, 3, 4]"),
    ):
        with pytest.raises((KeyError, ZeroDivisionError)) as caught:
            next(iter(make(Broken() if collate_fn is None else Squares(), batch_size=5, collate_fn=collate_fn)))
        first, *rest = caught.value.__notes__
        assert first == f"headrace: while {what} of epoch 0, step 0"
        if make(Squares()).num_workers:
            (where,) = rest
            assert re.fullmatch(
                rf"headrace: in DataLoader worker (process 0|thread 0|actor [01]) \(pid \d+\) on {platform.node()}",
                where,
            )
            assert (f"pid {os.getpid()})" in where) == ("thread" in where)
        else:
            assert not rest


def test_stop_iteration_does_not_pass_for_the_end(make: Make) -> None:
    reader = iter(make(Exhausted(), batch_size=5))
    next(reader)
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(reader)
    assert len(list(reader)) == 6


def test_batches_larger_than_any_buffer(make: Make) -> None:
    for index, batch in enumerate(make(Large(), batch_size=2)):
        assert batch.shape == (2, 1_000_003)
        assert batch[:, ::100_000].float().mean(1).tolist() == [2 * index, 2 * index + 1]
        batch += 1  # writable


def test_index_lists_larger_than_any_buffer(make: Make) -> None:
    """A worker busy sending a large batch must not deadlock with a rank busy sending a large task."""
    batches = [[f"{index}{place:01000}" for place in range(1_500)] for index in range(6)]
    loader = make(Echo(), batch_sampler=batches, collate_fn=len)
    assert list(loader) == [1_500] * 6
    loader = make(Echo(), batch_sampler=batches, collate_fn=as_list)
    assert [batch[0][0] for batch in loader] == list("012345")


@pytest.mark.parametrize("kind", [Stream, Resetting])
def test_streams(make: Make, kind: type[IterableDataset[int]]) -> None:
    loader = make(kind(), batch_size=3)
    if kind is Resetting and isinstance(loader.executor, ThreadExecutor | str) and loader.num_workers > 1:
        return  # threads share the dataset, which is one iterator
    for _ in range(2):
        batches = flat(list(loader))
        assert sorted(number for batch in batches for number in batch) == list(range(20))
        if loader.num_workers < 2:
            assert batches == [list(range(start, min(start + 3, 20))) for start in range(0, 20, 3)]
        else:
            assert batches[:3] == [[0, 2, 4], [1, 3, 5], [6, 8, 10]]


def test_two_readers_of_one_loader_are_independent(make: Make) -> None:
    loader = make(FakeDataset(11), batch_size=2, shuffle=True)
    alone = flat(list(loader))
    loader.set_epoch(0)
    one, other = iter(loader), iter(loader)
    taken = [(next(one), next(other)) for _ in range(3)]
    assert flat([first for first, _ in taken]) == flat([second for _, second in taken]) == alone[:3]
    assert flat(list(one)) == flat(list(other)) == alone[3:]
    assert loader._schedule.epoch == 1


@pytest.mark.filterwarnings("ignore:epoch 0 was abandoned")
def test_abandoned_readers_leave_nothing(make: Make) -> None:
    """The fixture that guards every test looks for processes and descriptors."""
    threads = threading.active_count()
    loader = make(Large(), batch_size=1)
    for taken in range(3):
        reader = iter(loader)
        for _ in range(taken):
            next(reader)
        del reader
    del loader
    gc.collect()
    wait_for_reapers()
    assert threading.active_count() == threads


def test_a_batch_outlives_its_loader(make: Make) -> None:
    loader = make(Squares(), batch_size=4)
    batches = list(loader)
    del loader
    gc.collect()
    assert flat(batches[0]["square"]) == [[0, 0], [1, 1], [4, 2], [9, 3]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[StageTimes]:
    """The stage times that readers count, batch by batch."""
    told: list[StageTimes] = []
    count = Meter.count_stages

    def listen(meter: Meter, packed: bytes) -> None:
        told.append(StageTimes.unpacked(packed))
        count(meter, packed)

    monkeypatch.setattr(Meter, "count_stages", listen)
    return told


@pytest.mark.parametrize(
    ("dataset", "read_s", "decode_s"),
    [(Busy(8), READ_S, 4 * DECODE_S), (BusySingly(8), 4 * (READ_S + DECODE_S), 0), (BusyStream(), 4 * DECODE_S, 0)],
    ids=["pair", "single", "stream"],
)
def test_each_batch_tells_what_its_stages_took(
    make: Make, told: list[StageTimes], dataset: Any, read_s: float, decode_s: float
) -> None:
    loader = make(dataset, batch_size=4, collate_fn=collate_busily)
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(told) == 2
    apart = not isinstance(loader.executor, ThreadExecutor) and loader.executor not in ("thread", "inline")
    for one in told:
        assert one.read_cpu_s >= read_s
        assert one.decode_cpu_s >= decode_s
        assert one.collate_cpu_s >= COLLATE_S
        for stage in ("read", "decode", "collate", "encode"):
            wall_s, cpu_s = (getattr(one, f"{stage}{name}") for name in ("_s", "_cpu_s"))
            assert wall_s * loader.fetch_threads >= cpu_s * 0.99, "a thread's clock may tick a little late"
        assert (one.decode_s > 0) == (decode_s > 0)
        assert (one.encode_s > 0) == (one.encode_cpu_s > 0) == apart
    stats = loader.stats()
    sums = [sum(column) for column in zip(*told, strict=True)]
    assert [getattr(stats, name) for name in StageTimes._fields] == pytest.approx(sums)
    assert (stats.transport_s > 0) == apart
    assert stats.transport_s <= stats.elapsed_s
