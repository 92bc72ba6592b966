"""Runs scripts one after another in one process: `in_turn.py SCRIPT ARGUMENT... -- SCRIPT ARGUMENT...`."""

import itertools
import runpy
import sys

SEPARATOR = "--"
"""What stands between the scripts, and is printed in a line of its own before each."""

if __name__ == "__main__":
    given = sys.argv[1:]
    for ends, words in itertools.groupby(given, SEPARATOR.__eq__):
        if not ends:
            print(SEPARATOR, flush=True)
            sys.argv = [*words]
            runpy.run_path(sys.argv[0], run_name="__main__")
