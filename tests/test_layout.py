"""The house: floors import downward only, rooms on one floor do not know each other, files stay short."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headrace"
FLOORS = {
    "errors": 0,
    "interrupts": 0,
    "version": 0,
    "types": 1,
    "forking": 1,
    "checksum": 0,
    "gather": 2,
    "plan": 2,
    "telemetry": 2,
    "torch_threads": 2,
    "world": 2,
    "agreement": 3,
    "randomness": 3,
    "share": 3,
    "data": 4,
    "fetch": 4,
    "memory": 4,
    "streaming": 4,
    "work": 5,
    "executors": 6,
    "delivery": 7,
    "options": 8,
    "schedule": 8,
    "passes": 9,
    "sampling": 9,
    "loader": 10,
    "testing": 11,
    "cli": 11,
    "__main__": 12,
}
PURE = {"numpy", "headrace", "hashlib", "math", "operator", "functools", "collections", "dataclasses", "typing", "abc"}
MODULES = sorted(SOURCE.rglob("*.py"))
PYTHON_FILES = sorted(
    path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)


def room_of(path: Path) -> str:
    """The part of the house a file belongs to; "" for the package's own face."""
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported(node: ast.AST) -> list[str]:
    """The modules that an import statement names, as dotted paths."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide where things come from"
        if node.module == "headrace":
            return [f"headrace.{alias.name}" for alias in node.names]
        return [node.module or ""]
    return []


def imports_of(path: Path) -> list[str]:
    return [name for node in ast.walk(ast.parse(path.read_text())) for name in imported(node)]


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in MODULES} - {""} <= FLOORS.keys()


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


def test_no_cycles() -> None:
    """Within a room too: no module reaches itself through imports."""
    modules = {".".join(("headrace", *path.relative_to(SOURCE).with_suffix("").parts)): path for path in MODULES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {
        name: {target for target in imports_of(path) if target in modules and target != name}
        for name, path in modules.items()
    }

    def reach(name: str, seen: frozenset[str]) -> None:
        assert name not in seen, f"import cycle through {name}: {sorted(seen)}"
        for target in graph[name]:
            reach(target, seen | {name})

    for name in graph:
        reach(name, frozenset())


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
    assert len(path.read_text().splitlines()) <= 500
