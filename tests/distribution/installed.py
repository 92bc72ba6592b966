"""Folders that have some of the packages installed here, and what those need, and nothing else."""

import re
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement


def with_dependencies(wanted: list[str]) -> set[str]:
    """Return the names of packages and of all that they need, extras included."""
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in wanted]
    while waiting:
        requirement = waiting.pop()
        for extra in ("", *requirement.extras):
            key = (re.sub(r"[-_.]+", "-", requirement.name).lower(), extra)
            if key not in found:
                found.add(key)
                needed = map(Requirement, distribution(requirement.name).requires or [])
                waiting += [one for one in needed if not one.marker or one.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def link(names: set[str], folder: Path) -> None:
    """Let a folder have these packages."""
    folder.mkdir()
    for name in names:
        package = distribution(name)
        for part in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            (folder / part).symlink_to(str(package.locate_file(part)))
