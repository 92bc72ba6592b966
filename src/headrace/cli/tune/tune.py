"""`headrace tune`: which executor, how many workers, how much ahead, how many samples at a time?"""

import time
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from headrace.cli.factory.load import load_factory
from headrace.cli.terminal.numbers import numbers_of
from headrace.cli.terminal.screen import Screen, complain, working
from headrace.cli.tune.measuring import CannotTune, Step, Subject, Visitor
from headrace.cli.tune.report import Report, figure_class
from headrace.cli.verify.cells import collect_warnings
from headrace.errors import MissingExtra, bad_value
from headrace.loader.options import EXECUTORS
from headrace.system.limits import free_memory, usable_cpus
from headrace.tuning.diagnosis import Machine
from headrace.tuning.finals import RULE
from headrace.tuning.race import Visit
from headrace.tuning.search import Search, SettingFailed
from headrace.tuning.settings import Grid, Setting

OK, UNUSABLE = 0, 2
"""Exit codes."""

LEAST_SECONDS, MOST_SECONDS = 5.0, 86_400
"""The shortest search and the longest, in seconds."""

MOST_STEP_MS = 600_000
"""The longest training step, in milliseconds."""

MOST_WORKERS, MOST_PREFETCH, MOST_THREADS = 512, 1024, 512
"""The largest values of `num_workers`, `prefetch_factor` and `fetch_threads` that are tried."""

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
    """

    step: Step
    seconds: float
    executors: tuple[str, ...]
    workers: tuple[int, ...] | None = None
    prefetch: tuple[int, ...] = PREFETCH
    fetch_threads: tuple[int, ...] = FETCH_THREADS
    plot: Path | None = None

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
    ) -> "Options":
        """Make the options from what the user wrote.

        Raises:
            ValueError: An option lies outside its range.
            MissingExtra: An executor or the plot needs a package that is not installed.
            OSError: A file cannot be written.
        """
        if not 0 <= step_ms <= MOST_STEP_MS:
            allowed = f"milliseconds >= 0 and <= {MOST_STEP_MS:,}"
            bad_value("--step-ms", step_ms, allowed, "Leave it out to find the fastest loader.")
        if step_on_cpu and not step_ms:
            bad_value("--step-on-cpu", step_on_cpu, "a step with it", "Pass --step-ms, too.")
        if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            allowed = f"seconds >= {LEAST_SECONDS:g} and <= {MOST_SECONDS:,}"
            bad_value("--seconds", seconds, allowed, "A minute is enough for most loaders.")
        names = tuple(dict.fromkeys(name.strip() for name in executors.split(",")))
        for name in names:
            if name not in EXECUTORS:
                bad_value("--executors", name, f"names of {tuple(EXECUTORS)}", "Separate them by commas.")
            EXECUTORS[name]().check_installed()
        if plot is not None:
            if not Path(plot).resolve().parent.is_dir():
                raise FileNotFoundError(f"there is no folder for {plot}")
            if Path(plot).is_dir():
                raise IsADirectoryError(f"{plot} is a folder, not a file")
            kinds = sorted(figure_class()().canvas.get_supported_filetypes())
            if Path(plot).suffix.removeprefix(".").lower() not in kinds:
                bad_value("--plot", plot, f"a name that ends in one of {', '.join(kinds)}", "A usual one is .png.")
        return cls(
            Step(step_ms / 1e3, step_on_cpu),
            seconds,
            names,
            None if workers is None else numbers_of("--workers", workers, MOST_WORKERS),
            numbers_of("--prefetch", prefetch, MOST_PREFETCH),
            numbers_of("--fetch-threads", fetch_threads, MOST_THREADS),
            None if plot is None else Path(plot),
        )


def run_tune(target: str, options: Options, screen: Screen) -> int:
    """Tune the target's loader, print the result, and return the exit code.

    Args:
        target: Names the factory.
        options: The command's options.
        screen: Where the result is printed.
    """
    with collect_warnings() as warned:
        try:
            report = tuned(target, options, usable_cpus(), screen)
        except (CannotTune, MissingExtra) as reason:
            complain(f"headrace tune: {reason}")
            return UNUSABLE
    _show(report, options, screen)
    for text, count in warned.items():
        screen.print(f"warned{f' {count} times' * (count > 1)}: {text}", style="dim", soft_wrap=True)
    return OK


def tuned(target: str, options: Options, cpus: float, screen: Screen) -> Report:
    """Search for the best settings of the target's loader.

    Raises:
        CannotTune: The text says why.
    """
    began_s = time.monotonic()
    with working(screen) as show:
        show(f"making the loader: {target}")
        try:
            factory = load_factory(target, "the loader")
        except ValueError as error:
            raise CannotTune(str(error)) from error
        subject = Subject(factory)
        grid = grid_of(subject, options, cpus)
        room, visits = free_memory(), 0

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
        show(f"reading with the loader's own settings: {subject.setting}")
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


def _show(report: Report, options: Options, screen: Screen) -> None:
    result = report.result

    def say(text: str, style: str = "") -> None:
        screen.print(Text(text, style=style), soft_wrap=True)

    screen.print(report.table())
    screen.print()
    for line in report.bars(screen.width):
        screen.print(line, soft_wrap=True)
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
    screen.facts = report.as_json()
