"""The code in the README and in docs/ runs. `tests/docs/blocks.py` says how the pages tell tests what to do with it."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from docs.blocks import PAGES, ROOT, Block, Group, blocks_of, groups_of, inline_commands
from headrace.cli.app import app
from scripts import ScriptServer

COMMANDS: Any = typer.main.get_command(app)


def ids(items: Any) -> dict[str, Any]:
    return {"argvalues": items, "ids": lambda item: item.name}


def run(groups: list[Group], folder: Path, scripts: ScriptServer) -> None:
    """Run groups, and see that each succeeds and prints what it should."""
    (folder / "groups.json").write_text(json.dumps([(group.steps, group.ranks) for group in groups]))
    with scripts.start(ROOT / "tests" / "docs" / "run_blocks.py", str(folder)) as script:
        told = script.communicate()
    assert (script.returncode, told) == (0, ("", "")), told
    for number, group in enumerate(groups):
        printed = "".join(file.read_text() for file in sorted(folder.glob(f"{number}.*.txt")))
        assert not (folder / f"{number}.failed").exists(), f"{group.name}:\n{printed}"
        for text in group.prints:
            assert text in printed, f"{group.name} does not print {text!r}:\n{printed}"


def plain(group: Group) -> bool:
    return not (group.needs or group.on_ray or group.on_gpu)


ALL = {page.name: groups_of(page) for page in PAGES}
PLAIN = [page for page in PAGES if any(map(plain, ALL[page.name]))]
NEEDY = [group for groups in ALL.values() for group in groups if group.needs and not group.on_ray]
ON_GPU = [group for groups in ALL.values() for group in groups if group.on_gpu]


@pytest.mark.slow
@pytest.mark.parametrize("page", **ids(PLAIN))
def test_code_of_a_page_runs(page: Path, tmp_path: Path, scripts: ScriptServer) -> None:
    run([group for group in ALL[page.name] if plain(group)], tmp_path, scripts)


@pytest.mark.slow
@pytest.mark.parametrize("group", **ids(NEEDY))
def test_code_that_needs_another_package_runs(group: Group, tmp_path: Path, scripts: ScriptServer) -> None:
    for module in group.needs:
        pytest.importorskip(module)
    run([group], tmp_path, scripts)


@pytest.mark.ray
@pytest.mark.slow
def test_code_that_needs_ray_runs(tmp_path: Path, scripts: ScriptServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    groups = [group for groups in ALL.values() for group in groups if group.on_ray]
    assert groups
    monkeypatch.setenv("RAY_ADDRESS", str(ray.get_runtime_context().gcs_address))
    run(groups, tmp_path, scripts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU: torch.cuda.is_available() is False")
@pytest.mark.parametrize("group", **ids(ON_GPU))
def test_code_that_needs_a_gpu_runs(group: Group, tmp_path: Path, scripts: ScriptServer) -> None:
    run([group], tmp_path, scripts)


@pytest.mark.parametrize("group", **ids([*ON_GPU, *NEEDY]))
def test_code_that_needs_what_may_not_be_here_compiles(group: Group) -> None:
    for _, code, file, _ in group.steps:
        compile(code, file, "exec")


def commands_in_blocks(page: Path) -> list[tuple[Block, list[str]]]:
    return [(block, words) for block in blocks_of(page) if block.language != "python" for words in block.commands]


@pytest.mark.parametrize("page", **ids(PAGES))
def test_commands_can_be_parsed(page: Path) -> None:
    for _, (_, name, *words) in commands_in_blocks(page):
        COMMANDS.commands[name].make_context(name, words)
    for _, name, *words in inline_commands(page):
        options = {option for parameter in COMMANDS.commands[name].params for option in parameter.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options | {"--help"}, words


def test_some_commands_are_parsed() -> None:
    assert sum(len(commands_in_blocks(page)) for page in PAGES) >= 6
    assert sum(len(inline_commands(page)) for page in PAGES) >= 6


def test_extras_that_pages_and_errors_name_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [path.read_text() for path in (*PAGES, *(ROOT / "src").rglob("*.py"))]
    pattern = r'(?:headrace|\.)\[([a-z,-]+)\]|MissingExtra\(.*, "([a-z-]+)"\)'
    lists = [given or passed for text in texts for given, passed in re.findall(pattern, text)]
    named = {extra for given in lists for extra in given.split(",")}
    assert {"cli", "ray", "ray-client", "images", "zstd", "demo"} <= named
    assert named <= extras.keys()
