"""`headrace tune`: which executor, how many workers, how much ahead, how many samples at a time?"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from headrace.cli.factory.load import load_factory
from headrace.cli.tune.measuring import CannotTune, Step, Subject, Visitor
from headrace.cli.tune.report import Report, figure_class
from headrace.cli.verify.cells import collect_warnings
from headrace.errors import MissingExtra, bad_value
from headrace.loader.options import EXECUTORS
from headrace.system.limits import free_memory
from headrace.tuning.diagnosis import Machine
from headrace.tuning.finals import RULE
from headrace.tuning.race import Visit
from headrace.tuning.search import Search, SettingFailed
from headrace.tuning.settings import Grid, Setting

OK, UNUSABLE = 0, 2
"""Exit codes."""

LEAST_SECONDS = 5.0
"""The shortest search, in seconds."""

_FEW_CPUS = 4
"""At least so many workers are tried, even with fewer CPUs: workers that wait for storage need none."""

_MEMORY_SHARE = 4
"""Batches that are asked for in advance may take one part in so many of the memory that is left."""

PREFETCH, FETCH_THREADS = (2, 4, 8), (1, 4, 16)


@dataclass(frozen=True)
class Options:
    """The command's options.

    Attributes:
        step: The training step.
        seconds: How long the search may take.
        executors: The executors to try.
        workers: Numbers of workers to try; None for the default.
        prefetch: Values of `prefetch_factor` to try.
        fetch_threads: Values of `fetch_threads` to try.
        plot: Where a picture goes; None for none.
        json: Where the result goes as JSON; None for nowhere.
    """

    step: Step
    seconds: float
    executors: tuple[str, ...]
    workers: tuple[int, ...] | None = None
    prefetch: tuple[int, ...] = PREFETCH
    fetch_threads: tuple[int, ...] = FETCH_THREADS
    plot: Path | None = None
    json: Path | None = None

    @classmethod
    def parse(
        cls,
        step_ms: float,
        step_on_cpu: bool,
        seconds: float,
        executors: str,
        workers: str | None,
        prefetch: str,
        fetch_threads: str,
        plot: str | None,
        as_json: str | None,
    ) -> "Options":
        """Make the options from what the user wrote.

        Raises:
            ValueError: An option lies outside its range.
            MissingExtra: An executor or the plot needs a package that is not installed.
            OSError: A file cannot be written.
        """
        if not 0 <= step_ms < float("inf"):
            bad_value("--step-ms", step_ms, "milliseconds >= 0", "Leave it out to find the fastest loader.")
        if step_on_cpu and not step_ms:
            bad_value("--step-on-cpu", step_on_cpu, "a step with it", "Pass --step-ms, too.")
        if not LEAST_SECONDS <= seconds < float("inf"):
            bad_value("--seconds", seconds, f"seconds >= {LEAST_SECONDS:g}", "A minute is enough for most loaders.")
        names = tuple(dict.fromkeys(name.strip() for name in executors.split(",")))
        for name in names:
            if name not in EXECUTORS:
                bad_value("--executors", name, f"names of {tuple(EXECUTORS)}", "Separate them by commas.")
            EXECUTORS[name]().check_installed()
        for file in (plot, as_json):
            if file is not None and not Path(file).resolve().parent.is_dir():
                raise FileNotFoundError(f"there is no folder for {file}")
            if file is not None and Path(file).is_dir():
                raise IsADirectoryError(f"{file} is a folder, not a file")
        if plot is not None:
            kinds = sorted(figure_class()().canvas.get_supported_filetypes())
            if Path(plot).suffix.removeprefix(".").lower() not in kinds:
                bad_value("--plot", plot, f"a name that ends in one of {', '.join(kinds)}", "A usual one is .png.")
        return cls(
            Step(step_ms / 1e3, step_on_cpu),
            seconds,
            names,
            None if workers is None else _numbers("--workers", workers),
            _numbers("--prefetch", prefetch),
            _numbers("--fetch-threads", fetch_threads),
            None if plot is None else Path(plot),
            None if as_json is None else Path(as_json),
        )


def run_tune(target: str, options: Options, cpus: float, console: Console) -> int:
    """Tune the target's loader, print the result, and return the exit code.

    Args:
        target: Names the factory.
        options: The command's options.
        cpus: How many CPUs this process may use.
        console: Where the result is printed.
    """
    with collect_warnings() as warned:
        try:
            report = tuned(target, options, cpus, console)
        except (CannotTune, MissingExtra) as reason:
            print(f"headrace tune: {reason}", file=sys.stderr)
            return UNUSABLE
    _show(report, options, console)
    for text, count in warned.items():
        console.print(f"warned{f' {count} times' * (count > 1)}: {text}", style="dim", markup=False, soft_wrap=True)
    return OK


def tuned(target: str, options: Options, cpus: float, console: Console) -> Report:
    """Search for the best settings of the target's loader.

    Raises:
        CannotTune: The text says why.
    """
    began_s = time.monotonic()
    try:
        factory = load_factory(target, "the loader")
    except ValueError as error:
        raise CannotTune(str(error)) from error
    subject = Subject(factory)
    grid = grid_of(subject, options, cpus)
    room, visits = free_memory(), 0
    with _progress(console) as show:

        def seen(setting: Setting, visit: Visit) -> None:
            nonlocal visits
            visits += 1
            show(f"{time.monotonic() - began_s:3.0f} s  visit {visits}: {setting}, {visit.seconds * 1e3:.3g} ms a step")

        search = Search(
            grid,
            Visitor(subject, options.step),
            time.monotonic,
            Machine(cpus, options.step.seconds),
            max(LEAST_SECONDS, began_s + options.seconds - time.monotonic()),
            None if room is None else room // _MEMORY_SHARE,
            seen,
        )
        try:
            result = search.run(grid.nearest(subject.setting))
        except SettingFailed as error:
            raise CannotTune(f"with the loader's own settings: {error}") from error
    try:
        epoch_batches = len(subject.loader)
    except Exception:  # noqa: BLE001 - an iterable dataset without a length, or a user's own that raises
        epoch_batches = None
    return Report(result, subject, options.step, cpus, time.monotonic() - began_s, visits, epoch_batches)


def grid_of(subject: Subject, options: Options, cpus: float) -> Grid:
    """Return the settings that may be tried: the options' values, and the loader's own."""
    own = subject.setting
    workers = options.workers
    if workers is None:
        most = max(_FEW_CPUS, int(cpus))
        doubled = {2**power for power in range(most.bit_length()) if 2**power <= most}
        workers = tuple(sorted(doubled | {most} | ({own.workers} - {0})))
    threads = options.fetch_threads
    if subject.fetches_singly:
        threads = (1,)
    elif subject.loader.batch_size is not None:
        threads = tuple(min(one, subject.loader.batch_size) for one in threads)
    prefetch = {*options.prefetch, own.prefetch_factor} - {0}
    return Grid(options.executors, workers, tuple(sorted(prefetch)), tuple(sorted({*threads, own.fetch_threads})))


def _show(report: Report, options: Options, console: Console) -> None:
    result = report.result

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    console.print(report.table())
    console.print()
    for line in report.bars():
        console.print(line, soft_wrap=True)
    for entry in result.entries:
        if entry.failed:
            say(f"{entry.setting} failed: {entry.failed}", "yellow")
    if not result.complete:
        say(f"The time was over before all was decided: --seconds {options.seconds:g}.", "yellow")
    if report.epochs_repeat():
        say(f"An epoch has only {report.epoch_batches} batches: visits read several, with the same workers.", "yellow")
    say(f"\n{report.code()}", "bold green")
    if result.choice != result.start:
        say(f"{result.speedup:.2f} times as fast as {result.start}.")
    say(f"Limited by {result.diagnosis.limit.value}: {result.diagnosis.why}. {result.diagnosis.advice}")
    left = f"; {result.ruled_out} more could not win by their stage times" * bool(result.ruled_out)
    left += f", {result.untried} were not tried" * bool(result.untried)
    visits = f"{report.visits} visits of {len(result.entries)} settings"
    finalists = sum(entry.rounds > 0 for entry in result.entries)
    visits += f", {finalists} of them in {report.last_rounds} last rounds" * bool(finalists)
    say(f"({report.took_s:.0f} s, {visits}{left}. Rule: {RULE}.)", "dim")
    if options.plot is not None:
        report.plot(options.plot)
        say(f"the bars are drawn in {options.plot}")
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line on a terminal, and nothing elsewhere."""
    if not console.is_terminal:
        yield lambda text: None
        return
    live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
    with live:  # without a thread of its own, which would not survive a fork
        yield lambda text: live.update(Text(text, style="dim"), refresh=True)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    numbers = set()
    for part in text.split(","):
        if not part.strip().isdigit() or int(part) < 1:
            bad_value(name, text, "whole numbers >= 1, separated by commas", f"{name} 1,2 tries one and two.")
        numbers.add(int(part))
    return tuple(sorted(numbers))
