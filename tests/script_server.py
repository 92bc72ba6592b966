"""Runs scripts in processes forked from this one, which has imported headrace.

Each becomes `__main__` of its process, and the interpreter ends with it as with any program: nothing is cut short.
"""

import gc
import json
import os
import signal
import socket
import sys
from typing import Any

import psutil
import pytest

from headrace.executors.process import pool as processes
from headrace.executors.thread import pool as threads

PRELOADED = (psutil, pytest, processes, threads)


def next_script() -> str:
    """Serve requests until there are no more; return in each script's process, with the script's path."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that those who wait for scripts are reaped
    gc.collect()
    gc.freeze()  # what is not looked through is not copied
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 4)
        if not message:
            sys.exit()
        while not message.endswith(b"\n"):
            message += requests.recv(1 << 20)
        if not os.fork():
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            request = json.loads(message)
            answer = descriptors.pop()
            if not (script := os.fork()):
                os.close(answer)
                become(request, descriptors)
                return str(request["arguments"][0])
            for descriptor in (0, 1, 2, *descriptors):
                os.close(descriptor)
            os.write(answer, b"%d\n" % script)
            os.write(answer, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(script, 0)[1]))
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take the standard files, the arguments, the environment and the folder of a script."""
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    sys.argv[:] = request["arguments"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    os.environ.clear()
    os.environ.update(request["environment"])


if __name__ == "__main__":
    __file__ = next_script()
    with open(__file__) as file:
        code = compile(file.read(), __file__, "exec")
    exec(code)
