"""`headrace tune`: what it prints, writes and refuses. Nothing here depends on how fast the machine is."""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace import DataLoader
from headrace.cli.app import app
from headrace.cli.terminal import screen
from headrace.tuning.diagnosis import Limit
from waiting import wait_for_reapers

FILE = Path(__file__).parent / "tune_factories.py"
PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def _imports_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test import factories as if for the first time."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    wait_for_reapers()
    sys.modules.pop("tune_factories", None)


def tune(factory: str, *options: str, code: int = 0, json_too: dict[str, Any] | None = None) -> str:
    """Run the command and return what it said; `json_too` gets what it printed as JSON."""
    target = factory if ":" in factory else f"{FILE}:{factory}"
    result = CliRunner().invoke(app, ["tune", target, *options], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    if json_too is None:
        return result.output
    json_too.update(json.loads(result.stdout))
    return result.stderr


@pytest.mark.slow
def test_a_real_search(tmp_path: Path) -> None:
    picture = tmp_path / "tuned.png"
    found: dict[str, Any] = {}
    text = tune(
        *("stored", "--seconds", "5", "--workers", "1,2", "--prefetch", "2", "--fetch-threads", "1,4"),
        *("--json", "--plot", str(picture)),
        json_too=found,
    )
    tried = [one["setting"] for one in found["tried"]]
    assert found["best"] in tried
    assert found["yours"] == {"executor": "process", "workers": 1, "prefetch_factor": 2, "fetch_threads": 1}
    assert {one["workers"] for one in tried} <= {0, 1, 2}
    assert {one["fetch_threads"] for one in tried} <= {1, 4}
    assert found["took_s"] > 0
    assert found["visits"] >= len(tried) >= 2
    assert found["limit"] in {limit.value for limit in Limit}
    for one in found["tried"]:
        bounds = one.get("seconds_per_step")
        if bounds is None:  # a busy machine left no time for a second visit
            continue
        assert 0 < bounds["low"] < bounds["mean"] < bounds["high"]
        assert one["last_visit"]["stages"]["read_s"] > 0
    assert picture.read_bytes().startswith(PNG)
    for part in ("batches/s", "best", "yours", "Limited by", "Rule: two settings are visited in turn", "█"):
        assert part in text
    rows = [line for line in text.splitlines() if re.match(r" *(process|thread|inline) +[\d-]", line)]
    assert len(rows) == len(tried)
    (code,) = [line for line in text.splitlines() if line.startswith("DataLoader(")]
    assert code == found["code"]
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    options = {one.arg or "": ast.literal_eval(one.value) for one in call.keywords}
    loader = DataLoader([1, 2], **options)  # type: ignore[arg-type]
    assert loader.num_workers == found["best"]["workers"]
    assert loader.fetch_threads == found["best"]["fetch_threads"]


@pytest.mark.slow
def test_beside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "_PAUSE_S", 0.0)
    text = tune("two_batches", "--seconds", "5", "--step-ms", "30", "--executors", "inline,thread", "--workers", "1")
    assert "steps/s" in text
    assert "waits" in text
    assert "inline" in text
    assert "An epoch has only 2 batches" in text
    assert text.startswith("making the loader: ")
    assert (
        text.index("reading with the loader's own settings") < text.index("s  visit 1: ") < text.index("s  visit 2: ")
    )
    assert "process" not in text.split("DataLoader(")[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--step-ms", "-1"), "--step-ms=-1.0 is not allowed: expected milliseconds >= 0 and <= 600,000"),
        (("--step-ms", "nan"), "--step-ms=nan is not allowed"),
        (("--step-ms", "1e9"), "--step-ms=1000000000.0 is not allowed"),
        (("--seconds", "1e9"), "--seconds=1000000000.0 is not allowed: expected seconds >= 5 and <= 86,400"),
        (("--workers", "1,99999"), "--workers='1,99999' is not allowed: expected whole numbers >= 1 and <= 512, sep"),
        (("--prefetch", "4,99999"), "--prefetch='4,99999' is not allowed"),
        (("--fetch-threads", "²"), "--fetch-threads='²' is not allowed"),
        (("--step-on-cpu",), "--step-on-cpu=True is not allowed: expected a step with it"),
        (("--seconds", "1"), "--seconds=1.0 is not allowed: expected seconds >= 5"),
        (
            ("--executors", "process,fibers"),
            "--executors='fibers' is not allowed: expected names of ('process', 'thread'",
        ),
        (("--workers", "0,1"), "--workers='0,1' is not allowed: expected whole numbers >= 1"),
        (("--prefetch", "two"), "--prefetch='two' is not allowed"),
        (("--fetch-threads", "-4"), "--fetch-threads='-4' is not allowed"),
        (("--plot", "nowhere/at/all.png"), "there is no folder for nowhere/at/all.png"),
        (("--plot", "/"), "/ is a folder, not a file"),
        (("--plot", "all.bars"), "--plot='all.bars' is not allowed: expected a name that ends in one of "),
    ],
)
def test_options_that_are_refused(options: tuple[str, ...], text: str) -> None:
    assert f"headrace tune: {text}" in tune("plain", *options, code=2)


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    assert 'pip install "headrace[plot]"' in tune("plain", "--plot", "all.png", code=2)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("failing", "the factory raised OSError: no such bucket"),
        ("of_torch", "the factory returned torch's own DataLoader"),
        ("of_numbers", "expected a headrace.DataLoader"),
        ("renamed", "Renamed does not take num_workers"),
        ("broken", "with the loader's own settings: ValueError: a torn file"),
        ("empty", "the loader has no batch at all"),
        ("once", "can be read once only"),
        ("sampled_once", "can be read once only"),
        ("absent", "tune_factories has no absent"),
        ("nowhere.py:loader", "there is no file nowhere.py"),
        ("headrace", "names no factory"),
    ],
)
def test_what_cannot_be_tuned_says_why(factory: str, text: str) -> None:
    target = factory if factory != "headrace" else "headrace:"
    said = tune(target, "--seconds", "5", code=2)
    (error,) = [line for line in said.splitlines() if line.startswith("headrace tune: ")]
    assert text in error
