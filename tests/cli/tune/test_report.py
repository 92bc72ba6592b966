"""What is shown of a search: verdicts, bars, code that makes the loader, and JSON."""

import ast
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cli.tune import tune_factories as factories
from headrace import DataLoader, ProcessExecutor, ThreadExecutor
from headrace.cli.tune.measuring import Step, Subject
from headrace.cli.tune.report import Report
from headrace.tuning.diagnosis import Machine
from headrace.tuning.search import Search
from headrace.tuning.settings import INLINE, Grid, Setting
from tuning.virtual import Load, Virtual

GRID = Grid(("process", "thread", INLINE), (1, 2, 4), (2, 4), (1, 4))


def report(
    load: Load, loader: object = None, step_s: float = 0.0, failing: tuple[str, ...] = (), epoch: int | None = 1000
) -> Report:
    """The report of a search in virtual time."""
    subject = Subject(factories.stored if loader is None else lambda: loader)
    virtual = Virtual(load, cpus=2, step_s=step_s, failing=failing)
    result = Search(GRID, virtual, virtual.clock, Machine(2, step_s), 60).run(GRID.nearest(subject.setting))
    return Report(result, subject, Step(step_s), 2, virtual.now_s, len(virtual.visited), epoch)


def shown(of: Report, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(of.table())
    return console.export_text().splitlines()


def options_of(code: str) -> dict[str, object]:
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    assert ast.unparse(call.args[0]) == "..."
    return {one.arg or "": ast.literal_eval(one.value) for one in call.keywords}


GIL, STORAGE, QUICK = Load(python_s=0.06), Load(blocked_s=0.3, python_s=0.001), Load(python_s=0.0001)


def test_the_table_fits_into_eighty_columns_and_says_which_is_best() -> None:
    lines = shown(report(GIL, step_s=0.01))
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert "…" not in "".join(lines)
    rows = [line.split() for line in lines[2:]]
    (best,) = [row for row in rows if "best" in row]
    assert best[:4] == ["process", "2", "2", "1"]
    (yours,) = [row for row in rows if "yours" in row]
    assert yours[:4] == ["process", "1", "2", "1"]
    assert ["waits" in line for line in (lines[0], shown(report(GIL))[0])] == [True, False]


def test_times_are_ratios_to_the_fastest() -> None:
    found = report(GIL)
    assert found._ratio(found.result.fastest) == 1.0
    assert found._ratio(Setting("process", 1, 2)) == pytest.approx(2.0, rel=0.01)
    assert any("2.00 x" in line for line in shown(found) if "yours" in line)


def test_finalists_come_first_and_are_compared_with_each_other_only() -> None:
    found = report(GIL)
    rounds = [entry.rounds for entry in found.result.entries]
    finalists = rounds.count(found.last_rounds)
    assert finalists > 1
    assert rounds == [found.last_rounds] * finalists + [0] * (len(rounds) - finalists)
    assert [one["last_rounds"] for one in found.as_json()["tried"]] == rounds
    second, other = found.result.entries[1], found.result.entries[finalists]
    assert found.verdict(second) in ("best", "as fast")
    assert found._ratio(other.setting) < 1.03
    assert found.verdict(other) in ("", "yours")
    assert found.verdict(replace(other, rounds=found.last_rounds)).startswith("as fast")


def test_settings_that_failed_are_rows_too() -> None:
    (row, *_) = [line for line in shown(report(GIL, failing=("thread",))) if line.startswith("thread")]
    assert row.split()[4:] == ["-", "-", "-", "-", "failed"]


def test_bars_are_as_long_as_the_rates() -> None:
    found = report(GIL)
    bars = {str(line).rpartition("  ")[0].strip(): str(line).count("█") for line in found.bars(100)}
    choice, yours = bars[str(found.result.choice)], bars["process x 1, prefetch_factor=2"]
    assert choice == max(bars.values())
    assert choice == pytest.approx(2 * yours, rel=0.4)
    assert len(bars) == len([entry for entry in found.result.entries if entry.bounds])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("load", "loader", "expected"),
    [
        (GIL, None, {"num_workers": 2, "executor": "process"}),
        (QUICK, None, {"num_workers": 0}),
        (
            QUICK,
            DataLoader(factories.Numbers(), num_workers=1, executor="thread"),
            {"num_workers": 0, "executor": INLINE},
        ),
        (STORAGE, None, {"num_workers": 4, "executor": "thread", "fetch_threads": 4}),
    ],
)
def test_the_code_makes_the_loader(load: Load, loader: object, expected: dict[str, object]) -> None:
    options = options_of(report(load, loader, step_s=0.05 * (load is QUICK)).code())
    assert options == expected
    made = DataLoader(factories.Numbers(), **options)  # type: ignore[arg-type]
    assert made.num_workers == expected["num_workers"]


def test_the_users_own_executor_is_in_the_code() -> None:
    own = DataLoader(factories.Numbers(), num_workers=1, executor=ProcessExecutor())
    assert "executor=ProcessExecutor()" in report(GIL, own).code()
    other = DataLoader(factories.Numbers(), num_workers=1, executor=ThreadExecutor())
    assert 'executor="process"' in report(GIL, other).code()


@pytest.mark.parametrize(("batches", "expected"), [(1, True), (1000, False), (None, False)])
def test_workers_outlast_epochs_that_are_short(batches: int | None, expected: bool) -> None:
    found = report(GIL, epoch=batches)
    assert found.persistent() is expected
    assert ("persistent_workers=True" in found.code()) is expected


def test_everything_as_json() -> None:
    found = report(GIL, step_s=0.02, failing=("thread",))
    read = json.loads(json.dumps(found.as_json()))
    assert read["best"] == {"executor": "process", "workers": 2, "prefetch_factor": 2, "fetch_threads": 1}
    assert read["code"] == found.code()
    assert read["limit"] == "cpu"
    assert read["step_s"] == 0.02
    assert read["visits"] == sum(one["visits"] for one in read["tried"]) + 1  # a batch alone
    assert {one["failed"] for one in read["tried"] if one["verdict"] == "failed"} == {"no thread here"}


def test_the_picture_has_a_bar_for_each_setting(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = report(GIL, step_s=0.02)
    found.plot(tmp_path / "tuned.svg")
    drawn = (tmp_path / "tuned.svg").read_text()
    for entry in found.result.entries:
        assert f"<!-- {entry.setting} -->" in drawn
    assert "<!-- the trainer alone -->" in drawn
