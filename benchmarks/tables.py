"""Replaces rows in the tables of docs/performance.md by the rows of a run."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import Row


def cells(row: Row) -> list[str]:
    """Return the cells of a row as the page has them."""
    ours, rival = (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in (row.ours, row.rival))
    ratio = f"{row.ratio:,.0f}" if row.ratio >= 100 else f"{row.ratio:.2g}"
    runs = f"{row.runs}, {row.spread:.0%}"
    return [row.name, f"{ours} {row.unit}", f"{rival} {row.unit}", row.rival_name, f"{ratio} ×", runs]


def update(page: Path, rows: Sequence[Row]) -> list[str]:
    """Replace the rows on a page that have the same name and rival; return those that are not on it."""
    fresh = {(row.name, row.rival_name): f"| {' | '.join(cells(row))} |" for row in rows}
    lines = []
    for line in page.read_text().splitlines():
        parts = [part.strip() for part in line.split("|")]
        lines.append(fresh.pop((parts[1], parts[4]), line) if len(parts) == 8 else line)
    page.write_text("\n".join(lines) + "\n")
    return list(fresh.values())
