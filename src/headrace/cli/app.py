"""The commands and their options."""

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli.demo import run_demo
from headrace.cli.plan import EpochPlan, show

app = typer.Typer(
    help="headrace: a drop-in torch DataLoader that splits every epoch exactly over ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def plan(
    size: Annotated[int, typer.Option(help="Samples in the dataset.")],
    world_size: Annotated[int, typer.Option(help="Ranks.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Samples per rank and step.")] = 1,
    tail: Annotated[str, typer.Option(help="End of the epoch: pad, drop or exact.")] = "pad",
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle, as the loader would.")] = False,
    epoch: Annotated[int, typer.Option(help="Which epoch, from 0; matters with --shuffle.")] = 0,
    seed: Annotated[int, typer.Option(help="Keys the shuffle.")] = 0,
    cursor: Annotated[int, typer.Option(help="Begin here: so many samples of the epoch were read before.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, as one JSON object.")] = False,
) -> None:
    """Show which rank reads which samples at which step, without a dataset or a process group."""
    try:
        epoch_plan = EpochPlan.make(size, world_size, batch_size, tail, shuffle, epoch, seed, cursor)
        if as_json:
            sys.stdout.write(json.dumps(epoch_plan.as_json()) + "\n")
            return
    except ValueError as error:
        typer.echo(f"headrace plan: {error}", err=True)
        raise typer.Exit(2) from None
    show(epoch_plan, Console(highlight=False))


@app.command()
def demo() -> None:
    """Train on real digits with two ranks, and check on the way what headrace claims."""
    raise typer.Exit(run_demo(Console(highlight=False)))
