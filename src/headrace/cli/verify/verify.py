"""`headrace verify`: are a loader's samples the same bits however they are read? If not, which differ, and why?"""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.text import Text

from headrace.cli.factory.load import load_factory
from headrace.cli.terminal.numbers import numbers_of
from headrace.cli.terminal.screen import Screen, complain, working
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

_STYLES = {"reference": "", "ok": "green", "skipped": "yellow", "error": "bold red", "DIFFERS": "bold red"}
"""The results of a cell, each with its style."""

MOST_WORKERS, MOST_RANKS = 128, 1024
"""The most workers of a rank, and the most ranks, of a cell."""

MOST_EPOCHS, MOST_SAMPLES = 1000, 1_000_000
"""The most epochs of a cell, and the most samples of each: the digests of all of them are kept."""

MOST_TOGETHER = 1024
"""The most workers that all ranks of a cell may have together."""


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
        whole_number("--epochs", epochs, low=1, high=MOST_EPOCHS, fix="One or two are enough for most loaders.")
        whole_number("--samples", samples, low=1, high=MOST_SAMPLES, fix="Each cell reads so many: take a few hundred.")
        counts, sizes = numbers_of("--workers", workers, MOST_WORKERS), numbers_of("--worlds", worlds, MOST_RANKS)
        cells = (every_cell if full else covering_cells)(names, counts, sizes, kills)
        for cell in cells:
            if cell.workers * cell.world > MOST_TOGETHER:
                allowed = f"at most {MOST_TOGETHER:,} workers on all ranks together"
                bad_value("--workers", cell.workers, f"{allowed}, and --worlds has {cell.world}", "Pass fewer of one.")
        return cls(cells, epochs, samples)


def run_verify(target: str, options: Options, screen: Screen) -> int:
    """Read the target's loader in each cell, print the results, and return the exit code."""
    started = time.monotonic()
    with collect_warnings() as warned:
        try:
            subject = Subject(_factory(target), options.epochs, options.samples)
            outcomes = _run_cells(subject, options.cells, screen)
            code = _conclude(subject, outcomes, screen)
        except CannotVerify as reason:
            complain(f"headrace verify: {reason}")
            return UNUSABLE
    for text, count in warned.items():
        screen.print(f"warned{f' {count} times' * (count > 1)}: {text}", style="dim", soft_wrap=True)
    took = f"({time.monotonic() - started:.0f} s)"
    screen.print(f"FAILED {took}" if code else f"PASSED {took}", style="bold red" if code else "bold green")
    screen.facts = {"passed": not code, "cells": [_as_json(outcome, outcomes[0]) for outcome in outcomes]}
    return code


def _factory(target: str) -> Callable[[], Any]:
    """Return the function that makes the loader; raise CannotVerify if there is none."""
    try:
        return load_factory(target, "the loader")
    except ValueError as error:
        raise CannotVerify(str(error)) from error


def _run_cells(subject: Subject, cells: list[Cell], screen: Screen) -> list[Outcome]:
    """Run the reference and the cells, and print a row of a table for each."""
    given = "" if subject.seeded else "; it has no seed, so seed=0 is set"
    limited = "" if subject.limit == subject.plan.samples else f" of {subject.plan.samples:,}"
    epochs = f" of {subject.epochs} epochs each" if subject.epochs > 1 else ""
    screen.print(
        f"{subject.limit:,}{limited} samples{epochs}, in batches of {subject.batch_size}{given}", soft_wrap=True
    )
    if any(cell.kind == "forkserver" for cell in cells):
        start_forkserver()
    outcomes: list[Outcome] = []
    every = [REFERENCE, *(cell for cell in cells if cell != REFERENCE)]
    with working(screen) as show:
        _print_row([*map(Text, _COLUMNS)], screen)
        for number, cell in enumerate(every, 1):
            if screen.is_terminal:  # elsewhere the rows say it
                show(f"{number} of {len(every)}: {cell}")
            outcome = subject.run(cell)
            outcomes.append(outcome)
            _print_row(_row(outcome, outcomes[0]), screen)
            if outcomes[0].error:
                break
    return outcomes


def _print_row(row: list[Text], screen: Screen) -> None:
    """Print a row of the table, which grows while cells are run and may be longer than the terminal."""
    line = Text("  ").join(
        Text(f"{part!s:{width}}", style=part.style) for part, width in zip(row, _COLUMNS.values(), strict=True)
    )
    line.rstrip()
    screen.print(line, soft_wrap=True)


def _result(outcome: Outcome, reference: Outcome) -> str:
    """Name the result of a cell."""
    if outcome.skipped or outcome.error:
        return "skipped" if outcome.skipped else "error"
    if outcome is reference:
        return "reference"
    return "ok" if outcome.digests == reference.digests else "DIFFERS"


def _as_json(outcome: Outcome, reference: Outcome) -> dict[str, Any]:
    """Return a cell and its result for JSON."""
    return {
        **asdict(outcome.cell),
        "executor": outcome.cell.kind,
        "result": _result(outcome, reference),
        "why": outcome.skipped or outcome.error,
        "samples": len(outcome.digests),
        "digest": "" if outcome.skipped or outcome.error else outcome.fold(),
    }


def _row(outcome: Outcome, reference: Outcome) -> list[Text]:
    cell = outcome.cell
    result = _result(outcome, reference)
    digest = "-" if outcome.skipped or outcome.error else outcome.fold()
    workers = "-" if cell.executor == "inline" else f"{cell.workers}{'+' * cell.persistent}"
    killed = "one" if cell.kill else NO_RESUME
    parts = [cell.kind, workers, str(cell.world), cell.resume, killed, digest, str(len(outcome.digests))]
    return [*map(Text, parts), Text(result, style=_STYLES[result])]


def _conclude(subject: Subject, outcomes: list[Outcome], screen: Screen) -> int:
    """Print what the cells show together, and return the exit code."""

    def say(text: str, style: str = "") -> None:
        screen.print(Text(text, style=style), soft_wrap=True)

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
