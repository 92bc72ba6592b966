"""A cluster that loses nodes, gets one, has a full store and loses its head; in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rays import ray_environment

JOB = Path(__file__).parent / "jobs" / "ray_faults.py"
LIMIT_S = 560

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 30)]


class Found:
    """What came of a cluster's faults, in the order in which it had them.

    Args:
        done: The process that had the cluster.
    """

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.done = done
        # Ray tells on standard output of the nodes that it has lost, also at its very end.
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"fault"')]
        self.faults: dict[str, dict[str, Any]] = {line["fault"]: line for line in lines}

    def __getitem__(self, fault: str) -> dict[str, Any]:
        assert fault in self.faults, f"it ended after {[*self.faults]}\n{self.done.stderr[-4000:]}"
        return self.faults[fault]


@pytest.fixture(scope="module")
def found() -> Found:
    """Have all faults in one cluster."""
    command, environment = [sys.executable, str(JOB)], os.environ | ray_environment()
    return Found(subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment))


@pytest.mark.parametrize("how", ["node-killed-slots", "node-killed-store", "node-cut-store"])
def test_a_node_that_is_lost_is_not_seen(how: str, found: Found) -> None:
    """Killed, or cut off so that its connections stay open: nothing is lost, doubled or reordered."""
    assert found[how]["seen"] == found[how]["expected"]


def test_a_node_that_is_added_is_used(found: Found) -> None:
    assert found["node-added"]["seen"] == found["node-added"]["expected"]
    assert found["node-added"]["up"] == [1, 2]


@pytest.mark.parametrize("what", ["alone", "with a worker"])
def test_a_lost_head_is_an_error_in_bounded_time(what: str, found: Found) -> None:
    """Ray itself would end the process, a minute later, without a word to the program."""
    error = found["head-lost"][what]
    assert "the head of the Ray cluster" in error
    assert "save what you need" in error


def test_a_store_that_is_full_loses_nothing(found: Found) -> None:
    assert found["store-full"]["seen"] == found["store-full"]["expected"]


def test_the_ray_client_works_and_is_warned_about(found: Found) -> None:
    seen = found["client"]["seen"]
    assert seen["True"] == seen["False"] == found["client"]["expected"]
    assert "through the Ray Client" in seen["told"]


def test_what_only_the_script_has_travels_both_ways(found: Found) -> None:
    """Batches and exceptions of classes in `__main__` come back as the rank's own."""
    assert [found["script"][shared_memory] for shared_memory in ("True", "False")] == [[True, [0, 1, 2], True]] * 2
