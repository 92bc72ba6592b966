"""The documents speak of what is there."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
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
