"""Runs code of a page: `run_blocks.py FOLDER`, where FOLDER/groups.json has the steps of each group.

Each group has a process, forked from this one, a folder, and a file with what it printed: FOLDER/0, FOLDER/0.txt, ...
"""

import json
import multiprocessing
import os
import shlex
import sys
import traceback
from pathlib import Path
from types import ModuleType

from headrace.cli import main


def run(steps: list[tuple[str, int, str]], folder: Path) -> None:
    """Run a group's steps in one namespace."""
    printed = os.open(f"{folder}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    folder.mkdir()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.modules["__main__"] = ModuleType("__main__")  # so that what is defined here can be pickled
    names = sys.modules["__main__"].__dict__
    try:
        for file, line, code in steps:
            if file:
                exec(compile("\n" * (line - 1) + code, file, "exec"), names)
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


if __name__ == "__main__":
    top = Path(sys.argv[1])
    context = multiprocessing.get_context("fork")
    for number, steps in enumerate(json.loads((top / "groups.json").read_text())):
        process = context.Process(target=run, args=(steps, top / str(number)))
        process.start()
        process.join()
        if process.exitcode:
            (top / f"{number}.failed").touch()
