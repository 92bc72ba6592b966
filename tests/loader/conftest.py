"""What tests of loaders share."""

from typing import Any

import pytest


@pytest.fixture
def group_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the environment that of one rank of a launched world."""

    def launch(rank: int, size: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(size))

    return launch
