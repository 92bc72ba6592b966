"""What happens to the errors of all commands: one line on standard error, and an exit code."""

import errno
import sys
from collections.abc import Sequence
from typing import Any, cast

import typer
from typer.core import TyperGroup

from headrace.cli.factory.worded import worded
from headrace.cli.terminal.screen import complain
from headrace.cli.terminal.supervise import ENDED_EARLY, INTERRUPTED
from headrace.errors import HeadraceError

WRONG_USE = 2
"""The exit code for options, files and functions that a command cannot use."""

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The base class of wrong options: Click's, or, in newer versions of Typer, its own copy of that."""


class Commands(TyperGroup):
    """All commands. Each returns its exit code: 0 if all is well, 1 if what it checks is not."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. What it cannot use, and what ends it early, is said without a traceback."""
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, HeadraceError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise
            complain(f"headrace {ctx.invoked_subcommand}: {error}")
            raise typer.Exit(WRONG_USE) from None
        except SystemExit as end:
            complain(f"headrace {ctx.invoked_subcommand}: code that was imported or called raised {worded(end)}")
            raise typer.Exit(ENDED_EARLY) from None
        except KeyboardInterrupt:
            complain(f"headrace {ctx.invoked_subcommand}: interrupted")
            raise typer.Exit(INTERRUPTED) from None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line; return the exit code, or end the process with it if `standalone_mode` is set."""
        try:
            words = sys.argv[1:] if args is None else list(args)
            code = super().main(words or ["--help"], "headrace", standalone_mode=False, **extra)
        except _UsageError as error:
            usage = cast(typer.BadParameter, error)
            path = usage.ctx.command_path if usage.ctx else "headrace"
            complain(f"{path}: {usage.format_message()}\nTry '{path} --help'.")
            code = WRONG_USE
        if standalone_mode:
            sys.exit(code)
        return code
