"""`headrace verify` kills workers in the midst of an epoch, and the samples are the same bits all the same."""

import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.verify import cells as verify_cells
from headrace.cli.verify.cells import REFERENCE, Cell, Subject
from headrace.loader import DataLoader
from headrace.testing import FakeDataset

FILE = Path(__file__).parent / "verify_factories.py"


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How the workers ended that were killed."""
    codes: list[int] = []
    kill = verify_cells._kill

    def kill_and_note(process: Any) -> None:
        kill(process)
        codes.append(process.exitcode)

    monkeypatch.setattr(verify_cells, "_kill", kill_and_note)
    return codes


def subject() -> Subject:
    return Subject(lambda: DataLoader(FakeDataset(40), batch_size=4, shuffle=True, seed=3), epochs=2, samples=40)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("resume", ["-", "mid"])
def test_a_killed_worker_loses_and_doubles_nothing(workers: int, resume: str, killed: list[int]) -> None:
    one = subject()
    outcome = one.run(Cell("fork", workers, 2, resume, kill=True))
    assert killed == [-signal.SIGKILL]
    assert not outcome.error
    assert outcome.digests == one.run(REFERENCE).digests


@pytest.mark.slow
def test_a_killed_worker_that_was_spawned(killed: list[int]) -> None:
    one = subject()
    outcome = one.run(Cell("spawn", 2, 1, kill=True))
    assert killed == [-signal.SIGKILL]
    assert not outcome.error
    assert outcome.digests == one.run(REFERENCE).digests


def test_the_command_kills_unless_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FILE.parent))
    options = ["--executors", "fork", "--workers", "1,2", "--worlds", "1"]
    result = CliRunner().invoke(app, ["verify", f"{FILE}:good", *options])
    assert result.exit_code == 0, result.output
    assert "7 cells, one digest" in result.stdout
    assert any("one" in line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["fork"])
