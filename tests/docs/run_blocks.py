"""Runs code of a page: `run_blocks.py FOLDER`, where FOLDER/groups.json has the steps of each group.

Each group has a process or several, forked from this one, and a folder: FOLDER/0 and so on. What they print is in
FOLDER/0.0.txt, by group and rank.
"""

import json
import multiprocessing
import os
import shlex
import socket
import sys
import traceback
from pathlib import Path
from types import ModuleType

from headrace.cli import main


def run(steps: list[tuple[str, str, str, int]], folder: Path, output: Path, environment: dict[str, str]) -> None:
    """Run a group's steps in one namespace, as one of its processes."""
    printed = os.open(output, os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.environ |= environment
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.modules["__main__"] = ModuleType("__main__")  # so that what is defined here can be pickled
    names = sys.modules["__main__"].__dict__
    script = folder / "script.py"  # for processes that are spawned: they import what was defined here from a file
    script.write_text("\n".join(code for kind, code, *_ in steps if kind == "python"))
    names["__file__"] = str(script)
    try:
        for kind, code, file, line in steps:
            if kind == "python":
                exec(compile("\n" * (line - 1) + code, file, "exec"), names)
            elif kind == "file":
                Path(file).write_text(code)
            else:
                command(shlex.split(code))
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()


def command(words: list[str]) -> None:
    """Run a command of headrace, which must succeed."""
    sys.argv = words
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{shlex.join(words)} ends with {ended.code}") from None


def environments(ranks: int) -> list[dict[str, str]]:
    """Return what each process of a group has in its environment."""
    if not ranks:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        {"RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        for rank in range(ranks)
    ]


if __name__ == "__main__":
    top = Path(sys.argv[1])
    context = multiprocessing.get_context("fork")
    for number, (steps, ranks) in enumerate(json.loads((top / "groups.json").read_text())):
        (folder := top / str(number)).mkdir()
        processes = [
            context.Process(target=run, args=(steps, folder, top / f"{number}.{rank}.txt", environment))
            for rank, environment in enumerate(environments(ranks))
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            (top / f"{number}.failed").touch()
