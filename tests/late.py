"""Modules that are imported when they are first used."""

import importlib
from typing import Any


class Late:
    """A module that is large, and that every process forked from the tests' would otherwise have to map.

    Args:
        name: The module's.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks whether it is a test or a fixture
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
