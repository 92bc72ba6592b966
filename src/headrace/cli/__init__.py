"""The command line: `headrace plan`, `headrace verify`, `headrace demo` and others."""

import io
import sys

from headrace.cli.terminal.plain import escape_messages
from headrace.cli.terminal.supervise import code_of
from headrace.errors import MissingExtra


def main() -> None:
    """Run the command line and end the process. Exit code 0: all is well; 1: what was checked is not; 2: wrong use."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may have bytes that are no text
    sys.exit(code_of(_run, " ".join(sys.argv[1:2])))


def _run() -> int:
    try:
        from headrace.cli.app import run  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        missing = MissingExtra(f"the command line needs {package}, which is not installed", "cli")
        print(f"headrace: {missing}", file=sys.stderr)
        return 2
    escape_messages()
    return run()
