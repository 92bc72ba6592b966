"""The documents speak of what is there."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import headrace
from launch import LIMIT_S, Ranks

TESTS = Path(__file__).parent
README = TESTS.parent / "README.md"
FAILURES = TESTS.parent / "docs" / "failures.md"


def test_every_failure_names_tests_that_exist() -> None:
    rows = [line for line in FAILURES.read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row.split("|")[3])
        assert named, f"nothing shows: {row[:60]}"
        for file, test in named:
            functions = {
                one.name for one in ast.walk(ast.parse((TESTS / file).read_text())) if isinstance(one, ast.FunctionDef)
            }
            assert not test or test in functions, f"{file} has no {test}"


PAGES = [README, *sorted((TESTS.parent / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_every_example_has_a_recipe() -> None:
    text = (TESTS.parent / "docs" / "recipes.md").read_text()
    examples = {path.name for path in (TESTS.parent / "examples").glob("*.py")}
    assert {*re.findall(r"\(\.\./examples/(\w+\.py)\)", text)} == examples


def test_the_guide_has_every_argument_beyond_torchs() -> None:
    text = (TESTS.parent / "docs" / "guide.md").read_text()
    table = text[text.index("| argument |") :].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    ours, theirs = (inspect.signature(loader).parameters.keys() for loader in (headrace.DataLoader, DataLoader))
    assert named == ours - theirs


def test_links_to_headings_lead_somewhere() -> None:
    for page in PAGES:
        for file, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            text = (page.parent / file).read_text() if file else page.read_text()
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in headings}
            assert heading in anchors, f"{page.name}: {file}#{heading}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_passes_arguments_that_exist(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    calls = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    for call in calls:
        ours = getattr(headrace, call.func.id, None) if isinstance(call.func, ast.Name) else None
        if ours is not None:
            given = {keyword.arg for keyword in call.keywords}
            assert given <= inspect.signature(ours).parameters.keys(), ast.unparse(call)


def test_the_cluster_page_names_options_that_exist() -> None:
    """Also outside of code blocks."""
    text = (TESTS.parent / "docs" / "cluster.md").read_text()
    named = {name for given in re.findall(r"RayExecutor\(([^)]*)\)", text) for name in re.findall(r"(\w+)=", given)}
    assert named
    assert named <= inspect.signature(headrace.RayExecutor).parameters.keys()


def test_every_argument_of_dpexs_loader_has_a_counterpart() -> None:
    text = (TESTS.parent / "docs" / "migrate.md").read_text()
    text = text[text.index("| `DpexDataLoader` |") :].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.+?) \| (`\w+|the same)", text, re.MULTILINE)
    theirs = [name for left, right in rows if right == "the same" for name in re.findall(r"`(\w+)`", left)]
    theirs += [right.strip("`") for _, right in rows if right != "the same"]
    assert len(theirs) >= 11
    assert set(theirs) <= inspect.signature(headrace.DataLoader).parameters.keys()


def test_figures_do_not_depend_on_where_samples_are_made() -> None:
    text = (TESTS.parent / "docs" / "cluster.md").read_text()
    figures = re.findall(r"\| (0\.\d+) \| (0\.\d+) \|$", text, re.MULTILINE)
    assert len(figures) == 9
    for form in range(0, 9, 3):
        assert len(set(figures[form : form + 3])) == 1


@pytest.mark.slow
def test_the_quickstart_prints_what_the_readme_shows(tmp_path: Path) -> None:
    (section,) = re.findall(r"^## Quickstart\n(.*?)^## ", README.read_text(), re.MULTILINE | re.DOTALL)
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```console\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    alone, ranks = re.fullmatch(
        r"\$ python quickstart.py\n(.*)\$ torchrun .*? quickstart.py\n(.*)", shown, re.DOTALL
    ).groups()
    script = tmp_path / "quickstart.py"
    script.write_text(code)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (run.stdout, run.stderr) == (alone, "")
    Ranks(script, 2, tmp_path).finish()
    printed = [line for rank in range(2) for line in (tmp_path / f"rank{rank}.txt").read_text().splitlines()]
    assert sorted(printed) == sorted(ranks.splitlines())
