"""Running a command of headrace in this process."""

import sys

import pytest

from headrace.cli import main


def run_command(command: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command on a wide terminal; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["headrace", command, *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        main()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code
