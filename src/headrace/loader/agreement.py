"""Do the ranks agree on what they are about to read? One collective call collects the facts of all ranks."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from headrace.errors import StateMismatch
from headrace.loader import unsplit

Fact = Mapping[str, object]
"""The facts of one rank: numbers and text by name. What the rank cannot know is left out."""

_OUTCOMES = {
    "error": "A rank that cannot say what it reads stops there, and the others wait for it: mend what it raised.",
    "mode": "Ranks that read by different rules share nothing out: pass the same kind of dataset and sampler, and the "
    "same arguments, on every rank.",
    "dataset_length": "Each rank's share of an epoch follows from the length, so samples are lost or doubled, and the "
    "rank with fewer steps leaves the others waiting: build the dataset from the same files, by the same rule, on "
    "every rank.",
    "world_size": "Each rank cuts the epoch into another number of shares, so samples are lost or doubled: pass the "
    "same distributed= on every rank, or leave it out.",
    "batch_size": "Ranks step through the epoch at different paces, so samples are lost or doubled: pass the same "
    "batch_size on every rank.",
    "tail": "Ranks end the epoch by different rules, so that one leaves the others waiting: pass the same tail and "
    "drop_last on every rank.",
    "order": "Ranks deal out different sequences of samples, so that some are read twice and some never: build the "
    "same order from the same numbers on every rank.",
    "seed": "Ranks shuffle differently, so that some samples are read twice and some never: pass the same seed on "
    "every rank.",
    "epoch": "Ranks read different epochs, so that some samples are read twice and some never: call "
    "set_epoch(epoch) with the same number on every rank, or load the same state.",
    "samples": "Ranks stand at different samples of the epoch, so that some are read twice and some never: load the "
    "same state on every rank.",
    "steps": "A rank that has fewer steps leaves the others waiting in the next collective: give every rank a sampler "
    'or dataset of the same number of batches; of a map-style dataset tail="pad" makes them equal.',
    "rank": "A share that no rank has is never read, and one that several have is read several times: leave "
    "distributed= out, or pass World(rank, size) such that each rank of it occurs equally often; and call "
    "init_process_group before verify.",
    "first_steps": "Ranks read the same samples: the sampler or batch_sampler knows of no ranks. Pass order= instead, "
    "which is split, or a DistributedSampler; distributed=False says that it is meant.",
}
"""The facts that are compared, and what follows from a difference. A fact that causes others comes before them."""

_GROUPS_SHOWN, _RUNS_SHOWN = 6, 8
"""How many different values are listed, and how many runs of rank numbers for one value."""


def facts_of_all_ranks(fact: Fact) -> list[Fact]:
    """Return the facts of every rank, in rank order: one collective call over the default group.

    Torch gathers on the CPU where the group has a backend for it, else, as under NCCL, on the current CUDA device.

    Args:
        fact: This rank's facts; they must be picklable.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [fact]
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, fact)
    return facts


def verify(collect: Callable[[], Fact]) -> None:
    """Compare the facts of all ranks. A rank that cannot collect its own takes part too, so that no rank waits for it.

    Raises:
        StateMismatch: Ranks disagree, or one of them raised; on every rank.
    """
    error: Exception | None = None
    fact: Fact
    try:
        fact = collect()
    except Exception as caught:  # noqa: BLE001 - all ranks raise it, below
        error, fact = caught, {"error": f"{type(caught).__name__}: {caught}"}
    try:
        compare(facts_of_all_ranks(fact))
    except StateMismatch as mismatch:
        raise mismatch from error


def fact_of(loader: Any) -> Fact:
    """Return this rank's facts about the epoch that its loader is about to read.

    Raises:
        Exception: Whatever the user's dataset raises when it is asked for its length.
        ValueError: The dataset is empty, or the order does not fit it.
    """
    schedule, source = loader._schedule, loader._source
    place = schedule.start
    if source.planned() and schedule.latest is not None:  # a pass that has begun has its seed: none is drawn
        place = schedule.latest.state()
    fact: dict[str, object] = {"mode": source.mode, "epoch": place.epoch, "batch_size": loader.batch_size}
    if source.sampler:
        deciding = unsplit.deciding(loader)
        fact |= {"order": source.sampler, "steps": _known_len(loader._index_sampler)}
        fact["epoch"] = getattr(deciding, "epoch", place.epoch)
        if isinstance(deciding, DistributedSampler):  # other samplers may serve data of this rank alone
            fact["dataset_length"] = _known_len(loader.dataset)
            fact |= {"rank": deciding.rank, "world_size": deciding.num_replicas}
        elif loader.distributed is None and source.world().size > 1 and not unsplit.splits(deciding):
            fact["first_steps"] = unsplit.first_steps(loader)
        return fact
    world = source.world()
    whose = {"rank": world.rank, "world_size": world.size, "tail": source.current_tail()}
    # Ranks that each read everything may have different seeds.
    seed = source.seed if source.seed is not None or world.size == 1 else source.resolved_seed()
    if source.order is None:
        length, split = _known_len(loader.dataset), source.splits_stream()
        share = source.stream_samples(length) if split and length is not None else length
        size = source.batch_size
        steps = None if share is None else share // size if loader.drop_last else -(-share // size)
        fact["steps"] = steps
        return fact | whose | {"dataset_length": length, "seed": seed} if split else fact
    shape = source.shape()
    fact |= whose | {
        "dataset_length": shape.length,
        "seed": seed,
        "samples": place.samples,
        "steps": shape.steps(place.epoch),
    }
    if shape.order.per_rank is not None:
        fact["batch_size"] = shape.batch_size
    return fact | {"order": shape.order.described}


def _known_len(counted: Any) -> int | None:
    """Return the length of a user's sampler or dataset; None if it has none."""
    try:
        return len(counted)
    except (TypeError, NotImplementedError):
        return None


def compare(facts: Sequence[Fact]) -> None:
    """Raise an error if ranks differ in a fact that must be equal; its text is a table of values and ranks.

    Everything must be equal but `rank`, `steps` where the tail is "exact", and `first_steps`, which must differ. `rank`
    and `world_size` tell whose share a rank reads: every share must be read, and by equally many ranks (several, where
    a model is spread over them).

    Args:
        facts: Those of every rank, in rank order. The names are those of `_OUTCOMES`; others are not compared.

    Raises:
        StateMismatch: They disagree, or a rank has an `error`.
    """
    whole = [rank for rank, fact in enumerate(facts) if fact.get("error") is None]
    differing: dict[str, list[tuple[str, list[int]]]] = {}
    for name in _OUTCOMES:
        groups = _groups(facts, name, whole)
        if name == "error" and len(whole) < len(facts):
            failed = _groups(facts, name, [rank for rank in range(len(facts)) if rank not in set(whole)])
            differing[name] = failed + ([("none", whole)] if whole else [])
        elif name == "rank" and "world_size" not in differing and len(whole) == len(facts):
            if shares := _uneven_shares(facts):
                differing[name] = shares
        elif name == "first_steps":
            if alike := [(value, ranks) for value, ranks in groups if value != _said(None) and len(ranks) > 1]:
                differing[name] = alike
        elif name == "steps" and all(facts[rank].get("tail") == "exact" for rank in whole):
            continue
        elif name != "rank" and len(groups) > 1:
            differing[name] = groups
    if differing:
        rows = [[name, *map(_described, _shown(groups))] for name, groups in differing.items()]
        raise StateMismatch(f"ranks disagree:\n{_table(rows)}\n{_OUTCOMES[next(iter(differing))]}")


def _groups(facts: Sequence[Fact], name: str, ranks: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Return each value with the ranks that have it: the most common value first, then by rank."""
    having: dict[str, list[int]] = {}
    for rank in ranks:
        having.setdefault(_said(facts[rank].get(name)), []).append(rank)
    return sorted(having.items(), key=lambda group: -len(group[1]))


def _said(value: object) -> str:
    return "-" if value is None else str(value)


def _uneven_shares(facts: Sequence[Fact]) -> list[tuple[str, list[int]]]:
    """Return the shares that fewer or more ranks read than usual, with those ranks."""
    size = facts[0].get("world_size")
    if not isinstance(size, int):
        return []
    having: dict[Any, list[int]] = {share: [] for share in range(size)}
    for rank, fact in enumerate(facts):
        having.setdefault(fact.get("rank"), []).append(rank)
    usual = max(1, len(facts) // size)
    return [(f"share {share} of {size}", ranks) for share, ranks in having.items() if len(ranks) != usual]


def _shown(groups: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    if len(groups) <= _GROUPS_SHOWN:
        return groups
    rest = groups[_GROUPS_SHOWN - 1 :]
    ranks = sorted(rank for _, ranks in rest for rank in ranks)
    return [*groups[: _GROUPS_SHOWN - 1], (f"{len(rest)} other values", ranks)]


def _described(group: tuple[str, list[int]]) -> str:
    """Write "ranks 0-2, 5: 50000"."""
    value, ranks = group
    if not ranks:
        return f"no rank: {value}"
    # Neighbours differ from their places by the same number.
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    written = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:_RUNS_SHOWN]]
    if len(runs) > _RUNS_SHOWN:
        written.append(f"... {ranks[-1]} ({len(ranks)} in all)")
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(written)}: {value}"


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    lines = ["   ".join(part.ljust(width) for part, width in zip(row, widths, strict=False)) for row in rows]
    return "\n".join(f"  {line.rstrip()}" for line in lines)
