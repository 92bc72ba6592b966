"""Starts the demonstration's ranks on this machine, and collects the facts that they print."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

JOB = "headrace.cli.demo.job"
MARK = "headrace"
"""The key that marks a line of JSON on standard output as ours; libraries print there, too."""

LIMIT_S = 240.0
"""How long the ranks may run, in seconds."""


class JobFailed(Exception):
    """The ranks ended with an error; the text is their output."""


def run_ranks(
    size: int, *tasks: str, seen: Callable[[str], None] = lambda name: None, killed: bool = False
) -> list[dict[str, Any]]:
    """Run tasks of the job on `size` ranks and return the facts that rank 0 printed, in order.

    Args:
        size: The number of ranks.
        tasks: What each rank does, one after the other.
        seen: Called, in another thread, with the name of each fact when it is printed.
        killed: Whether a task kills a rank.

    Raises:
        JobFailed: A rank failed, the job took too long, or no rank was killed although a task does that.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    # The launcher leaves a folder of logs behind: it is made in a temporary folder, which is deleted.
    facts: list[dict[str, Any]] = []
    out: list[str] = []

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            out.append(line)
            if line.startswith(f'{{"{MARK}"'):
                facts.append(json.loads(line))
                seen(facts[-1][MARK])

    with tempfile.TemporaryDirectory(prefix="headrace-") as folder, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, f"--nproc-per-node={size}", "-m", JOB, *tasks],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the launcher
            env={
                **os.environ,
                "TMPDIR": folder,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            },
        )
        listener = threading.Thread(target=listen)
        listener.start()
        try:
            process.wait(LIMIT_S)
        except BaseException as error:
            process.terminate()  # the launcher ends its ranks before itself
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise JobFailed(f"the ranks were not done after {LIMIT_S:.0f} s, and were ended") from None
            raise
        finally:
            listener.join()
            assert process.stdout is not None
            process.stdout.close()
        errors.seek(0)
        err = errors.read()
    if killed != ("SIGKILL" in err) or killed != bool(process.returncode):
        raise JobFailed("".join(out) + err)
    return facts


def collect_from_ranks(value: Any) -> list[Any]:
    """Return every rank's value, by rank; called in each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def tell_once(fact: str, **values: Any) -> None:
    """Print one fact if this is rank 0; called in each rank."""
    if dist.get_rank() == 0:
        tell(fact, **values)


def tell(fact: str, **values: Any) -> None:
    """Print one fact; called in rank 0."""
    print(json.dumps({MARK: fact, **values}), flush=True)
