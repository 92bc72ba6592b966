"""`headrace verify`: are a loader's samples the same bits however they are read? If not, which differ, and why?"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.cli.factory.load import load_factory
from headrace.cli.verify.cells import (
    EXECUTORS,
    NO_RESUME,
    REFERENCE,
    CannotVerify,
    Cell,
    Outcome,
    Subject,
    collect_warnings,
    covering_cells,
    every_cell,
    start_forkserver,
)
from headrace.cli.verify.digest import differing
from headrace.cli.verify.why import Fetch, Probe
from headrace.errors import bad_value, whole_number

OK, DIFFERS, UNUSABLE = 0, 1, 2
"""Exit codes: all cells agree; some differ or fail; nothing could be compared, since the reference failed or the loader
cannot be verified."""

_COLUMNS = {
    "executor": 10,
    "workers": 7,
    "world": 5,
    "resume": 6,
    "kill": 4,
    "digest": 12,
    "samples": 7,
    "result": 9,
}
"""The columns of the table, each with its width."""


@dataclass(frozen=True)
class Options:
    """The command's options.

    Attributes:
        cells: The ways to read, beside the reference.
        epochs: The number of epochs that each reads.
        samples: The most samples of an epoch that each reads.
    """

    cells: list[Cell]
    epochs: int
    samples: int

    @classmethod
    def parse(
        cls, executors: str, workers: str, worlds: str, epochs: int, samples: int, full: bool, kills: bool
    ) -> "Options":
        """Make the options from what the user wrote.

        Raises:
            ValueError: An option lies outside its range.
        """
        names = [name.strip() for name in executors.split(",")]
        for name in names:
            if name not in EXECUTORS:
                bad_value("--executors", name, f"names of {EXECUTORS}", "Separate them by commas.")
            if name in ("fork", "spawn") and name not in multiprocessing.get_all_start_methods():
                bad_value("--executors", name, "start methods that this system has", "Leave it out.")
        whole_number("--epochs", epochs, low=1, fix="Count the epochs.")
        whole_number("--samples", samples, low=1, fix="Count the samples of an epoch.")
        cells = every_cell if full else covering_cells
        return cls(cells(names, _numbers("--workers", workers), _numbers("--worlds", worlds), kills), epochs, samples)


def run_verify(target: str, options: Options, console: Console) -> int:
    """Read the target's loader in each cell, print the results, and return the exit code."""
    started = time.monotonic()
    with collect_warnings() as warned:
        try:
            subject = Subject(_factory(target), options.epochs, options.samples)
            outcomes = _run_cells(subject, options.cells, console)
            code = _conclude(subject, outcomes, console)
        except CannotVerify as reason:
            print(f"headrace verify: {reason}", file=sys.stderr)
            return UNUSABLE
    for text, count in warned.items():
        console.print(f"warned{f' {count} times' * (count > 1)}: {text}", style="dim", markup=False, soft_wrap=True)
    console.print(f"({time.monotonic() - started:.0f} s)", style="dim")
    return code


def _factory(target: str) -> Callable[[], Any]:
    """Return the function that makes the loader; raise CannotVerify if there is none."""
    try:
        return load_factory(target, "the loader")
    except ValueError as error:
        raise CannotVerify(str(error)) from error


def _run_cells(subject: Subject, cells: list[Cell], console: Console) -> list[Outcome]:
    """Run the reference and the cells, and print a row of a table for each."""
    given = "" if subject.seeded else "; it has no seed, so seed=0 is set"
    limited = "" if subject.limit == subject.plan.samples else f" of {subject.plan.samples:,}"
    epochs = f" of {subject.epochs} epochs each" if subject.epochs > 1 else ""
    console.print(
        f"{subject.limit:,}{limited} samples{epochs}, in batches of {subject.batch_size}{given}", soft_wrap=True
    )
    if any(cell.kind == "forkserver" for cell in cells):
        start_forkserver()
    outcomes: list[Outcome] = []
    with _table(console) as add:
        for cell in [REFERENCE, *(cell for cell in cells if cell != REFERENCE)]:
            outcome = subject.run(cell)
            outcomes.append(outcome)
            add(_row(outcome, outcomes[0]))
            if outcomes[0].error:
                break
    return outcomes


@contextmanager
def _table(console: Console) -> Iterator[Callable[[list[Text]], None]]:
    """Yield a function that adds a row to a table: on a terminal to one that grows, elsewhere as a line, at once."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, width in _COLUMNS.items():
        table.add_column(name, min_width=width, no_wrap=True)
    if not console.is_terminal:
        widths = _COLUMNS.values()

        def add(row: list[Text]) -> None:
            parts = [f"{part!s:{width}}" for part, width in zip(row, widths, strict=True)]
            console.print(Text("  ".join(parts).rstrip()), soft_wrap=True)

        add([*map(Text, _COLUMNS)])
        yield add
        return
    live = Live(
        table, console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    )

    def grow(row: list[Text]) -> None:
        table.add_row(*row)
        live.refresh()

    with live:  # without a thread of its own, which would not survive a fork
        yield grow
    console.print(table)


def _row(outcome: Outcome, reference: Outcome) -> list[Text]:
    cell = outcome.cell
    if outcome.skipped:
        result, digest = Text("skipped", style="yellow"), "-"
    elif outcome.error:
        result, digest = Text("error", style="bold red"), "-"
    else:
        digest = outcome.fold()
        same = outcome.digests == reference.digests
        result = Text("ok", style="green") if same else Text("DIFFERS", style="bold red")
        result = Text("reference") if outcome is reference else result
    workers = "-" if cell.executor == "inline" else f"{cell.workers}{'+' * cell.persistent}"
    killed = "one" if cell.kill else NO_RESUME
    parts = [cell.kind, workers, str(cell.world), cell.resume, killed, digest, str(len(outcome.digests))]
    return [*map(Text, parts), result]


def _conclude(subject: Subject, outcomes: list[Outcome], console: Console) -> int:
    """Print what the cells show together, and return the exit code."""

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    reference, *_ = outcomes
    skipped: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.skipped:
            skipped.setdefault(outcome.skipped, []).append(outcome)
    for reason, cells in skipped.items():
        say(f"{_cells(len(cells))} skipped: {reason}", "yellow")
    failed = [outcome for outcome in outcomes if outcome.error]
    differ = [one for one in outcomes if not (one.error or one.skipped) and one.digests != reference.digests]
    ran = [outcome for outcome in outcomes if not outcome.skipped]
    if not failed and not differ:
        say(f"{_cells(len(ran))}, one digest: {reference.fold()}", "bold green")
        return OK
    errors: dict[str, list[Outcome]] = {}
    for outcome in failed:
        text, _, _ = outcome.error.partition("\nheadrace: ")  # the notes name steps and processes
        errors.setdefault(text, []).append(outcome)
    for cells in errors.values():
        others = f" (and in {len(cells) - 1} more)" if len(cells) > 1 else ""
        say(f"\nFAILED: {cells[0].cell}{others}", "bold red")
        say(cells[0].error)
    if differ:
        say(f"\nFAILED: {len(differ)} of {len(ran)} cells differ from the reference", "bold red")
        _explain(subject, reference, differ[0], say)
    return UNUSABLE if reference.error else DIFFERS


def _explain(subject: Subject, reference: Outcome, outcome: Outcome, say: Callable[[str], None]) -> None:
    """Print the first sample that differs, the parts in which it differs, and why."""
    epoch, position = min(at for at, sample in outcome.digests.items() if sample != reference.digests[at])
    index = int(subject.plan.indices(epoch, np.array([position]))[0])
    parts = differing(reference.digests[epoch, position].parts, outcome.digests[epoch, position].parts)
    where = f" in {', '.join(path or 'all of it' for path in parts[:5])}" if parts else ""
    say(f"The first is the sample at position {position} of epoch {epoch}, dataset index {index}: it differs{where},")
    say(f"in the cell {outcome.cell}.")
    probe = Probe(lambda: subject.loader().dataset, Fetch(subject.plan, subject.batched, epoch, position))
    try:
        lines = probe.explain(outcome.cell.executor)
    except CannotVerify:
        raise
    except Exception as error:  # noqa: BLE001 - the user's code, fetched once more
        lines = [
            f"The reason could not be found, since fetching the sample again raised {type(error).__name__}: {error}"
        ]
    for line in lines:
        say(f"  {line}")


def _cells(count: int) -> str:
    return f"{count} cell{'s' * (count != 1)}"


def _numbers(name: str, text: str) -> list[int]:
    numbers = []
    for part in text.split(","):
        if not part.strip().isdigit() or int(part) < 1:
            bad_value(name, text, "whole numbers >= 1, separated by commas", f"{name} 1,2 tries one and two.")
        numbers.append(int(part))
    return sorted(set(numbers))
