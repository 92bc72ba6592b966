"""Code of the user that ends the process, at any time and in any way, is never taken for success."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
ENDS = {"sys.exit(0)": "calls sys.exit(0)", "os._exit(0)": "ended with exit code 0 before there was a result"}
ENDS |= {"sys.exit()": "calls sys.exit()", 'os.execv("/bin/true", ["true"])': "before there was a result"}
COMMANDS = {
    "verify": ("--executors", "inline", "--worlds", "1"),
    "tune": ("--executors", "inline", "--seconds", "5"),
    "pack": ("of_mine-%d.tar", "--fields", "cls"),
}


def run(folder: Path, command: str, module: str, *options: str) -> "subprocess.CompletedProcess[str]":
    (folder / "of_mine.py").write_text(module)
    target = "of_mine.py:make"
    arguments = [sys.executable, "-c", MAIN, command, target, *COMMANDS[command], *options]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=folder)


@pytest.mark.parametrize(
    ("command", "place", "end"),
    [
        ("verify", 2, "sys.exit(0)"),
        ("verify", 2, "os._exit(0)"),
        ("verify", 1, "sys.exit()"),
        ("verify", 0, "os._exit(0)"),
        ("tune", 2, 'os.execv("/bin/true", ["true"])'),
        ("tune", 0, "sys.exit(0)"),
        ("pack", 2, "os._exit(0)"),
        ("pack", 1, "sys.exit(0)"),
    ],
)
def test_ends_before_the_result(command: str, place: int, end: str, tmp_path: Path) -> None:
    """In a sample (0), in the factory (1) or when the module is imported (2)."""
    parts = ["pass", "pass", "pass"]
    parts[place] = end
    done = run(tmp_path, command, LOADER.format(*parts))
    assert done.returncode == 2, done.stdout + done.stderr
    assert ENDS[end] in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "PASSED" not in done.stdout


def test_what_happens_after_the_result_does_not_change_it(tmp_path: Path) -> None:
    module = LOADER.format("pass", "pass", "atexit.register(lambda: os._exit({}))")
    assert run(tmp_path, "verify", module.format(0), "--samples", "0").returncode == 2
    done = run(tmp_path, "verify", module.format(7))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("PASSED (")


def test_an_interrupt_of_the_module_is_no_success(tmp_path: Path) -> None:
    done = run(tmp_path, "verify", "raise KeyboardInterrupt")
    assert (done.returncode, done.stderr) == (130, "headrace verify: interrupted\n")


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)], ids=str
)
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
