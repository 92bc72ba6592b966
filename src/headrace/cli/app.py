"""The commands and their options. A command's modules are imported when it runs: `--help` needs no torch."""

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from headrace.cli.terminal.group import Commands
from headrace.cli.terminal.screen import Screen, tell_json
from headrace.errors import whole_number
from headrace.version import __version__

MOST_RANKS = 100_000
"""The largest world that `headrace plan` shows."""

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on standard output, all else on standard error.")
]
Factory = Annotated[
    str,
    typer.Argument(help="The function that makes the loader, without arguments: pkg.module:name or file.py:name."),
]


def run() -> int:
    """Run the command that the process was started with, and return its exit code."""
    code: int = app(standalone_mode=False)
    return code


def _example(text: str) -> str:
    return f"Example: headrace {text}"


def _finished(as_json: bool, command: Callable[[Screen], int]) -> int:
    """Run a command, print its result as JSON if that is wanted, and return its exit code."""
    screen = Screen(as_json)
    code = command(screen)
    screen.finish(code)
    return code


def _show_version(wanted: bool) -> None:
    if wanted:
        Screen().print(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """headrace: a drop-in torch DataLoader that splits every epoch exactly over ranks."""


@app.command(epilog=_example("plan --size 10 --world-size 4 --batch-size 2"))
def plan(
    size: Annotated[int | None, typer.Option(help="Samples in the dataset.")] = None,
    world_size: Annotated[int, typer.Option(help="Ranks.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Samples per rank and step.")] = 1,
    tail: Annotated[str, typer.Option(help="End of the epoch: pad, drop or exact.")] = "pad",
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle, as the loader would.")] = False,
    epoch: Annotated[int, typer.Option(help="Which epoch, from 0; matters with --shuffle.")] = 0,
    seed: Annotated[int, typer.Option(help="The seed of the shuffle.")] = 0,
    cursor: Annotated[
        int, typer.Option(help="Begin here: the number of samples of the epoch that were read before.")
    ] = 0,
    as_json: AsJson = False,
    shards: Annotated[
        str | None,
        typer.Option(help="Instead: which of these tar shards each rank reads, and how well their samples are mixed."),
    ] = None,
    streams: Annotated[int | None, typer.Option(help="With --shards: streams of the order of blocks.")] = None,
    window: Annotated[int | None, typer.Option(help="With --shards: the order's window.")] = None,
    label: Annotated[
        str | None, typer.Option(help="With --shards: a column of the index (headrace index --column) with labels.")
    ] = None,
) -> int:
    """Show which rank reads which samples at which step, without a dataset or a process group."""
    from headrace.cli.plan import EpochPlan, OrderOfShards, show

    whole_number("--world-size", world_size, low=1, high=MOST_RANKS, fix="Count the ranks, one for each device.")
    if shards is not None:
        order = OrderOfShards.make(shards, streams, window, label, seed, world_size, batch_size)
        return _finished(as_json, order.show)
    if size is None:
        raise ValueError("--size or --shards is missing: how many samples, or which shards?")
    epoch_plan = EpochPlan.make(size, world_size, batch_size, tail, shuffle, epoch, seed, cursor)
    if as_json:
        tell_json(epoch_plan.as_json())
    else:
        show(epoch_plan, Screen())
    return 0


@app.command(epilog=_example("index 'train-{000..127}.tar' --column cls"))
def index(
    shards: Annotated[list[str], typer.Argument(help="Tar shards: paths, with braces ('{000..127}') or wildcards.")],
    manifest: Annotated[
        str | None, typer.Option(help="Write one index of all shards, named *.index, instead of one beside each.")
    ] = None,
    checksums: Annotated[bool, typer.Option("--checksums", help="Also keep a checksum of each field's data.")] = False,
    column: Annotated[
        list[str] | None,
        typer.Option(help="Also keep the number that each sample has in a field: cls, or json:label. May be repeated."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes; by default one for each CPU.")] = None,
    as_json: AsJson = False,
) -> int:
    """Make the indexes by which TarDataset reads tar shards. Existing indexes are replaced."""
    from headrace.cli.index import Options, run_index

    options = Options.parse(shards, manifest, checksums, column or [], jobs)
    return _finished(as_json, lambda screen: run_index(options, screen))


@app.command(epilog=_example("inspect train-000000.tar --html page.html"))
def inspect(
    shard: Annotated[str, typer.Argument(help="A plain tar shard.")],
    page: Annotated[str | None, typer.Option("--html", help="Also write a page that shows the first samples.")] = None,
    samples: Annotated[int, typer.Option(help="How many samples the page shows.")] = 100,
    as_json: AsJson = False,
) -> int:
    """Show a shard's fields, their counts and sizes, and its problems. Nothing is written beside the shard."""
    from headrace.cli.inspect import run_inspect

    whole_number("--samples", samples, low=1)
    return _finished(as_json, lambda screen: run_inspect(shard, page, samples, screen))


class _SeedMayBeLeftOut(TyperCommand):
    """A command whose option `--shuffle` has a seed of 0 if no number follows it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command's words."""
        given = [
            "--shuffle=0" if word == "--shuffle" and not re.fullmatch(r"[+-]?\d+", after) else word
            for word, after in zip(args, [*args[1:], ""], strict=True)
        ]
        return super().parse_args(ctx, given)


@app.command(cls=_SeedMayBeLeftOut, epilog=_example("pack pictures/ train-%06d.tar --shuffle"))
def pack(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder with a folder of pictures for each class; tar shards, to be cut anew; or a function that "
            "returns a map-style dataset, without arguments: pkg.module:name or file.py:name."
        ),
    ],
    pattern: Annotated[str, typer.Argument(help="The shards' names, with a place for a number: train-%06d.tar.")],
    fields: Annotated[
        str | None,
        typer.Option(help="Names for the values of a dataset's samples that are no dicts, for example 'png cls'."),
    ] = None,
    maxcount: Annotated[int, typer.Option(help="Samples in a shard.")] = 1000,
    shuffle: Annotated[
        int | None,
        typer.Option(
            help="Permute the samples by this seed (0 if it is left out): shards are not sorted by class then."
        ),
    ] = None,
    checksums: Annotated[bool, typer.Option("--checksums", help="Also keep a checksum of each field's data.")] = False,
    jobs: Annotated[int | None, typer.Option(help="Processes; by default one for each CPU.")] = None,
    as_json: AsJson = False,
) -> int:
    """Write tar shards with their indexes, always the same bytes: all of them or none. No file is replaced."""
    from headrace.cli.pack import Options, run_pack

    options = Options.parse(source, fields, pattern, maxcount, shuffle, checksums, jobs)
    return _finished(as_json, lambda screen: run_pack(options, screen))


@app.command(epilog=_example("doctor --json"))
def doctor(
    as_json: AsJson = False,
) -> int:
    """Show versions, what workers can use, limits of this machine, and advice."""
    from headrace.cli.doctor import findings, run_doctor

    if as_json:
        tell_json([one._asdict() for one in findings()])
    else:
        run_doctor(Screen())
    return 0


@app.command(epilog=_example("demo"))
def demo(
    as_json: AsJson = False,
) -> int:
    """Train on real digits with two ranks, and check what headrace claims."""
    from headrace.cli.demo.demo import run_demo

    return _finished(as_json, run_demo)


@app.command(epilog=_example("verify train.py:make_loader --workers 1,2 --worlds 1,2"))
def verify(
    factory: Factory,
    executors: Annotated[
        str,
        typer.Option(
            help="Where the work runs, separated by commas. More than two spawned workers at a time are forked from "
            "one spawned interpreter, before it has imported anything of yours (forkserver)."
        ),
    ] = "inline,thread,fork,spawn",
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "1,2,4",
    worlds: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "1,2,3,4",
    epochs: Annotated[int, typer.Option(help="Epochs to read in each cell.")] = 1,
    samples: Annotated[int, typer.Option(help="The most samples to read of an epoch.")] = 512,
    full: Annotated[bool, typer.Option("--full", help="Try all combinations, not only each value once.")] = False,
    kills: Annotated[bool, typer.Option(help="Kill workers, too.")] = True,
    as_json: AsJson = False,
) -> int:
    """Read a loader's samples in many ways, and say whether they are the same bits; if not, why."""
    from headrace.cli.verify.verify import Options, run_verify

    options = Options.parse(executors, workers, worlds, epochs, samples, full, kills)
    return _finished(as_json, lambda screen: run_verify(factory, options, screen))


@app.command(epilog=_example("tune train.py:make_loader --step-ms 120"))
def tune(
    factory: Factory,
    step_ms: Annotated[
        float, typer.Option(help="The milliseconds of a training step: settings that keep it fed are equal.")
    ] = 0.0,
    step_on_cpu: Annotated[
        bool, typer.Option("--step-on-cpu", help="The step computes on the CPU; else it sleeps, as if on a device.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="How long the search may take.")] = 60.0,
    executors: Annotated[
        str, typer.Option(help="Where the work may run, separated by commas: process, thread, inline, ray.")
    ] = "process,thread,inline",
    workers: Annotated[
        str | None, typer.Option(help="Numbers of workers, separated by commas; by default up to the CPUs, at least 4.")
    ] = None,
    prefetch: Annotated[str, typer.Option(help="Values of prefetch_factor, separated by commas.")] = "2,4,8",
    fetch_threads: Annotated[str, typer.Option(help="Values of fetch_threads, separated by commas.")] = "1,4,16",
    plot: Annotated[str | None, typer.Option(help="Also draw the result, into this file (.png, .svg, .pdf).")] = None,
    as_json: AsJson = False,
) -> int:
    """Find the settings that feed a trainer best, the fewest workers of those that do, and what limits them."""
    from headrace.cli.tune.tune import Options, run_tune

    options = Options.parse(step_ms, step_on_cpu, seconds, executors, workers, prefetch, fetch_threads, plot)
    return _finished(as_json, lambda screen: run_tune(factory, options, screen))
