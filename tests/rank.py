"""Runs one rank's script, and ends without taking the interpreter down.

Torch never frees the group of a DistributedDataParallel model, and one of its threads that drops a tensor while the
interpreter goes down aborts the process, now and then.
"""

import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
