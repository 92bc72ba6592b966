"""The command line: `headrace plan`, `headrace verify`, `headrace demo` and others."""

import sys

from headrace.errors import MissingExtra


def main() -> None:
    """Run the command line. If the extra `cli` is not installed, say so and exit with code 1."""
    try:
        _run()
    except MissingExtra as error:
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(1)


def _run() -> None:
    try:
        from headrace.cli.app import app  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        raise MissingExtra(f"the command line needs {package}, which is not installed", "cli") from error
    app()
