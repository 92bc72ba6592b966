"""Starting scripts as programs of their own, forked from one that has imported headrace: it takes each a second."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from waiting import LIMIT_S

HERE = Path(__file__).parent


class Script:
    """A running script.

    Attributes:
        pid: Its process.
        stdin: Its standard input.
        stdout: What it prints.
        stderr: What it complains about.
        returncode: How it ended: an exit code, or a signal's number below zero; None until it was waited for.
    """

    def __init__(self, server: socket.socket, arguments: list[str]) -> None:
        (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
        theirs = [stdin, stdout, stderr]
        self._answer, answer = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        request = json.dumps({"arguments": arguments, "environment": environment}).encode() + b"\n"
        server.sendall(request[socket.send_fds(server, [request], [*theirs, answer.fileno()]) :])
        answer.close()
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin, self.stdout, self.stderr = os.fdopen(to_stdin, "w"), os.fdopen(from_stdout), os.fdopen(from_stderr)
        self._answer.settimeout(LIMIT_S)
        self._told = self._answer.makefile()
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Return how it ended, when it has."""
        if self.returncode is None:
            self.returncode = int(self._told.readline())
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """Return all that it and its children print and complain about, when they have ended."""
        self.stdin.close()
        with ThreadPoolExecutor(1) as thread:
            complaints = thread.submit(self.stderr.read)
            told = self.stdout.read(), complaints.result()
        self.wait()
        return told

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        try:
            if kind is not None and self.returncode is None:
                self.kill()
            self.wait()
        finally:
            for file in (self.stdin, self.stdout, self.stderr, self._told, self._answer):
                file.close()


class ScriptServer:
    """What scripts are forked from.

    Attributes:
        pid: Its process.
    """

    def __init__(self) -> None:
        self._requests, requests = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        with requests:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "script_server.py"), str(requests.fileno())],
                pass_fds=[requests.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # so that what scripts print is buffered, as it is for a pipe
                env={**environment, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            )
        self.pid = self._process.pid

    def start(self, script: Path, *arguments: str) -> Script:
        """Start a script."""
        return Script(self._requests, [str(script), *arguments])

    def close(self) -> None:
        """End it; scripts that run go on."""
        self._requests.close()
        self._process.wait()
