"""What holds for every command: a new one has to be named here."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from typer.testing import CliRunner

import headrace.cli
from headrace.cli.app import app
from headrace.cli.demo import demo, launch

GROUP: Any = typer.main.get_command(app)
NAMES = sorted(GROUP.commands)
HOSTILE = "a[/b] [red] :smile: \x1b[2J\x9b1m\r\u202e"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")
MODULE = f"""
from headrace import DataLoader

class Dataset:
    def __len__(self):
        return 9

    def __getitem__(self, index):
        raise LookupError({HOSTILE!r})

def make():
    return DataLoader(Dataset(), seed=1)
"""
ARGUMENTS = {
    "plan": ("--shards", f"{HOSTILE}.tar"),
    "index": (f"{HOSTILE} 1.tar",),
    "inspect": (f"{HOSTILE} 2.tar",),
    "pack": (HOSTILE, "t-%d.tar"),
    "doctor": (),
    "demo": (),
    "verify": ("hostile_factory.py:make", "--executors", "inline"),
    "tune": ("hostile_factory.py:make", "--executors", "inline"),
}
"""Arguments with which a command shows texts that it has not made itself."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with hostile files, in an environment of hostile values."""
    Path(tmp_path, HOSTILE).parent.mkdir()
    Path(tmp_path, f"{HOSTILE} 1.tar").write_bytes(b"no archive" * 100)
    with tarfile.open(tmp_path / f"{HOSTILE} 2.tar", "w") as archive:
        for key in (HOSTILE, "0", HOSTILE):
            member = tarfile.TarInfo(f"{key}.{HOSTILE}".replace("/", ""))
            member.size = 1
            archive.addfile(member, BytesIO(b"1"))
    Path(tmp_path, "hostile_factory.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "hostile_factory", sys.modules[__name__])  # so that it is taken out afterwards
    del sys.modules["hostile_factory"]
    monkeypatch.setenv("WORLD_SIZE", HOSTILE)

    def run_ranks(*_: object, **__: object) -> NoReturn:
        raise launch.JobFailed(HOSTILE)

    monkeypatch.setattr(demo, "run_ranks", run_ranks)
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_texts_of_others_are_data(name: str, as_json: bool, folder: Path) -> None:
    arguments = [name, *ARGUMENTS[name], *["--json"] * as_json]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (0, 1, 2)
    said = result.stdout + result.stderr
    assert not OBEYED.search(said), said
    if name != "doctor" or not as_json:
        assert "[red] :smile:" in said
        assert re.search(r"\\+x1b\[2J", said), said
    if as_json and result.stdout:
        found = json.loads(result.stdout)
        assert name == "doctor" or found["exit_code"] == result.exit_code
    assert not as_json or bool(result.stdout) == (result.exit_code != 2) or name in ("demo", "verify", "tune")


@pytest.mark.parametrize("name", NAMES)
def test_wrong_words_are_one_line_without_a_traceback(name: str) -> None:
    result = CliRunner().invoke(app, [name, f"--{HOSTILE}"])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"headrace {name}: No such option: --a[/b] [red] :smile: \\x1b[2J")
    assert not OBEYED.search(result.stderr)
    assert result.stderr.endswith(f"\nTry 'headrace {name} --help'.\n")


@pytest.mark.parametrize("name", NAMES)
def test_help_has_an_example_that_can_be_parsed(name: str) -> None:
    said = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).stdout
    (line,) = [line.strip() for line in said.splitlines() if line.strip().startswith("Example: ")]
    program, command, *words = shlex.split(line.removeprefix("Example: "))
    assert (program, command) == ("headrace", name)
    GROUP.commands[name].make_context(name, words)
    assert "--json" in said


def test_help_imports_neither_torch_nor_numpy() -> None:
    job = f"""
import sys
from headrace.cli.app import app
for words in ([], ["--version"], *([name, "--help"] for name in {NAMES})):
    assert app(words, standalone_mode=False) in (0, None), words
heavy = {{"torch", "numpy", "ray", "rich.progress"}} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", job], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_is_printed_but_through_the_screen() -> None:
    """Elsewhere a text of the user's could be taken for markup, or its control characters reach the terminal."""
    source = Path(headrace.cli.__file__).parent
    jobs = [source / "demo" / "job.py", source / "demo" / "launch.py", source / "__init__.py"]  # whose facts are JSON
    for path in source.rglob("*.py"):
        if path in jobs or path.parent.name == "terminal":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            banned = {"print", "typer.echo", "typer.secho", "Console", "Live", "Progress", "Text.from_markup"}
            assert called not in banned | {"sys.stdout.write", "sys.stderr.write"}, f"{path}: {called}"
