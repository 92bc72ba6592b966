"""What the stages of a batch took, by clocks that the test sets."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from headrace import DataLoader
from headrace.telemetry import stages
from headrace.telemetry.stages import COLLATE, DECODE, ENCODE, PACKED, READ, StageClock, StageTimes
from headrace.telemetry.stats import Meter
from headrace.testing import FakeDataset, ManualExecutor


def ticking(step: float) -> Any:
    def ticks() -> Iterator[float]:
        now = 0.0
        while True:
            now += step
            yield now

    return ticks().__next__


def test_each_lap_is_one_stages_and_a_stage_may_have_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "perf_counter", ticking(4.0))
    monkeypatch.setattr(stages, "thread_time", ticking(1.0))
    clock = StageClock()
    for _ in range(2):
        clock.start()
        for stage in (READ, DECODE, COLLATE, READ, COLLATE, ENCODE, ENCODE, READ):
            clock.lap(stage)
        clock.add_cpu(DECODE, 0.5)
        assert StageTimes.unpacked(clock.packed()) == (12, 3, 4, 1.5, 8, 2, 8, 2)


def test_a_short_stage_used_the_cpu_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, cpu = [0.0], [0.0]
    monkeypatch.setattr(stages, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(stages, "thread_time", lambda: cpu[0])
    clock = StageClock()
    for took, used, stage in ((1e-5, 0.0, READ), (1.0, 0.25, DECODE), (2e-5, 2e-5, COLLATE), (3.0, 2.0, ENCODE)):
        wall[0] += took
        cpu[0] += used
        clock.lap(stage)
    assert StageTimes.unpacked(clock.packed()) == pytest.approx([1e-5, 1e-5, 1, 0.25 - 1e-5, 2e-5, 2e-5, 3, 2])


@pytest.mark.parametrize(("gap_s", "used_s"), [(1e-5, 0.25 - 1e-5), (60.0, 0.25)])
def test_time_between_batches_is_no_stages(monkeypatch: pytest.MonkeyPatch, gap_s: float, used_s: float) -> None:
    """A short time counts as used by the CPU, so what it did not use is missing at the next stage that is measured."""
    wall, cpu = [100.0], [7.0]
    monkeypatch.setattr(stages, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(stages, "thread_time", lambda: cpu[0])
    clock = StageClock()
    wall[0] += gap_s
    clock.start()
    wall[0] += 1.0
    cpu[0] += 0.25
    clock.lap(READ)
    assert StageTimes.unpacked(clock.packed())[:4] == pytest.approx((1.0, used_s, 0, 0))


@pytest.mark.parametrize(("other_s", "used_s"), [(100.0, 1.0), (-100.0, 0.0)])
def test_cpu_time_is_within_wall_time_also_if_another_thread_goes_on(
    monkeypatch: pytest.MonkeyPatch, other_s: float, used_s: float
) -> None:
    wall, cpu = [0.0], [0.0]
    monkeypatch.setattr(stages, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(stages, "thread_time", lambda: cpu[0])
    clock = StageClock()
    cpu[0] += other_s
    wall[0] += 1.0
    clock.lap(READ)
    assert StageTimes.unpacked(clock.packed())[:2] == (1.0, used_s)


@pytest.mark.parametrize("batches", [0, 1, 255, 256, 257, 1000])
def test_sums(batches: int) -> None:
    meter = Meter()
    for number in range(batches):
        meter.count_stages(PACKED.pack(8, 1, 6, 2, 4, 3, 2, 1))
        if number == 300:
            assert meter.read().read_cpu_s == 301 * 7
    stats = meter.read()
    each = (8, 7, 6, 4, 4, 1, 2, 1)  # the time without the CPU is packed, the time with it is told
    assert [getattr(stats, name) for name in StageTimes._fields] == [batches * time for time in each]
    assert pickle.loads(pickle.dumps(meter)).read() == meter.read() == stats


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"num_workers": 1}, {"num_workers": 1, "seed": 1}], ids=str)
def test_a_batch_that_is_gathered_is_read(options: dict[str, Any]) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(8, 9000)), 4, **options)
    assert len(list(loader)) == 2
    stats = loader.stats()
    assert stats.read_s > 0
    assert stats.collate_s == stats.decode_s == 0
    assert (stats.read_cpu_s > 0) == (stats.encode_s > 0) == (stats.transport_s > 0) == ("num_workers" in options)


def test_a_future_has_the_times_of_its_batch() -> None:
    executor = ManualExecutor()
    loader = DataLoader(FakeDataset(8), 4, seed=0, num_workers=1, executor=executor)
    batches = iter(loader)
    (pool,) = executor.pools
    futures = [future for _, future in pool.submitted]
    pool.complete(0)
    pool.complete(1)
    assert futures[0].stages.read_s > 0
    assert (futures[0].wait_s, futures[0].transport_s) == (0, 0)
    next(batches)
    assert 0 < futures[0].wait_s <= loader.stats().wait_s
    assert futures[1].wait_s == 0
    next(batches)
    stats = loader.stats()
    assert stats.read_s == pytest.approx(sum(future.stages.read_s for future in futures))
    assert stats.collate_cpu_s == pytest.approx(sum(future.stages.collate_cpu_s for future in futures))


def test_an_error_is_no_batch() -> None:
    loader = DataLoader(FakeDataset(4), batch_sampler=[[9], [1]])
    batches = iter(loader)
    with pytest.raises(IndexError):
        next(batches)
    assert loader.stats().read_s == 0
    next(batches)
    assert loader.stats().read_s > 0
