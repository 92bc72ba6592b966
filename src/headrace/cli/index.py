"""`headrace index`: make the indexes of shards, in several processes at a time."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from headrace.cli.parallel import in_processes, number_of_jobs
from headrace.errors import HeadraceError
from headrace.shards.index import Index
from headrace.shards.names import SUFFIX, shard_paths
from headrace.shards.scanning import scan


@dataclass(frozen=True)
class Options:
    """What to index, and how.

    Attributes:
        paths: The shards.
        manifest: One file for all; None for one beside each shard.
        checksums: Whether to keep checksums of the data.
        columns: Fields whose numbers to keep.
        jobs: How many processes do it.
    """

    paths: list[str]
    manifest: Path | None
    checksums: bool
    columns: list[str]
    jobs: int

    @classmethod
    def parse(
        cls, shards: list[str], manifest: str | None, checksums: bool, columns: list[str], jobs: int | None
    ) -> "Options":
        """Make them from the command's arguments.

        Raises:
            FileNotFoundError: No file matches.
            ValueError: An argument is out of its range, or what is written would replace a shard.
        """
        if manifest is not None and not manifest.endswith(SUFFIX):
            raise ValueError(f"--manifest={manifest!r} is not allowed: expected a name that ends in {SUFFIX}.")
        chosen = number_of_jobs(jobs)
        paths = [path for one in shards for path in shard_paths(one)]
        beside = [f"{path}{SUFFIX}" for path in paths]
        if manifest is None:
            _refuse_same("an index", beside, paths)
        else:
            _refuse_same("--manifest", [manifest], paths + beside)
        return cls(paths, None if manifest is None else Path(manifest), checksums, columns, chosen)


def _refuse_same(what: str, written: list[str], kept: list[str]) -> None:
    """Refuse to write a file that is to be kept, by whatever name it is reached.

    Raises:
        ValueError: One would be written.
    """
    known = {_identity(path): path for path in kept}
    for path in written:
        found = known.get(_identity(path))
        if found is not None:
            raise ValueError(
                f"{what} would replace {found}, a shard or its index. Choose another name, such as all{SUFFIX}."
            )


def _identity(path: str) -> tuple[int, int] | str:
    """Return what is equal for all names of a file."""
    try:
        found = os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


def run_index(options: Options, console: Console) -> int:
    """Make the indexes, say what they hold, and return the exit code: 1 where not all of each shard is in an index."""
    problems: list[str] = []
    parts: list[Index] = []
    shards = samples = fields = size = 0
    index = partial(_index, options.manifest is None, options.checksums, options.columns)
    remarks: list[str] = []
    for done, said in in_processes(index, options.paths, jobs=options.jobs, what="indexing", console=console):
        if done is None:
            problems += said
            continue
        remarks += said
        if options.manifest is not None:
            parts.append(done)
        shards += 1
        samples += len(done)
        fields += len(done.columns["block"])
        size += done.shards[0].size
    for problem in problems + remarks:
        console.print(problem, style="red", soft_wrap=True)
    if options.manifest is not None and parts and not problems:
        try:
            Index.join(parts).save(options.manifest)
        except (OSError, ValueError) as error:
            problems.append(f"{options.manifest}: {error}")
            console.print(problems[-1], style="red", soft_wrap=True)
    where = f" in {options.manifest}" if options.manifest is not None else ""
    console.print(f"{shards:,} shards, {samples:,} samples, {fields:,} fields, {size / 1e9:,.2f} GB{where}")
    return 1 if problems or remarks else 0


def _index(beside: bool, checksums: bool, columns: list[str], path: str) -> tuple[Index | None, list[str]]:
    """Return the index of a shard, written beside it if that is wanted; and what is wrong with it."""
    remarks: list[str] = []
    try:
        index = scan(Path(path), checksums, columns, remarks)
        if beside:
            index.save(Path(f"{path}{SUFFIX}"))
    except (HeadraceError, OSError, ValueError) as error:
        return None, [f"{path}: {error}"]
    return index, [f"{path}: {remark}" for remark in remarks]
