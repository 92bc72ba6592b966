"""A process beside the command's own, so that user code that ends the process is never taken for a result."""

import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

ENDED_EARLY, INTERRUPTED = 2, 130
"""Exit codes: user code ended the process before there was a result; the user did, by Ctrl-C."""

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
_PR_SET_PDEATHSIG = 1


def code_of(command: Callable[[], int], name: str) -> int:
    """Run a command and return its exit code.

    It runs in a child. User code may end a process in ways that cannot be caught (`os._exit`, `os.execv`, the end of an
    `atexit` function), with any exit code: only what the child sends when the command is done counts. A process that
    has imported torch may have threads and must not be forked. There, and without Linux's signals, it runs here.

    Args:
        command: Returns the exit code.
        name: The command's name, for errors.
    """
    if not hasattr(signal, "sigwaitinfo") or "torch" in sys.modules or threading.active_count() > 1:
        return command()
    reader, writer = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _end_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reader)
        _run(command, writer)
    os.close(writer)
    status = _waited_for(child)
    os.set_blocking(reader, False)  # others that the child has started may hold its end
    try:
        told = os.read(reader, 1)
    except BlockingIOError:
        told = b""
    os.close(reader)
    return told[0] if told else _ended_early(status, name)


def _run(command: Callable[[], int], writer: int) -> None:
    """Run the command in the child, tell its exit code, and end."""
    own, code = os.getpid(), 1
    try:
        code = command()
        if sys.stdout is not None:
            sys.stdout.flush()
    except SystemExit as end:  # from Typer, where the reader of the output is gone
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    if os.getpid() == own:  # user code may fork and return
        os.write(writer, bytes([code]))
    sys.exit(code)


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ENDED_EARLY)


def _waited_for(child: int) -> int:
    """Pass signals on to the child until it ends; return its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while True:
        got = signal.sigwaitinfo(_SIGNALS)
        if got.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
        elif got.si_code <= 0:  # sent by a process; what a terminal sends, the child has got, too
            os.kill(child, got.si_signo)


def _ended_early(status: int, name: str) -> int:
    """Say how the child ended, and return the exit code."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
        print(f"headrace {name}: the process {how} before there was a result.", file=sys.stderr)
        if -code in _SIGNALS:  # sent to this process, which ends as it would have without a child
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            os.kill(os.getpid(), -code)
        return 128 - code
    print(
        f"headrace {name}: the process ended with exit code {code} before there was a result: code that it imported or "
        "called has ended it, for example by os._exit. What is done at import belongs under "
        'if __name__ == "__main__":',
        file=sys.stderr,
    )
    return ENDED_EARLY
