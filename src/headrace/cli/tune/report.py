"""What `headrace tune` shows: a table, bars, a picture, the settings as code, and all of it as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from headrace.cli.tune.measuring import Step, Subject
from headrace.errors import MissingExtra
from headrace.tuning.finals import RULE
from headrace.tuning.race import TOLERANCE
from headrace.tuning.search import Entry, Result
from headrace.tuning.settings import INLINE, Setting

_BAR, _LEAST_BAR = 40, 10
"""The width of the longest bar, in characters, and the least that it has on a narrow terminal."""

_FIGURE = 10
"""The characters of a line that are neither name nor bar."""

_START_SHARE = 0.05
"""Workers should outlast an epoch if starting them takes more than this share of it."""


@dataclass(frozen=True)
class Report:
    """The result of a search, and what it was made with.

    Attributes:
        result: The result.
        subject: The loader.
        step: The training step.
        cpus: CPUs that this process may use.
        took_s: How long all took, in seconds.
        visits: How many visits there were.
        epoch_batches: Batches in an epoch; None if the loader cannot say.
    """

    result: Result
    subject: Subject
    step: Step
    cpus: float
    took_s: float
    visits: int
    epoch_batches: int | None

    @property
    def last_rounds(self) -> int:
        """How many last rounds have decided; 0 if none have."""
        return max(entry.rounds for entry in self.result.entries)

    @property
    def unit(self) -> str:
        """What is counted in a second."""
        return "steps/s" if self.step.seconds else "batches/s"

    def verdict(self, entry: Entry) -> str:
        """Word what was found about a setting."""
        result = self.result
        if entry.bounds is None:
            return "failed"
        said = ["best"] * (entry.setting == result.choice)
        said += ["fastest"] * (entry.setting == result.fastest != result.choice)
        alike = bool(entry.rounds) == bool(self.last_rounds)  # else the figures are of other kinds
        if not said and alike and self._ratio(entry.setting) < 1 + TOLERANCE:
            said.append("as fast")
        return ", ".join([*said, *["yours"] * (entry.setting == self.subject.setting)])

    def _ratio(self, setting: Setting) -> float:
        """Return how many times the fastest setting's time a setting takes."""
        return self._seconds(setting) / self._seconds(self.result.fastest)

    def _seconds(self, setting: Setting) -> float:
        found = self._of(setting).bounds
        assert found is not None, "a setting that was chosen was measured"
        return found.mean

    def table(self) -> Table:
        """Return a table of the settings that were tried."""
        table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
        table.add_column("executor", no_wrap=True)
        waits = ["waits"] * bool(self.step.seconds)
        for name in ("workers", "prefetch", "threads", self.unit, "+-", "time", *waits, "start"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for entry in self.result.entries:
            style = "bold green" if entry.setting == self.result.choice else ""
            table.add_row(*self._row(entry), style=style)
        return table

    def _row(self, entry: Entry) -> list[str]:
        setting = entry.setting
        inline = setting.executor == INLINE
        cells = [setting.executor, "-" if inline else str(setting.workers)]
        cells += ["-" if inline else str(setting.prefetch_factor), str(setting.fetch_threads)]
        waits = bool(self.step.seconds)
        if entry.bounds is None or entry.last is None:
            return [*cells, *["-"] * (4 + waits), self.verdict(entry)]
        ratio = self._ratio(setting)
        cells += [_figure(1 / entry.bounds.mean), f"{entry.bounds.high / entry.bounds.mean - 1:.0%}"]
        cells += [f"{ratio:.2f} x" if ratio < 10 else f"{ratio:.0f} x"]
        cells += [f"{entry.last.wait_s / entry.last.seconds:.0%}"] * waits
        return [*cells, f"{entry.last.start_s:.2f} s", self.verdict(entry)]

    def bars(self, columns: int) -> list[Text]:
        """Return the settings as bars, up to the lower bound full, up to the upper bound light.

        Args:
            columns: The width that a line should not exceed.
        """
        measured = self._measured()
        longest = max(1 / entry.bounds.low for entry in measured if entry.bounds)
        width = max(len(str(entry.setting)) for entry in measured)
        bar_width = max(_LEAST_BAR, min(_BAR, columns - width - _FIGURE))
        lines = []
        for entry in measured:
            assert entry.bounds is not None
            sure, possible = (round(bar_width / longest / value) for value in (entry.bounds.high, entry.bounds.low))
            bar = "█" * sure + "░" * (possible - sure)
            style = "bold green" if entry.setting == self.result.choice else ""
            lines.append(Text(f"{entry.setting!s:{width}}  {bar} {_figure(1 / entry.bounds.mean)}", style=style))
        return lines

    def _measured(self) -> Sequence[Entry]:
        return [entry for entry in self.result.entries if entry.bounds is not None]

    def code(self) -> str:
        """Return the choice as the arguments of a loader."""
        choice = self.result.choice
        if choice.executor == INLINE:
            parts = ["num_workers=0", *['executor="inline"'] * (self.subject.loader.executor is not None)]
        else:
            own = self.subject.executor_of(choice.executor)
            parts = [f"num_workers={choice.workers}", f"executor={own!r}".replace("'", '"')]
            parts += [f"prefetch_factor={choice.prefetch_factor}"] * (choice.prefetch_factor != 2)
            parts += ["persistent_workers=True"] * self.persistent()
        parts += [f"fetch_threads={choice.fetch_threads}"] * (choice.fetch_threads != 1)
        return f"DataLoader(..., {', '.join(parts)})"

    def persistent(self) -> bool:
        """Tell whether starting workers takes a notable share of an epoch."""
        choice, last = self.result.choice, self._of(self.result.choice).last
        if self.epoch_batches is None or last is None:
            return False
        return last.start_s > _START_SHARE * self.epoch_batches * self._seconds(choice)

    def epochs_repeat(self) -> bool:
        """Tell whether an epoch is so short that a visit reads more than one."""
        lasts = [entry.last for entry in self.result.entries if entry.last is not None]
        return self.epoch_batches is not None and any(last.batches >= self.epoch_batches for last in lasts)

    def _of(self, setting: Setting) -> Entry:
        return next(entry for entry in self.result.entries if entry.setting == setting)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON's types."""
        result = self.result

        def entry_of(entry: Entry) -> dict[str, Any]:
            found: dict[str, Any] = {"setting": asdict(entry.setting), "verdict": self.verdict(entry)}
            found |= {"visits": entry.visits, "last_rounds": entry.rounds, "failed": entry.failed}
            if entry.bounds is not None and entry.last is not None:
                found["seconds_per_step"] = asdict(entry.bounds)
                found["last_visit"] = asdict(entry.last) | {"stages": entry.last.stages._asdict()}
            return found

        return {
            "best": asdict(result.choice),
            "code": self.code(),
            "fastest": asdict(result.fastest),
            "yours": asdict(result.start),
            "speedup": result.speedup,
            "limit": result.diagnosis.limit.value,
            "why": result.diagnosis.why,
            "advice": result.diagnosis.advice,
            "rule": RULE,
            "complete": result.complete,
            "ruled_out": result.ruled_out,
            "untried": result.untried,
            "step_s": self.step.seconds,
            "cpus": self.cpus,
            "took_s": self.took_s,
            "visits": self.visits,
            "tried": [entry_of(entry) for entry in result.entries],
        }

    def plot(self, path: Path) -> None:
        """Draw the settings as bars with their bounds, into a picture.

        Raises:
            MissingExtra: Matplotlib is not installed.
            OSError: The file cannot be written.
        """
        figure_of = figure_class()
        measured = list(reversed(self._measured()))
        figure = figure_of(figsize=(9, 1.2 + 0.3 * len(measured)), layout="constrained")
        axes = figure.add_subplot()
        rates = [1 / entry.bounds.mean for entry in measured if entry.bounds]
        low = [1 / entry.bounds.mean - 1 / entry.bounds.high for entry in measured if entry.bounds]
        high = [1 / entry.bounds.low - 1 / entry.bounds.mean for entry in measured if entry.bounds]
        colors = ["tab:green" if entry.setting == self.result.choice else "tab:gray" for entry in measured]
        names = [str(entry.setting) for entry in measured]
        axes.barh(names, rates, xerr=[low, high], color=colors, ecolor="black", capsize=2)
        if self.step.seconds:
            axes.axvline(1 / self.step.seconds, linestyle=":", color="black", label="the trainer alone")
            axes.legend()
        axes.set_xlabel(self.unit)
        figure.savefig(path)


def figure_class() -> Any:
    """Return matplotlib's `Figure`, which needs no display.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    try:
        return import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        raise MissingExtra("--plot needs matplotlib, which is not installed", "plot") from error


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
