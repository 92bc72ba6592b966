"""Code of the user that ends the process, at any time and in any way, is never taken for success."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app

LIMIT_S = 120
MAIN = "from headrace.cli import main; main()"
LOADER = """
import atexit, os, sys
from headrace import DataLoader

class Dataset:
    def __len__(self):
        return 9

    def __getitem__(self, index):
        {}
        return index

def make():
    {}
    return DataLoader(Dataset(), seed=1)

{}
"""
COMMANDS = {
    "verify": ("--executors", "inline", "--worlds", "1"),
    "tune": ("--executors", "inline", "--seconds", "5"),
    "pack": ("of_mine-%d.tar", "--fields", "cls"),
}


def module(place: int = -1, end: str = "") -> str:
    """A module that ends the process at one of the places."""
    return LOADER.format(*(end if one == place else "pass" for one in range(3)))


def target(command: str, place: int) -> str:
    return "of_mine.py:Dataset" if command == "pack" and place == 0 else "of_mine.py:make"


def run(folder: Path, command: str, code: str, factory: str = "of_mine.py:make") -> "subprocess.CompletedProcess[str]":
    (folder / "of_mine.py").write_text(code)
    arguments = [sys.executable, "-c", MAIN, command, factory, *COMMANDS[command]]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=folder)


@pytest.mark.parametrize(
    ("command", "place", "end"),
    [("verify", 0, "os._exit(0)"), ("tune", 2, 'os.execv("/bin/true", ["true"])'), ("pack", 0, "os._exit(0)")],
)
def test_ends_that_cannot_be_caught(command: str, place: int, end: str, tmp_path: Path) -> None:
    """In a sample (0), in the factory (1) or when the module is imported (2)."""
    done = run(tmp_path, command, module(place, end), target(command, place))
    assert done.returncode == 2, done.stdout + done.stderr
    early = (
        "ended with exit code 0 before there was a result" if command != "pack" else "a process ended while it was pack"
    )
    assert early in done.stderr
    assert "Traceback" not in done.stderr
    assert "PASSED" not in done.stdout


CASES = [(command, place, "sys.exit(0)") for command in COMMANDS for place in range(3)]
CASES += [("verify", place, "raise BaseException(0)") for place in range(3)]


@pytest.mark.parametrize(("command", "place", "end"), CASES)
def test_ends_that_are_exceptions(
    command: str, place: int, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_mine.py").write_text(module(place, end))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(
        sys.modules, "of_mine", sys.modules[__name__]
    )  # so that it is put back, or taken out, afterwards
    del sys.modules["of_mine"]
    result = CliRunner().invoke(app, [command, target(command, place), *COMMANDS[command]])
    assert result.exit_code == 2, result.output
    assert ("SystemExit(0), which would end the process" if "exit" in end else "BaseException: 0") in result.output
    assert "PASSED" not in result.output


def test_what_happens_after_the_result_does_not_change_it(tmp_path: Path) -> None:
    done = run(tmp_path, "verify", module(2, "atexit.register(lambda: os._exit(7))"))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("PASSED (")


def test_a_reader_that_goes_away_does_not_change_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "of_mine.py").write_text(module(0, "index += __import__('time').time()"))
    command = [sys.executable, "-c", MAIN, "verify", "of_mine.py:make", *COMMANDS["verify"]]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(LIMIT_S) == 1


def test_the_log_and_the_warnings_of_a_module_are_escaped(tmp_path: Path) -> None:
    said = "import logging, warnings\nwarnings.warn('w\\x1b[2J')\nlogging.getLogger('a').warning('l\\x9b2J')\n"
    done = run(tmp_path, "pack", said + module(1, "return range(0)"))
    assert "\x1b" not in done.stderr
    assert "UserWarning: w\\x1b[2J" in done.stderr
    assert "l\\x9b2J" in done.stderr


def test_an_interrupt_of_the_module_is_no_success(tmp_path: Path) -> None:
    done = run(tmp_path, "verify", "raise KeyboardInterrupt")
    assert (done.returncode, done.stderr) == (130, "headrace verify: interrupted\n")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, -15), (signal.SIGKILL, -9)], ids=str)
def test_a_signal_reaches_the_process_that_works(signum: signal.Signals, code: int, tmp_path: Path) -> None:
    """The module says which process imports it, and waits; its end of a pipe is closed when that process is gone."""
    reader, writer = os.pipe()
    (tmp_path / "of_mine.py").write_text(f"import os, signal\nos.write({writer}, b'!')\nsignal.pause()\n")
    command = [sys.executable, "-c", MAIN, "verify", "of_mine.py:make"]
    with subprocess.Popen(command, cwd=tmp_path, pass_fds=[writer], stderr=subprocess.DEVNULL) as process:
        os.close(writer)
        assert os.read(reader, 1) == b"!"
        process.send_signal(signum)
        assert process.wait(LIMIT_S) == code
        assert os.read(reader, 1) == b""  # returns when the last process has ended
    os.close(reader)
