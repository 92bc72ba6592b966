"""Visits of real loaders: all kinds are made anew under any setting, epochs repeat, and nothing is left running."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import RandomSampler

from cli.tune import tune_factories as factories
from headrace import DataLoader, ProcessExecutor
from headrace.cli.tune import measuring
from headrace.cli.tune.measuring import CannotTune, Step, Subject, Visitor
from headrace.tuning.race import Visit
from headrace.tuning.search import Limits, SettingFailed, TimeIsOver
from headrace.tuning.settings import INLINE, Setting

FOREVER = Limits(math.inf)
PROCESSES, THREADS = Setting("process", 2, 2), Setting("thread", 2, 4)

GOOD = [
    factories.plain,
    factories.in_memory,
    factories.planned,
    factories.weighted,
    factories.subset,
    factories.bucketed,
    factories.endless,
    factories.unbatched,
    factories.sampled,
    factories.batch_sampled,
    factories.streamed,
    factories.own_executor,
    factories.subclass,
    factories.two_batches,
]


@pytest.fixture(autouse=True)
def _short_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_WARM_UP_S", 0.0)


def visitor(factory: Callable[[], Any], step: Step | None = None) -> Visitor:
    return Visitor(Subject(factory), step or Step(), least_s=0.0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("setting", [Setting(INLINE), PROCESSES, THREADS], ids=str)
@pytest.mark.parametrize("factory", GOOD)
def test_every_kind_of_loader_is_visited(factory: Callable[[], Any], setting: Setting) -> None:
    visit = visitor(factory)
    for _ in range(2):
        found = visit(setting, FOREVER)
        assert found.batches >= 5
        assert 0 < found.wait_s <= found.seconds < math.inf
        assert found.start_s > 0
        assert found.stages.read_s > 0


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    "setting", [Setting(INLINE, 0, 0, 4), Setting("process", 3, 4, 2), Setting("thread", 1, 2)], ids=str
)
@pytest.mark.parametrize("factory", GOOD)
def test_what_is_not_tuned_stays(factory: Callable[[], Any], setting: Setting) -> None:
    subject = Subject(factory)
    if subject.fetches_singly and setting.fetch_threads > 1:
        setting = Setting(setting.executor, setting.workers, setting.prefetch_factor)
    made, given = subject.remade(setting), subject.loader
    assert type(made) is type(given)
    assert made._source.order == given._source.order
    for name in ("dataset", "batch_size", "drop_last", "seed", "order", "epoch_samples", "collate_fn", "generator"):
        assert getattr(made, name) is getattr(given, name) or getattr(made, name) == getattr(given, name), name
    assert (made.num_workers, made.fetch_threads) == (setting.workers, setting.fetch_threads)
    assert made.prefetch_factor == (setting.prefetch_factor or None)
    assert made.persistent_workers == (setting.workers > 0)
    if given._source.sampler:
        own = "sampler" if given.batch_size else "batch_sampler"
        assert getattr(made, own) is getattr(given, own)
    else:
        assert isinstance(made.sampler, RandomSampler) == isinstance(given.sampler, RandomSampler)


def test_the_users_own_executor_is_kept_for_its_kind() -> None:
    subject = Subject(factories.own_executor)
    assert subject.setting == Setting("process", 1, 2)
    assert isinstance(subject.remade(PROCESSES).executor, ProcessExecutor)
    assert subject.remade(PROCESSES).timeout == 60
    inline = subject.remade(Setting(INLINE))
    assert (inline.executor, inline.timeout) == (INLINE, 0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (factories.plain, Setting(INLINE)),
        (factories.stored, Setting("process", 1, 2)),
        (lambda: DataLoader(factories.Numbers(), num_workers=3, prefetch_factor=5), Setting("process", 3, 5)),
        (
            lambda: DataLoader(factories.Numbers(), num_workers=3, executor="thread", fetch_threads=2),
            Setting("thread", 3, 2, 2),
        ),
        (lambda: DataLoader(factories.Numbers(), executor=INLINE, fetch_threads=2), Setting(INLINE, 0, 0, 2)),
    ],
)
def test_the_loaders_own_setting(factory: Callable[[], Any], expected: Setting) -> None:
    assert Subject(factory).setting == expected


def test_the_step_is_in_the_seconds_and_not_in_the_waiting() -> None:
    found = visitor(factories.plain, Step(0.02))(Setting(INLINE), FOREVER)
    assert found.seconds >= 0.02
    assert found.wait_s <= found.seconds - 0.02


def test_a_step_on_the_cpu_takes_cpu_time() -> None:
    before_s = time.thread_time()
    Step(0.02, on_cpu=True)()
    assert time.thread_time() - before_s >= 0.02


def test_stage_times_are_those_of_a_batch() -> None:
    """Six samples that sleep 4 ms each."""
    found = visitor(factories.stored)(PROCESSES, FOREVER)
    assert found.stages.read_s >= 0.024
    assert found.stages.read_cpu_s < found.stages.read_s


def test_later_visits_read_other_samples() -> None:
    seen: list[list[int]] = []

    class Noting(factories.Numbers):
        def __getitem__(self, index: int) -> int:
            seen[-1].append(index)
            return index

    visit = visitor(lambda: DataLoader(Noting(), batch_size=4, shuffle=True, seed=1))
    for _ in range(2):
        seen.append([])
        visit(Setting(INLINE), FOREVER)
    assert seen[0][:8] != seen[1][:8]


def test_a_much_slower_setting_is_cut_short() -> None:
    found = visitor(factories.stored)(Setting(INLINE), Limits(math.inf, cut_above_s=0.001))
    assert found.cut
    assert found.batches == 2
    assert not visitor(factories.stored)(Setting(INLINE), FOREVER).cut


def test_a_deadline_that_has_passed() -> None:
    with pytest.raises(TimeIsOver):
        visitor(factories.stored)(PROCESSES, Limits(time.monotonic()))


def test_an_error_of_the_dataset_is_the_settings() -> None:
    with pytest.raises(SettingFailed, match=r"(?s)ValueError: .*a torn file.*headrace: "):
        visitor(factories.broken)(PROCESSES, FOREVER)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (factories.empty, "the loader has no batch at all"),
        (factories.once, "its sampler or iterable dataset can be read once only"),
        (factories.sampled_once, "its sampler or iterable dataset can be read once only"),
    ],
)
def test_what_gives_no_batches(factory: Callable[[], Any], text: str) -> None:
    with pytest.raises(CannotTune, match=text):
        deque(map(visitor(factory), [Setting(INLINE)] * 8, [FOREVER] * 8), maxlen=0)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (factories.renamed, "Renamed does not take num_workers"),
        (factories.of_torch, "torch's own DataLoader"),
        (factories.of_numbers, "the factory returned a builtins.int: expected a headrace.DataLoader"),
    ],
)
def test_what_cannot_be_tuned(factory: Callable[[], Any], text: str) -> None:
    with pytest.raises(CannotTune, match=text):
        Subject(factory)


def test_the_spread_is_that_of_runs_of_batches() -> None:
    even = [float(place) for place in range(33)]
    assert measuring._spread(even, 1) == pytest.approx(0.0)
    in_pairs = [2.0 * (place // 2) for place in range(33)]
    assert measuring._spread(in_pairs, 2) < 0.2 < measuring._spread(in_pairs[:4], 1)
    assert measuring._spread(even[:2], 4) == 0.0


def test_a_visit_has_a_size_of_its_batches() -> None:
    found: Visit = visitor(factories.in_memory)(Setting(INLINE), FOREVER)
    assert found.batch_bytes == 4 * 8
