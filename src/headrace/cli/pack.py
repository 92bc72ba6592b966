"""`headrace pack`: samples into tar shards, in several processes at a time, always the same bytes."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from headrace.cli.parallel import in_processes, number_of_jobs
from headrace.errors import whole_number
from headrace.plan.keys import key
from headrace.plan.permute import permutation
from headrace.shards.dataset import TarDataset
from headrace.shards.decoding import IMAGES
from headrace.shards.writer import ShardWriter

Sample = dict[str, Any]


class ImageFolder:
    """Pictures in a folder for each class: the picture, the number of its class, and its path.

    Args:
        folder: The folder of the classes' folders, which are numbered in the order of their names.

    Raises:
        ValueError: There is no picture.
    """

    def __init__(self, folder: Path) -> None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        self.files = [
            (number, path)
            for number, one in enumerate(classes)
            for path in sorted(one.rglob("*"))
            if path.suffix.lower()[1:] in IMAGES and path.is_file()
        ]
        if not self.files:
            raise ValueError(f"{folder} has no picture in a folder of its class, such as {folder}/cat/1.jpg.")
        self._folder = folder

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        number, path = self.files[index]
        about = {"class": path.relative_to(self._folder).parts[0], "file": path.relative_to(self._folder).as_posix()}
        return {path.suffix.lower()[1:]: path.read_bytes(), "cls": number, "json": about}


@dataclass(frozen=True)
class Options:
    """What to pack, and how.

    Attributes:
        source: The samples: a folder of pictures, or tar shards.
        pattern: The names of the shards.
        maxcount: The samples of each shard but the last.
        shuffle: The seed of a permutation of the samples; None keeps their order.
        checksums: Whether the indexes have checksums of the data.
        jobs: How many processes do it.
    """

    source: ImageFolder | TarDataset
    pattern: str
    maxcount: int
    shuffle: int | None
    checksums: bool
    jobs: int

    @classmethod
    def parse(
        cls, source: str, pattern: str, maxcount: int, shuffle: int | None, checksums: bool, jobs: int | None
    ) -> "Options":
        """Make them from the command's arguments.

        Raises:
            OSError: The source cannot be read.
            ValueError: An argument is out of its range, or the source has no sample.
        """
        whole_number("--maxcount", maxcount, low=1)
        if shuffle is not None:
            whole_number("--shuffle", shuffle)
        chosen = number_of_jobs(jobs)
        ShardWriter(pattern)  # checks the pattern, and writes nothing
        samples = ImageFolder(Path(source)) if Path(source).is_dir() else TarDataset(source)
        return cls(samples, pattern, maxcount, shuffle, checksums, chosen)

    def order(self) -> NDArray[np.int64]:
        """Return the numbers of the samples in the order in which they are written, shape (samples,)."""
        numbers = np.arange(len(self.source))
        if self.shuffle is None:
            return numbers
        return permutation(key("pack", self.shuffle), len(numbers))(numbers)


def run_pack(options: Options, console: Console) -> int:
    """Write the shards, and say how many; return the exit code."""
    order = options.order()
    parts = [order[start : start + options.maxcount] for start in range(0, len(order), options.maxcount)]
    size = 0
    write = partial(_write, options)
    for path in in_processes(write, range(len(parts)), parts, jobs=options.jobs, what="packing", console=console):
        size += Path(path).stat().st_size
    console.print(f"{len(parts):,} shards, {len(order):,} samples, {size / 1e9:,.2f} GB", soft_wrap=True)
    return 0


def _write(options: Options, shard: int, numbers: NDArray[np.int64]) -> str:
    """Write one shard; return its path."""
    with ShardWriter(
        options.pattern, options.maxcount, float("inf"), start_shard=shard, checksums=options.checksums
    ) as writer:
        for place, number in enumerate(numbers.tolist(), shard * options.maxcount):
            sample = options.source[number]
            fields = {field: value for field, value in sample.items() if not field.startswith("__")}
            writer.write({"__key__": sample.get("__key__", f"{place:08}"), **fields})
    return writer.shards[0]
