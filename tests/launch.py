"""Starting real ranks: a script in as many processes, and what each rank reported.

They are forked from a server that has torch imported already, as multiprocessing keeps it for its own children: to
import it anew takes each seconds.
"""

import json
import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
from multiprocessing import connection
from pathlib import Path
from typing import Any

LIMIT_S = 300


class Ranks:
    """Running ranks, with the environment that torchrun gives them.

    Args:
        script: What they run.
        size: How many there are.
        folder: Where they run, and leave what they print.
        arguments: Of the script.
        environment: What is set in theirs.

    Attributes:
        processes: One for each rank.
    """

    def __init__(self, script: Path, size: int, folder: Path, *arguments: str, **environment: str) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        whole = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment}
        context = multiprocessing.get_context("forkserver")
        self.processes = [
            context.Process(target=_run, args=(rank, size, whole, script, folder, arguments)) for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def finish(self) -> str:
        """Wait until all have ended, as they should; return what rank 0 printed."""
        running, deadline = {process.sentinel for process in self.processes}, time.monotonic() + LIMIT_S
        while running:
            ended = connection.wait(running, max(0.0, deadline - time.monotonic()))
            running.difference_update(ended)
            if not ended or any(process.exitcode for process in self.processes):  # the others would wait for it
                self.kill()
                raise AssertionError("\n".join(map(self._printed, range(len(self.processes)))))
        self.kill()
        return self._printed(0)

    def kill(self) -> None:
        """End those that have not ended."""
        for process in self.processes:
            process.kill()
            process.join()

    def _printed(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.txt").read_text()


def _run(
    rank: int, size: int, environment: dict[str, str], script: Path, folder: Path, arguments: tuple[str, ...]
) -> None:
    """Be a rank, and end without taking the interpreter down, for the reason that `rank.py` has."""
    os.chdir(folder)
    printed = os.open(f"rank{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    multiprocessing.set_start_method(None, force=True)  # a script's own choice, not that of whoever started it
    os.environ.clear()
    os.environ.update(environment)
    places = {"": (rank, size), "LOCAL_": (rank, size), "ROLE_": (rank, size), "GROUP_": (0, 1)}
    os.environ |= {f"{name}RANK": str(at) for name, (at, _) in places.items()}
    os.environ |= {f"{name}WORLD_SIZE": str(of) for name, (_, of) in places.items()}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TMPDIR": str(folder)}
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException as error:
        traceback.print_exc()
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_ranks(script: Path, size: int, folder: Path, *arguments: str, **environment: str) -> list[Any]:
    """Run a script on `size` ranks and return each rank's report, by rank.

    The script gets the folder as its first argument, and calls `report(folder, rank, value)`.
    """
    Ranks(script, size, folder, str(folder), *arguments, **environment).finish()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


def report(folder: str, rank: int, value: Any) -> None:
    """Write a rank's report; called in the rank."""
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(value))
