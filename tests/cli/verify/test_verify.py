"""`headrace verify`: good loaders pass in every cell, bad ones fail with the reason; what cannot be verified says so.

The cells that kill workers are in test_kills.py.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.verify.cells import EXECUTORS, RESUMES, WORKERS, WORLDS, Cell, covering_cells, every_cell
from waiting import wait_for_reapers

FILE = Path(__file__).parent / "verify_factories.py"
DRAW = "Draw from headrace.rng()"
INDEX = "Make the sample a function of its index alone"
LIMIT_S = 500
ONE_MORE = ("--executors", "inline", "--worlds", "1")
WAITING = """
import time
from pathlib import Path
from headrace import DataLoader

fetches = 0

class Waiting:
    def __len__(self):
        return 9

    def __getitem__(self, index):
        global fetches
        fetches += 1
        limit = time.monotonic() + 60
        while fetches > 9 and not Path("seen").exists():
            assert time.monotonic() < limit, "nobody has seen the reference's row"
        return index

def make():
    return DataLoader(Waiting(), seed=1)
"""
FEW = ("--executors", "inline,fork", "--workers", "1,2", "--worlds", "1,3")


@pytest.fixture(autouse=True)
def _imports_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test import factories as if for the first time."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    wait_for_reapers()
    for name in set(sys.modules) - before:
        if name in ("verify_factories", "of_mine", "broken_import"):
            del sys.modules[name]


def verify(factory: str, *options: str, code: int = 0, kills: bool = False) -> str:
    """Run the command and return what it said, on one line a line."""
    target = factory if ":" in factory else f"{FILE}:{factory}"
    arguments = ["verify", target, *options, *([] if kills else ["--no-kills"])]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result.output


def rows(text: str) -> list[list[str]]:
    return [
        line.split() for line in text.splitlines() if line.split() and line.split()[0] in (*EXECUTORS, "forkserver")
    ]


@pytest.mark.parametrize(
    "factory",
    [
        *(
            "good",
            "seeded",
            "of_position",
            "unbatched",
            "dropping",
            "exact",
            "subset",
            "weighted",
            "bucketed",
            "epoch_samples",
            "subclass",
            "tensors",
            "told",
        ),
    ],
)
def test_good_loaders_pass(factory: str) -> None:
    text = verify(factory, "--executors", "inline,thread,fork")
    found = rows(text)
    assert len(found) == 16
    digests = {row[5] for row in found}
    assert len(digests) == 1
    assert found[0][-1] == "reference"
    assert {row[-1] for row in found[1:]} == {"ok"}
    assert f"16 cells, one digest: {digests.pop()}" in text
    assert ("so seed=0 is set" in text) == (factory != "good")


def test_ranks_of_unequal_shares_go_on_to_the_next_epoch() -> None:
    """Resumed near its end, an epoch has no step left for some ranks: they find out by asking."""
    text = verify("exact", "--executors", "inline,fork", "--workers", "1", "--full", "--epochs", "3")
    assert "41 cells, one digest" in text


def test_warnings_come_once_and_only_those_that_the_loader_gives() -> None:
    text = verify("good", "--executors", "thread", "--workers", "4")
    warned = [line for line in text.splitlines() if line.startswith("warned")]
    assert len(warned) == 1
    assert "draws from the global generator" in warned[0]


def test_only_the_first_samples_of_each_epoch() -> None:
    text = verify("good", *FEW, "--epochs", "2", "--samples", "17")
    assert text.startswith("17 of 40 samples of 2 epochs each, in batches of 1")
    assert {row[6] for row in rows(text)} == {"34"}
    assert "11 cells, one digest" in text


def test_two_epochs_in_each_cell() -> None:
    """Those of a spawned worker are read where one is killed."""
    text = verify("good", "--executors", "inline,thread,fork", "--workers", "1", "--worlds", "1", "--epochs", "2")
    assert {row[6] for row in rows(text)} == {"80"}
    assert "16 cells, one digest" in text


def test_the_digest_depends_on_the_samples_alone() -> None:
    said = [verify("good", "--executors", "inline", "--worlds", "1") for _ in range(2)]
    assert rows(said[0])[0][5] == rows(said[1])[0][5]
    assert rows(verify("seeded", "--executors", "inline"))[0][5] != rows(said[0])[0][5]


def test_the_whole_product() -> None:
    text = verify("good", "--executors", "inline,fork", "--workers", "2", "--worlds", "1,2", "--full")
    assert len(rows(text)) == 1 + 10 + 10
    assert "21 cells, one digest" in text


BLAMED = {
    "private": ['differs in ["image"]', "system's entropy", "noise = np.random.default_rng().random()", DRAW],
    "identified": ["system's entropy", "uuid.uuid4().hex", "verify_factories.py:", DRAW],
    "kept_numpy": ["dataset.parts['noise'][0] (a numpy.random.Generator)", "differs in [1]", DRAW],
    "kept_random": ["dataset.parts['noise'][0] (a random.Random)", DRAW],
    "kept_torch": ["dataset.parts['noise'][0] (a torch.Generator)", DRAW],
    "of_module": ["verify_factories.MODULES_OWN (a numpy.random.Generator)", DRAW],
    "clock": ["reads the clock (time.time)", "return [index, time.time()]", INDEX],
    "counting": ["how many were fetched before", "dataset.count went from 1 to 2", INDEX],
    "counting_in_class": ["how many were fetched before", "verify_factories.CountingInClass.count went from", INDEX],
    "counting_in_module": ["how many were fetched before", "verify_factories.fetched went from", INDEX],
    "numbering": ["how many were fetched before", "verify_factories.NUMBERS went from count(", INDEX],
    "seldom": ["verify_factories.NUMBERS went from count(", INDEX],
    "remembering": ["which samples the same process fetched before it", "dataset.largest went from 0 to", INDEX],
    "put_back": ["copies the state of a global generator, or puts it back after drawing", INDEX],
    "copied": ["copies the state of a global generator, or puts it back after drawing", INDEX],
    "by_worker": ["get_worker_info()", INDEX],
    "by_process": ["another in each process", "the process's number (os.getpid)", "return index, os.getpid()", INDEX],
    "built": [
        "not in every one that the factory makes",
        "self.table = np.random.default_rng().random(N)",
        "Every rank builds its own",
    ],
    "in_bulk": ["__getitems__ of its own", "batch size"],
}


@pytest.mark.parametrize("factory", BLAMED)
def test_what_is_to_blame_is_named(factory: str) -> None:
    text = verify(factory, *FEW, code=1)
    for part in BLAMED[factory]:
        assert part in text, text
    assert "DIFFERS" in text
    assert re.search(r"position \d+ of epoch 0, dataset index \d+", text)
    said = " ".join(BLAMED[factory])
    assert ("system's entropy" in text) == ("system's entropy" in said or factory == "built")
    assert ("the clock" in text) == ("the clock" in said)


def test_a_thread_is_to_blame() -> None:
    text = verify("by_thread", "--executors", "inline,thread", code=1)
    assert "which thread fetches it" in text
    assert "the thread (threading.current_thread)" in text


def test_what_each_thread_keeps_is_to_blame() -> None:
    text = verify("of_threads", "--executors", "inline,thread", code=1)
    assert "which thread fetches it" in text
    assert "The first fetch sets what later ones use: verify_factories.OF_THREADS.drawn (a float) is new" in text


@pytest.mark.parametrize(
    ("factory", "parts"),
    [
        (
            "on_first_use",
            (
                "which sample its process fetched first",
                "verify_factories.ON_FIRST_USE['drawn'] (a float) is new",
                "verify_factories.drawn went from 0 items to 1 items",
            ),
        ),
        ("by_hash", ("hashes of text (as the order of a set does)",)),
    ],
)
def test_what_only_shows_in_new_interpreters(factory: str, parts: tuple[str, ...]) -> None:
    text = verify(factory, "--executors", "spawn", "--workers", "1", "--worlds", "3", code=1)
    assert {row[0] for row in rows(text)} == {"inline", "forkserver"}
    for part in parts:
        assert part in text, text


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="torch computes with one thread here, as workers do")
def test_torchs_threads_are_as_many_inline() -> None:
    assert "DIFFERS" not in verify("rounding", *FEW)


def test_the_place_and_the_cell_are_right() -> None:
    text = verify("by_worker", "--executors", "fork", "--workers", "2", "--worlds", "1", code=1)
    # The first batch is worker 0's, the second is worker 1's: inline there is neither.
    assert "position 0 of epoch 0" in text
    assert "in the cell fork, 2 workers, world of 1" in text


def test_a_sample_that_raises() -> None:
    text = verify("broken", *FEW, code=2)
    assert "ValueError: a torn file" in text
    assert "headrace: " in text
    assert "7" in text.partition("headrace: ")[2].splitlines()[0], "the note names the sample"
    assert len(rows(text)) == 1, "nothing is compared with a reference that failed"


def test_a_sample_that_raises_only_in_workers() -> None:
    """The reference was read, so the cells are compared: they fail."""
    text = verify("broken_in_workers", "--executors", "fork", "--workers", "1", "--worlds", "1", code=1)
    assert [row[-1] for row in rows(text)] == ["reference", *["error"] * 5]
    assert text.count("ValueError: no such file") == 1
    assert "Traceback" not in text


def test_a_collate_fn_that_raises() -> None:
    assert "TypeError: samples of different shapes" in verify("broken_collate", *FEW, code=2)


@pytest.mark.slow
def test_what_cannot_be_pickled_is_not_spawned() -> None:
    text = verify("unpicklable", "--executors", "spawn", "--workers", "1", "--worlds", "1")
    assert text.count("skipped") == 6
    assert "5 cells skipped: the dataset, collate_fn and worker_init_fn must be picklable" in text
    assert "1 cell, one digest" in text


REFUSED = {
    "iterable": "a Stream, is iterable",
    "torchs": "torch's own DataLoader",
    "sampler": "a sampler of its own (RandomSampler)",
    "batch_sampler": "a sampler of its own (list)",
    "nothing": "returned a builtins.NoneType: expected a headrace.DataLoader",
    "empty": "An empty dataset has no order",
    "fixed": "Fixed does not take",
    "forgetting": "Forgetting does not keep its argument root",
    "failing": "the factory raised FileNotFoundError: /data is not mounted",
    "absent": "verify_factories has no absent",
    "not_callable": "is a int: expected a function",
    "/nowhere/data.py:make": "there is no file /nowhere/data.py",
    "no_such_module:make": "no_such_module cannot be imported: ModuleNotFoundError",
    "random.py": "names no factory",
}


@pytest.mark.parametrize("factory", REFUSED)
def test_what_cannot_be_verified_says_why(factory: str) -> None:
    target = factory if ":" in factory or factory.endswith(".py") else f"{FILE}:{factory}"
    result = CliRunner().invoke(app, ["verify", target, *FEW])
    assert result.exit_code == 2, result.output
    assert REFUSED[factory] in result.stderr
    assert result.stderr.startswith("headrace verify: ")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--executors", "ray"], "--executors='ray' is not allowed"),
        (["--workers", "0"], "--workers='0' is not allowed: expected whole numbers >= 1"),
        (["--worlds", "two"], "--worlds='two' is not allowed"),
        (["--epochs", "0"], "--epochs=0 is not allowed"),
        (["--samples", "0"], "--samples=0 is not allowed"),
        (["--workers", "1" + "0" * 20], "expected whole numbers >= 1 and <= 128, separated by commas"),
        (["--workers", "9" * 5000], "is not allowed"),
        (["--worlds", "1,99999999"], "expected whole numbers >= 1 and <= 1,024, separated by commas"),
        (
            ["--workers", "64", "--worlds", "512", "--full"],
            "--workers=64 is not allowed: expected at most 1,024 workers",
        ),
        (["--epochs", "99999999"], "--epochs=99999999 is not allowed: expected an integer in [1, 1000]"),
        (["--samples", "1" + "0" * 23], "is not allowed: expected an integer in [1, 1000000]"),
    ],
)
def test_wrong_options_say_what_is_allowed(options: list[str], text: str) -> None:
    result = CliRunner().invoke(app, ["verify", f"{FILE}:good", *options])
    assert result.exit_code == 2
    assert text in result.stderr


def test_modules_are_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_mine.py").write_text(
        "from headrace import DataLoader\n\ndef make():\n    return DataLoader(range(9))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert "one digest" in verify("of_mine:make", "--executors", "inline")


def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "broken_import.py").write_text("import no_such_thing\n")
    text = verify(f"{tmp_path}/broken_import.py:make", code=2)
    assert "broken_import cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'" in text


def test_a_file_named_as_a_module_that_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("")
    assert "give it another name" in verify(f"{tmp_path}/random.py:make", code=2)


def test_the_cover_has_each_value_with_each_executor() -> None:
    cells = covering_cells(EXECUTORS, WORKERS, WORLDS, kills=True)
    assert 20 <= len(cells) <= 30
    for executor in EXECUTORS:
        mine = [cell for cell in cells if cell.executor == executor]
        assert {cell.world for cell in mine} == set(WORLDS)
        assert {cell.resume for cell in mine} >= set(RESUMES)
        assert {cell.workers for cell in mine} == ({1} if executor == "inline" else set(WORKERS))
        assert any(cell.kill for cell in mine) == (executor in ("fork", "spawn"))
        assert any(cell.persistent for cell in mine) == (executor != "inline")
    assert len(set(cells)) == len(cells)


def test_the_product_has_every_cell_once() -> None:
    cells = every_cell(EXECUTORS, WORKERS, WORLDS, kills=True)
    assert len(cells) == len(set(cells)) == 20 + 60 + 120 + 120
    assert Cell("spawn", 4, 3, "mid", True) in cells
    assert not any(cell.kill for cell in every_cell(EXECUTORS, WORKERS, WORLDS, kills=False))


def test_the_cover_spawns_each_worker_where_they_are_few() -> None:
    cells = covering_cells(["spawn"], WORKERS, WORLDS, kills=True)
    spawned = [cell for cell in cells if cell.kind == "spawn"]
    assert {cell.workers for cell in spawned} == {cell.world for cell in spawned} == {1, 2}
    assert any(cell.kill for cell in spawned)
    assert {cell.kind for cell in cells} == {"spawn", "forkserver"}


def test_a_short_terminal_shows_where_it_is() -> None:
    """As many rows as there are, and a line with the running cell below them."""
    options = ["--executors", "inline,thread", "--workers", "1", "--worlds", "1", "--full"]
    environment = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80", "LINES": "6"}
    result = CliRunner().invoke(app, ["verify", f"{FILE}:good", *options], env=environment)
    said = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", result.output).replace("\r", "\n")
    cells = len(re.findall(r"^(?:inline|thread) .* (?:ok|reference)$", said, re.MULTILINE))
    assert cells == 11
    for number in range(1, cells + 1):
        assert f"{number} of {cells}: " in said
    assert "5 of 11: inline, world of 1, resumed at step last-1" in said
    assert re.fullmatch(r"PASSED \(\d+ s\)", said.splitlines()[-1])


def test_a_row_is_printed_when_its_cell_is_done(tmp_path: Path) -> None:
    """The second cell's dataset waits for whoever reads the output to have seen the first cell's row."""
    seen = tmp_path / "seen"
    (tmp_path / "of_mine.py").write_text(WAITING)
    with subprocess.Popen(
        [sys.executable, "-c", "from headrace.cli import main; main()", "verify", "of_mine.py:make", *ONE_MORE],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "reference" in line:
                seen.touch()
        assert process.wait(LIMIT_S) == 0


@pytest.mark.slow
def test_the_installed_command_with_every_executor(tmp_path: Path) -> None:
    """Spawned workers import the factory's file, and the command is not their main module."""
    options = ["--workers", "1", "--worlds", "1", "--no-kills"]
    done = subprocess.run(
        [sys.executable, "-c", "from headrace.cli import main; main()", "verify", f"{FILE}:good", *options],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row[0] for row in rows(done.stdout)} == set(EXECUTORS)
    assert {row[6] for row in rows(done.stdout)} == {"40"}
    assert "21 cells, one digest" in done.stdout
    assert not done.stderr
