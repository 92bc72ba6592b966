"""Worker processes that do not come up: one error, which says why."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from executors.mortal_datasets import KillsUnpickled, Unloadable
from headrace import DataLoader, WorkerDied
from waiting import LIMIT_S

pytestmark = pytest.mark.filterwarnings("ignore:DataLoader worker")  # of a process that is replaced


def a_loader(dataset: Any, seed: int | None = 3) -> DataLoader[Any]:
    return DataLoader(dataset, num_workers=1, seed=seed, multiprocessing_context="forkserver")


def test_a_process_that_ends_while_it_unpickles_is_an_error_that_names_the_guard(tmp_path: Path) -> None:
    loader = a_loader(KillsUnpickled(tmp_path, times=100))
    with pytest.raises(WorkerDied) as caught:
        list(loader)
    assert "exit code 9" in str(caught.value.__cause__)
    assert loader.stats().restarts == 1
    assert any("start method 'forkserver'" in note and "__main__" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("seed", [None, 3])
def test_what_a_worker_cannot_load_is_one_error_with_the_workers_traceback(seed: int | None) -> None:
    loader = a_loader(Unloadable(), seed=seed)
    with pytest.raises(ModuleNotFoundError, match=r"(?s)process 0.\nOriginal Traceback.*in _only_here") as caught:
        next(iter(loader))
    assert any("while it unpickled the dataset" in note for note in caught.value.__notes__)
    assert loader.stats().restarts == 0


_NO_GUARD = """
from headrace import DataLoader
list(DataLoader(list(range(8)), num_workers=2, seed=1, multiprocessing_context="spawn"))
"""


def test_a_script_without_a_main_guard_is_told_so_in_a_few_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_NO_GUARD)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=2 * LIMIT_S)
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback (most recent call last)") == 1, "the children add none"
    assert "WorkerDied" in ended.stderr
    assert 'below `if __name__ == "__main__":`' in ended.stderr.splitlines()[-1]
