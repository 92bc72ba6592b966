"""`headrace demo`: ranks train on real digits, a Ray worker is killed, and claims about what was read are checked."""

import importlib.util
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from headrace.cli.demo.launch import MARK, JobFailed, run_ranks
from headrace.cli.demo.packed import KILL_STEP
from headrace.cli.terminal.screen import Screen, complain, working
from headrace.errors import MissingExtra

RANKS = 2
MORE_RANKS = 3
ACCURACY = 0.95

Fact = dict[str, Any]


def run_demo(screen: Screen) -> int:
    """Run the demonstration and return its exit code: 0 if every claim held.

    Raises:
        MissingExtra: Ray, or scikit-learn, which brings the digits, is not installed.
    """
    for module, what in (("sklearn", "trains on the digits in scikit-learn"), ("ray", "runs an epoch on Ray")):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(f"the demo {what}, which is not installed", "demo")
    started = time.monotonic()
    claims = Claims(screen)
    try:
        screen.print(f"Starting {RANKS} ranks on this machine, with DistributedDataParallel over gloo")
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            shards = f"shards:{folder}"  # the first time it is killed in the middle
            tasks = "train", "digest", f"pack:{folder}", f"memory:{folder}", shards
            facts = _run_ranks(screen, RANKS, *tasks, killed=True)
            resumed = _run_ranks(screen, RANKS, shards)
        (data,) = _named(facts, "data")
        show_training(claims, data, _named(facts, "epoch"))
        show_test(claims, data, *_named(facts, "test"))
        show_balanced(claims, *_named(facts, "balanced"))
        show_shards(claims, *_named(facts, "packed"), *_named(facts, "memory"), *_named(resumed, "shards"))
        screen.print(f"\nStarting {MORE_RANKS} ranks")
        more = _run_ranks(screen, MORE_RANKS, "digest")
        screen.print("Starting one rank, and Ray on this machine with two workers, which takes ten seconds or more")
        alone = _run_ranks(screen, 1, "digest", "ray")
        show_digests(claims, [_named(run, "digest")[0] for run in (alone, facts, more)])
        show_ray(claims, *_named(alone, "ray"))
    except JobFailed as error:
        complain(f"headrace demo: the ranks failed.\n{error}")
        return 1
    screen.facts = {"claims": claims.made}
    screen.print()
    if claims.broken:
        screen.print(f"FAILED: {'; '.join(claims.broken)}", style="bold red", soft_wrap=True)
        return 1
    screen.print(f"All {claims.count} claims held. ({time.monotonic() - started:.0f} s)", style="bold green")
    return 0


class Claims:
    """Prints claims with yes or NO, and remembers those that did not hold.

    Args:
        screen: Where to print.
    """

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.count = 0
        self.broken: list[str] = []
        self.made: list[dict[str, Any]] = []

    def check(self, claim: str, holds: bool) -> None:
        """Print one claim and whether it holds."""
        self.count += 1
        self.made.append({"claim": claim, "holds": holds})
        if not holds:
            self.broken.append(claim)
        self.screen.print(Text(f"  {claim}: ").append(*_YES if holds else _NO), soft_wrap=True)

    def heading(self, text: str) -> None:
        """Print a section's heading."""
        self.screen.print(f"\n{text}", style="bold", soft_wrap=True)


_YES = ("yes", "green")
_NO = ("NO", "bold red")


def show_training(claims: Claims, data: Fact, epochs: Sequence[Fact]) -> None:
    """Print the loss of each epoch and how much of it each rank read."""
    ranks = range(len(epochs[0]["shares"]))
    claims.heading(f"Training: {data['training']} images, shuffle=True; no DistributedSampler, no set_epoch")
    table = Table("epoch", "loss", *(f"rank {rank} read" for rank in ranks), "read twice", "left out", box=None)
    for column in table.columns:
        column.justify = "right"
    for one in epochs:
        table.add_row(
            str(one["epoch"]),
            f"{one['loss']:.4f}",
            *map(str, one["shares"]),
            str(one["repeated"]),
            str(one["missing"]),
        )
    claims.screen.print(table)
    claims.check("the ranks' shares are disjoint in every epoch", not any(one["repeated"] for one in epochs))
    claims.check("together they are complete in every epoch", not any(one["missing"] for one in epochs))
    claims.check("each epoch is shuffled anew", len({one["order"] for one in epochs}) == len(epochs))


def show_test(claims: Claims, data: Fact, alone: Fact, theirs: Fact, ours: Fact) -> None:
    """Print the test accuracy counted by one process, by ranks with torch's sampler, and by ranks with headrace."""
    claims.heading(f"Test: {data['test']} images on {RANKS} ranks, counts summed over them")
    table = Table("counted by", "images", "of them twice", "right", "accuracy", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    ways = {"one process": alone, "torch, DistributedSampler": theirs, 'headrace, tail="exact"': ours}
    for way, one in ways.items():
        counts = map(str, (one["counted"], _twice(one), one["correct"]))
        table.add_row(way, *counts, f"{_accuracy(one):.2%}")
    claims.screen.print(table)
    claims.check(f"at least {ACCURACY:.0%} of the answers are right", _accuracy(ours) >= ACCURACY)
    claims.check(
        f"each of the {data['test']} images was counted exactly once",
        ours["counted"] == ours["distinct"] == data["test"],
    )
    claims.check(
        f'tail="exact" counts as one process does; DistributedSampler counts {_twice(theirs)} of the images twice',
        ours == alone and _twice(theirs) > 0,
    )


def _accuracy(test: Fact) -> float:
    return float(test["correct"] / max(1, test["counted"]))


def _twice(test: Fact) -> int:
    return int(test["counted"] - test["distinct"])


def show_balanced(claims: Claims, balanced: Fact) -> None:
    """Print the class counts of an unbalanced set and of the balanced batches read from it."""
    classes = range(len(balanced["data"]))
    claims.heading("Balanced batches: order=Balanced(labels), where nine in ten of the digits 0 to 4 are missing")
    table = Table("digit", *map(str, classes), box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("in the data", *map(str, balanced["data"]))
    for rank, counts in enumerate(balanced["first"]):
        table.add_row(f"rank {rank}, batch 0", *map(str, counts))
    claims.screen.print(table)
    claims.check(
        f"all digits equally often in each of the {balanced['batches']} full batches, on each rank",
        balanced["spread"] == 0,
    )


def show_shards(claims: Claims, packed: Fact, memory: Fact, shards: Fact) -> None:
    """Print the digests of training from memory, and from tar shards with a rank killed in the middle."""
    claims.heading(
        f"Tar shards: {packed['samples']} images in {packed['shards']} shards; a rank is killed at step {KILL_STEP}, "
        f"the job starts again from step {shards['begun']}"
    )
    table = Table("trained from", "steps", "sha256 of each rank's batches", "of the network", box=None)
    for name, one in {"memory": memory, "shards": shards}.items():
        table.add_row(name, str(one["steps"]), " ".join(rank[:12] for rank in one["digests"]), one["weights"][:12])
    claims.screen.print(table)
    claims.check(
        "killed and resumed: every batch of each rank, and the trained network, are those from memory, bit for bit",
        shards["begun"] > 0 and all(shards[name] == memory[name] for name in ("steps", "digests", "weights")),
    )


def show_digests(claims: Claims, runs: Sequence[Fact]) -> None:
    """Print the digests of the global batches that worlds of different sizes read."""
    claims.heading("The same global batches for any number of ranks")
    table = Table("ranks", "batch size", "steps", "samples", "sha256 of the samples in each step", box=None)
    for column in table.columns[:-1]:
        column.justify = "right"
    worlds = (1, RANKS, MORE_RANKS)
    for size, run in zip(worlds, runs, strict=True):
        table.add_row(str(size), str(run["batch_size"]), str(run["steps"]), str(run["samples"]), run["digest"][:24])
    claims.screen.print(table)
    names = ", ".join(map(str, worlds[:-1])) + f" and {worlds[-1]}"
    claims.check(f"{names} ranks give equal digests", len({run["digest"] for run in runs}) == 1)


def show_ray(claims: Claims, fact: Fact) -> None:
    """Print the digests of one epoch, made in one process and made on Ray with a worker killed in the middle."""
    claims.heading(
        f"One epoch with random noise on the images: here; and on Ray, a worker killed at step {fact['kill_step']}"
    )
    table = Table("made", "steps", "workers that died", "sha256 of every bit of every batch", box=None)
    for column in table.columns[1:-1]:
        column.justify = "right"
    table.add_row("here", str(fact["steps"]), "", fact["here"][:24])
    table.add_row("on Ray", str(fact["steps"]), str(fact["died"]), fact["there"][:24])
    claims.screen.print(table)
    claims.check(
        "a Ray worker was killed in the middle, and not one bit is another",
        fact["died"] >= 1 and fact["here"] == fact["there"],
    )


def _run_ranks(screen: Screen, size: int, *tasks: str, killed: bool = False) -> list[Fact]:
    """Run ranks, and show what they have done."""
    started = time.monotonic()
    with working(screen) as show:

        def seen(name: str) -> None:
            show(f"{time.monotonic() - started:3.0f} s  done: {name}")

        return run_ranks(size, *tasks, seen=seen, killed=killed)


def _named(facts: Sequence[Fact], name: str) -> list[Fact]:
    """Return the facts of one name, in order."""
    return [fact for fact in facts if fact[MARK] == name]
