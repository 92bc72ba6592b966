"""Which of pytest-xdist's processes runs which tests, where there are three or more (`pytest -n 3`)."""

import re
from typing import Any

from xdist.scheduler import LoadScopeScheduling

RAY = "ray"
GROUPS = ("lost_nodes", RAY, "accelerate")
"""Tests that one process should run, since they share what takes seconds: those with one of these words in their id.
The first have a cluster of their own, and need not wait for the others that need Ray."""


def group_of(test: str) -> str:
    """Return a test's group, by its id; "" if it has none."""
    return next((word for word in GROUPS if re.search(rf"(?<![a-z]){word}(?![a-z])", test)), "")


class RayApart(LoadScopeScheduling):
    """Gives the tests that need Ray to one process, and no others: they share one Ray, and wait more than they compute.

    Nothing is forked there after Ray has started its threads. Other tests are dealt one by one.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid) or nodeid

    def _reschedule(self, node: Any) -> None:
        if RAY not in self.assigned_work[node]:
            super()._reschedule(node)
        elif not node.shutting_down:
            node.shutdown()  # once it has run them
