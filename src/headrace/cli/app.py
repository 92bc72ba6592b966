"""The commands and their options."""

import json
import re
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from headrace.cli.demo.demo import run_demo
from headrace.cli.doctor import findings, run_doctor
from headrace.cli.index import Options as IndexOptions
from headrace.cli.index import run_index
from headrace.cli.inspect import run_inspect
from headrace.cli.mixing import order_of_shards, show_shards
from headrace.cli.pack import Options as PackOptions
from headrace.cli.pack import run_pack
from headrace.cli.plan import EpochPlan, show
from headrace.cli.tune.tune import Options as TuneOptions
from headrace.cli.tune.tune import run_tune
from headrace.cli.verify.verify import Options, run_verify
from headrace.errors import MissingExtra, whole_number
from headrace.plan.blocks import WINDOW
from headrace.system.limits import usable_cpus
from headrace.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """headrace: a drop-in torch DataLoader that splits every epoch exactly over ranks."""


@app.command()
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole epoch as one JSON object.")] = False,
    shards: Annotated[
        str | None,
        typer.Option(help="Instead: which of these tar shards each rank reads, and how well their samples are mixed."),
    ] = None,
    streams: Annotated[int | None, typer.Option(help="With --shards: streams of the order of blocks.")] = None,
    window: Annotated[int, typer.Option(help="With --shards: the order's window.")] = WINDOW,
    label: Annotated[
        str | None, typer.Option(help="With --shards: a column of the index (headrace index --column) with labels.")
    ] = None,
) -> None:
    """Show which rank reads which samples at which step, without a dataset or a process group."""
    try:
        if shards is not None:
            whole_number("--world-size", world_size, low=1)
            whole_number("--batch-size", batch_size, low=1)
            order, labels = order_of_shards(shards, streams, window, label)
            show_shards(order, labels, seed, world_size, batch_size, Console(highlight=False))
            return
        if size is None:
            raise ValueError("--size or --shards is missing: how many samples, or which shards?")
        epoch_plan = EpochPlan.make(size, world_size, batch_size, tail, shuffle, epoch, seed, cursor)
        if as_json:
            sys.stdout.write(json.dumps(epoch_plan.as_json()) + "\n")
            return
    except (ValueError, OSError) as error:
        typer.echo(f"headrace plan: {error}", err=True)
        raise typer.Exit(2) from None
    show(epoch_plan, Console(highlight=False))


@app.command()
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
) -> None:
    """Make the indexes by which TarDataset reads tar shards. Existing indexes are replaced."""
    try:
        options = IndexOptions.parse(shards, manifest, checksums, column or [], jobs)
    except (ValueError, OSError) as error:
        typer.echo(f"headrace index: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(run_index(options, Console(highlight=False)))


@app.command()
def inspect(
    shard: Annotated[str, typer.Argument(help="A plain tar shard.")],
    page: Annotated[str | None, typer.Option("--html", help="Also write a page that shows the first samples.")] = None,
    samples: Annotated[int, typer.Option(help="How many samples the page shows.")] = 100,
) -> None:
    """Show a shard's fields, their counts and sizes, and its problems. Nothing is written beside the shard."""
    try:
        whole_number("--samples", samples, low=1)
        code = run_inspect(shard, page, samples, Console(highlight=False))
    except (ValueError, OSError, MissingExtra) as error:
        typer.echo(f"headrace inspect: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


class _SeedMayBeLeftOut(TyperCommand):
    """A command whose option `--shuffle` has a seed of 0 if no number follows it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command's words."""
        given = [
            "--shuffle=0" if word == "--shuffle" and not re.fullmatch(r"[+-]?\d+", after) else word
            for word, after in zip(args, [*args[1:], ""], strict=True)
        ]
        return super().parse_args(ctx, given)


@app.command(cls=_SeedMayBeLeftOut)
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
) -> None:
    """Write tar shards with their indexes, always the same bytes: all of them or none. No file is replaced."""
    try:
        code = run_pack(
            PackOptions.parse(source, fields, pattern, maxcount, shuffle, checksums, jobs), Console(highlight=False)
        )
    except (ValueError, OSError) as error:
        typer.echo(f"headrace pack: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list.")] = False,
) -> None:
    """Show versions, what workers can use, limits of this machine, and advice."""
    if as_json:
        sys.stdout.write(json.dumps([one._asdict() for one in findings()]) + "\n")
    else:
        run_doctor(Console(highlight=False))


@app.command()
def demo() -> None:
    """Train on real digits with two ranks, and check what headrace claims."""
    raise typer.Exit(run_demo(Console(highlight=False)))


@app.command()
def verify(
    factory: Annotated[
        str,
        typer.Argument(help="The function that makes the loader, without arguments: pkg.module:name or file.py:name."),
    ],
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
) -> None:
    """Read a loader's samples in many ways, and say whether they are the same bits; if not, why."""
    try:
        options = Options.parse(executors, workers, worlds, epochs, samples, full, kills)
    except ValueError as error:
        typer.echo(f"headrace verify: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(run_verify(factory, options, Console(highlight=False)))


@app.command()
def tune(
    factory: Annotated[
        str,
        typer.Argument(help="The function that makes the loader, without arguments: pkg.module:name or file.py:name."),
    ],
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
    as_json: Annotated[
        str | None, typer.Option("--json", help="Also write the result as JSON, into this file.")
    ] = None,
) -> None:
    """Find the settings that feed a trainer best, the fewest workers of those that do, and what limits them."""
    try:
        options = TuneOptions.parse(
            step_ms, step_on_cpu, seconds, executors, workers, prefetch, fetch_threads, plot, as_json
        )
    except (ValueError, OSError, MissingExtra) as error:
        typer.echo(f"headrace tune: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(run_tune(factory, options, usable_cpus(), Console(highlight=False)))
