"""The entry point: without the extras it says which to install, and shows no traceback."""

import runpy
import sys
from collections.abc import Callable
from functools import partial

import pytest

import headrace
from headrace.cli import main

AS_MODULE = partial(runpy.run_module, "headrace", run_name="__main__")  # python -m headrace
entries = pytest.mark.parametrize("entry", [main, AS_MODULE], ids=["headrace", "python -m headrace"])


def exit_code(entry: Callable[[], object] = main) -> object:
    with pytest.raises(SystemExit) as stopped:
        entry()
    return stopped.value.code


@entries
@pytest.mark.parametrize("missing", ["typer", "rich.console"])
def test_without_the_cli_extra(
    missing: str, entry: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("headrace.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # type: ignore[arg-type]
    assert exit_code(entry) == 2
    said = capsys.readouterr()
    package = missing.partition(".")[0]
    assert said.err == (
        f"headrace: the command line needs {package}, which is not installed: "
        'pip install "headrace[cli]" (in a checkout: pip install ".[cli]")\n'
    )
    assert not said.out


def test_without_the_demo_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", ["headrace", "demo"])
    assert exit_code() == 2
    said = capsys.readouterr()
    assert said.err.endswith('pip install "headrace[demo]" (in a checkout: pip install ".[demo]")\n')
    assert not said.out


def test_another_missing_module_is_not_blamed_on_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", "demo"])
    monkeypatch.setitem(sys.modules, "headrace.cli.demo.demo", None)  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match=r"headrace\.cli\.demo"):
        main()


@entries
def test_runs_the_command(
    entry: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", "plan", "--size", "3"])
    assert exit_code(entry) == 0
    assert capsys.readouterr().out.startswith("3 samples, 1 rank x 1: each sample once, no pads")


@entries
def test_tells_its_version(
    entry: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", "--version"])
    assert exit_code(entry) == 0
    assert capsys.readouterr().out == f"headrace {headrace.__version__}\n"
