"""Clusters that lose nodes, get some, lose their head, or have a full store; each in a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from waiting import wait_until

JOB = Path(__file__).parent / "jobs" / "ray_faults.py"
LIMIT_S = 240

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 30)]


def run(name: str, *arguments: str) -> dict[str, Any]:
    """Run a job to its end; return what it found."""
    done = subprocess.run(
        [sys.executable, str(JOB), name, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # Ray tells on standard output of the nodes that it has lost, also at its very end.
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


@pytest.mark.parametrize("how", ["node-killed-slots", "node-killed-store", "node-cut-store"])
def test_a_node_that_is_lost_is_not_seen(how: str) -> None:
    """Killed, or cut off so that its connections stay open: nothing is lost, doubled or reordered."""
    found = run(how)
    assert found["seen"] == found["expected"]


def test_a_node_that_is_added_is_used() -> None:
    found = run("node-added")
    assert found["seen"] == found["expected"]
    assert found["up"] == [1, 2]


@pytest.mark.parametrize("what", ["head-lost", "head-and-worker-lost"])
def test_a_lost_head_is_an_error_in_bounded_time(what: str) -> None:
    """Ray itself would end the process, a minute later, without a word to the program."""
    found = run(what)
    assert "the head of the Ray cluster" in found["error"]
    assert "save what you need" in found["error"]


def test_a_store_that_is_full_loses_nothing() -> None:
    found = run("store-full")
    assert found["seen"] == found["expected"]


def test_the_ray_client_works_and_is_warned_about() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = run("client", str(port))
    assert found["seen"]["True"] == found["seen"]["False"] == found["expected"]
    assert "through the Ray Client" in found["seen"]["told"]


def test_what_only_the_script_has_travels_both_ways() -> None:
    """Batches and exceptions of classes in `__main__` come back as the rank's own."""
    assert run("script") == {"True": [True, [0, 1, 2], True], "False": [True, [0, 1, 2], True]}


def test_actors_of_a_rank_that_is_killed_are_gone() -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    rank = subprocess.Popen(
        [sys.executable, str(JOB), "rank"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"RAY_ADDRESS": address},
    )
    assert rank.stdout is not None
    actors = [psutil.Process(pid) for pid in json.loads(rank.stdout.readline())]
    assert len(actors) == 2
    rank.send_signal(signal.SIGKILL)
    rank.communicate()
    wait_until(lambda: not any(actor.is_running() for actor in actors))
