"""The pictures of the page about orders are those that its command draws."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.slow
def test_each_picture_of_the_page_is_drawn(tmp_path: Path) -> None:
    drawn = runpy.run_path(str(DOCS / "pictures" / "draw.py"))
    shown = re.findall(r"\]\(pictures/(\w+)\.png\)", (DOCS / "orders.md").read_text())
    assert sorted(shown) == sorted(drawn["ORDERS"])
    assert {path.stem for path in (DOCS / "pictures").glob("*.png")} == set(shown)
    picture = drawn["draw"]("bucketed", tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 5000
