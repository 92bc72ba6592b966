"""What commands print, where, and how it is made safe: the only way from data to the terminal."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from headrace.cli.terminal.plain import plain

_PAUSE_S = 5.0
"""How long it is silent, where there is no terminal, between two lines about what is being done, in seconds."""


def complain(text: str) -> None:
    """Print an error to standard error."""
    print(plain(text), file=sys.stderr)


def tell_json(value: object) -> None:
    """Print a result as one line of JSON to standard output."""
    sys.stdout.write(json.dumps(value) + "\n")


class Screen(Console):
    """The console of all commands. A text is shown as it is: brackets are no markup, control characters are escaped.

    Args:
        as_json: Whether the result goes to standard output as JSON, and all else to standard error.
    """

    def __init__(self, as_json: bool = False) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, stderr=as_json)
        self.as_json = as_json
        self.facts: Mapping[str, Any] = {}
        """The result; a command that sets nothing gets the tables that it has printed."""
        self._said: list[str] = []
        self._tables: list[list[dict[str, str]]] = []

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is written to the terminal, with the control characters of texts escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text without markup, escaped before its width is measured."""
        return super().render_str(plain(text), **(options | {"markup": False, "emoji": False, "highlight": False}))

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects, and remember them for the result in JSON. On a terminal lines are broken between words."""
        options["soft_wrap"] = options.get("soft_wrap", False) and not self.is_terminal
        if self.as_json:
            self._said += [line for one in objects if isinstance(one, str | Text) for line in str(one).splitlines()]
            self._tables += [_rows(one) for one in objects if isinstance(one, Table)]
        super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Go on in silence when the reader of the output is gone: the exit code still tells the result."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def finish(self, code: int) -> None:
        """Print the result as one JSON object, if it is wanted."""
        if self.as_json:
            found = self.facts or {"tables": self._tables}
            tell_json({"exit_code": code, **found, "said": [line for line in self._said if line]})


@contextmanager
def working(console: Console, at_once: bool = True) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done: in one line of a terminal, else in a line now and then.

    Args:
        console: Where it is shown.
        at_once: Whether the first line is shown at once where there is no terminal; otherwise after some seconds.
    """
    if not console.is_terminal:
        last_s = time.monotonic() - at_once * _PAUSE_S

        def tell(text: str) -> None:
            nonlocal last_s
            if time.monotonic() - last_s >= _PAUSE_S:
                last_s = time.monotonic()
                Console.print(console, text, soft_wrap=True)  # which is no part of the result

        yield tell
        return
    # Without a thread of its own, which would not survive a fork.
    live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)

    def show(text: str) -> None:
        live.update(Text(plain(text), style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)

    with live:
        yield show


def _rows(table: Table) -> list[dict[str, str]]:
    names = [str(column.header) for column in table.columns]
    cells = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    return [dict(zip(names, row, strict=True)) for row in cells]
