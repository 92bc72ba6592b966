"""The house: floors import downward only, rooms on one floor do not know each other, files stay short."""

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headrace"
MOST_LINES = 450
PURE = {"numpy", "headrace", "abc", "bisect", "collections", "dataclasses", "functools", "hashlib", "math", "operator"}
PURE |= {"typing"}
MODULES = sorted(SOURCE.rglob("*.py"))
PYTHON_FILES = sorted(
    path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
ROW = re.compile(r"^\| (\d*) ?\| `([\w/]+)` \| (.+) \|$", re.MULTILINE)
ROWS: list[tuple[str, str, str]] = ROW.findall((ROOT / "docs" / "design.md").read_text().partition("## The house")[2])
FLOORS = {room.rstrip("/"): int(floor) for floor, room, _ in ROWS if floor}
NAMES = {".".join(("headrace", *path.relative_to(SOURCE).with_suffix("").parts)): path for path in MODULES}
NAMES = {name.removesuffix(".__init__"): path for name, path in NAMES.items()}


def room_of(path: Path) -> str:
    """The part of the house a file belongs to; "" for the package's own face."""
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def folder_of(name: str) -> str:
    """The folder that a module lies in; what a folder shows of itself stands apart from what lies in it."""
    path = NAMES[name].relative_to(SOURCE)
    return str(path) if path.name == "__init__.py" else str(path.parent)


def imported(node: ast.AST) -> list[str]:
    """The modules that an import statement names, as dotted paths."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide where things come from"
        paths = [f"{node.module}.{alias.name}" for alias in node.names]
        return [path if path in NAMES else node.module or "" for path in paths]
    return []


def imports_of(path: Path) -> list[str]:
    return [name for node in ast.walk(ast.parse(path.read_text())) for name in imported(node)]


def test_the_design_page_lists_every_room_and_folder() -> None:
    assert {room_of(path) for path in MODULES} - {""} == FLOORS.keys()
    folders = {f"{path.parent.relative_to(SOURCE)}/" for path in MODULES} - {"./"}
    assert folders == {room for _, room, _ in ROWS if room.endswith("/")}


@pytest.mark.parametrize("path", [path for path in MODULES if path.name == "__init__.py"], ids=lambda path: str(path))
def test_each_folder_says_in_a_sentence_what_lives_there(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text()))
    assert said
    assert len(said.splitlines()) == 1
    assert said.endswith(".")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downward(path: Path) -> None:
    room = room_of(path)
    if not room:
        return
    for name in imports_of(path):
        package, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if package == "headrace" and target != room:
            assert FLOORS[target] < FLOORS[room], f"{room} must not import {name}"


def cycle_in(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """A way from a node back to itself; empty if there is none."""
    finished: set[str] = set()

    def follow(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in finished:
            return []
        for target in graph[node]:
            if found := follow(target, [*way, node]):
                return found
        finished.add(node)
        return []

    for node in graph:
        if found := follow(node, []):
            return found
    return []


def test_no_cycles_of_modules() -> None:
    assert cycle_in({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]
    graph = {name: {one for one in imports_of(path) if one in NAMES and one != name} for name, path in NAMES.items()}
    assert cycle_in(graph) == []


def test_no_cycles_of_folders() -> None:
    graph: dict[str, set[str]] = {folder_of(name): set() for name in NAMES}
    for name, path in NAMES.items():
        graph[folder_of(name)] |= {folder_of(one) for one in imports_of(path) if one in NAMES} - {folder_of(name)}
    del graph["__init__.py"]  # the package's own face
    graph = {folder: targets - {"__init__.py"} for folder, targets in graph.items() if folder != "."}
    graph = {
        folder: targets - {"."} for folder, targets in graph.items()
    }  # modules at the top have floors of their own
    assert cycle_in(graph) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_inside_functions_are_for_optional_dependencies(path: Path) -> None:
    always_there = {"torch", "numpy", *sys.stdlib_module_names}
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in (name for node in ast.walk(function) for name in imported(node)):
                # The command line's own modules need an extra, so its entry point may import them late.
                late = room_of(path) == "cli" and name.startswith("headrace.cli")
                assert late or name.split(".")[0] not in {*always_there, "headrace"}, f"{name} in {function.name}"


def test_the_plan_is_pure() -> None:
    for path in (SOURCE / "plan").rglob("*.py"):
        assert {name.split(".")[0] for name in imports_of(path)} <= PURE, path


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES
