"""`headrace pack`: samples into tar shards, in several processes at a time, always the same bytes."""

import json
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch.utils.data import Dataset, Subset

from headrace.cli.factory.load import load_factory
from headrace.cli.parallel import in_processes, number_of_jobs
from headrace.errors import bad_value, whole_number
from headrace.loader.dataloader import DataLoader
from headrace.plan.keys import key
from headrace.plan.permute import permutation
from headrace.plan.plan import MAX_SEED
from headrace.shards.dataset import TarDataset
from headrace.shards.decoding import IMAGES
from headrace.shards.names import SUFFIX, NumberedNames
from headrace.shards.writer import ShardWriter, move_to_new

_CLASSES = "classes.json"
"""What the file with the numbers of classes is called, after what the shards' names begin with."""

_SHOWN_CLASSES = 10
"""How many classes are named on the console."""

Sample = dict[str, Any]


class ImageFolder(Dataset[Sample]):
    """Pictures in a folder for each class: the picture, the number of its class, and its path.

    Args:
        folder: The folder of the classes' folders, which are numbered in the order of their names.

    Attributes:
        files: The number of each picture's class, and its path.
        classes: The names of the classes, in the order of their numbers.

    Raises:
        ValueError: There is no picture.
    """

    def __init__(self, folder: Path) -> None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        self.classes = [path.name for path in classes]
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


class Named(Dataset[Sample]):
    """A map-style dataset whose samples are dicts of fields, as shards have them.

    Args:
        dataset: The user's dataset. Its samples are such dicts, or values, or tuples of values.
        fields: The fields of a sample that is no dict; empty if it is one.
    """

    def __init__(self, dataset: Any, fields: Sequence[str]) -> None:
        self._dataset = dataset
        self._fields = fields

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        sample = self._dataset[index]
        if isinstance(sample, dict) and not self._fields:
            return sample
        values = sample if isinstance(sample, tuple | list) else [sample]
        if len(values) != len(self._fields):
            raise ValueError(
                f"sample {index} is a {type(sample).__name__} with {len(values)} values, and --fields names "
                f"{len(self._fields)}: name each, for example --fields 'png cls'."
            )
        return dict(zip(self._fields, values, strict=True))


_FACTORY = re.compile(r"[^:{}*?]+:[^\W\d][\w.]*")
"""How a function is named that returns a dataset."""


@dataclass(frozen=True)
class Options:
    """What to pack, and how.

    Attributes:
        source: The samples: a folder of pictures, tar shards, or another dataset.
        names: The names of the shards.
        maxcount: The samples of each shard but the last.
        shuffle: The seed of a permutation of the samples; None keeps their order.
        checksums: Whether the indexes have checksums of the data.
        jobs: How many processes do it.
    """

    source: ImageFolder | TarDataset | Named
    names: NumberedNames
    maxcount: int
    shuffle: int | None
    checksums: bool
    jobs: int

    @classmethod
    def parse(
        cls,
        source: str,
        fields: str | None,
        pattern: str,
        maxcount: int,
        shuffle: int | None,
        checksums: bool,
        jobs: int | None,
    ) -> "Options":
        """Make them from the command's arguments.

        Raises:
            FileExistsError: There are shards of such names.
            OSError: The source cannot be read.
            ValueError: An argument is out of its range, or the source has no sample.
        """
        whole_number("--maxcount", maxcount, low=1)
        if shuffle is not None:
            whole_number("--shuffle", shuffle, high=MAX_SEED, fix="Any 64-bit number will do.")
        chosen = number_of_jobs(jobs)
        names = NumberedNames(pattern)
        if os.sep in names.suffix:
            bad_value("pattern", pattern, "a number in its last part", "For example 'folder/train-%06d.tar'.")
        folder = os.path.dirname(names.prefix)
        if not os.path.isdir(folder or "."):
            bad_value("pattern", pattern, "a path in a folder that exists", f"Make the folder: mkdir -p {folder}")
        names.refuse_existing("Choose other names; or remove them, if they are no part of what is packed.")
        opened = _opened(source, fields)
        if not len(opened):
            raise ValueError(f"{source} has no sample: expected at least one.")
        classes = names.prefix + _CLASSES
        if isinstance(opened, ImageFolder) and os.path.lexists(classes):
            raise FileExistsError(f"{classes} exists. Remove it, or choose other names for the shards.")
        return cls(opened, names, maxcount, shuffle, checksums, chosen)

    def order(self) -> NDArray[np.int64]:
        """Return the numbers of the samples in the order in which they are written, shape (samples,)."""
        numbers = np.arange(len(self.source))
        if self.shuffle is None:
            return numbers
        return permutation(key("pack", self.shuffle), len(numbers))(numbers)


def _opened(source: str, fields: str | None) -> ImageFolder | TarDataset | Named:
    """Return the samples that a source has."""
    path = Path(source)
    if not path.exists() and _FACTORY.fullmatch(source):
        dataset = load_factory(source, "a dataset")()
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise ValueError(
                f"{source} returns a {type(dataset).__name__}: expected a map-style dataset, with a length."
            )
        return Named(dataset, () if fields is None else fields.split())
    if fields is not None:
        raise ValueError(f"--fields={fields!r} is not allowed: the samples of {source} have names for their fields.")
    return ImageFolder(path) if path.is_dir() else TarDataset(source)


def run_pack(options: Options, console: Console) -> int:
    """Write the shards, and say how many; return the exit code.

    They are written in a folder beside their place, and get their names when all are complete.

    Raises:
        FileExistsError: Meanwhile there is a file of one of their names.
        OSError: They cannot be written.
    """
    order = options.order()
    parts = [order[start : start + options.maxcount] for start in range(0, len(order), options.maxcount)]
    folder = os.path.dirname(options.names.prefix)
    with tempfile.TemporaryDirectory(prefix=".headrace-pack-", dir=folder or ".") as unfinished:
        write = partial(_write, options, unfinished)
        paths = list(in_processes(write, range(len(parts)), parts, jobs=options.jobs, what="packing", console=console))
        size = sum(os.path.getsize(path) for path in paths)
        # Indexes before shards: a reader that comes between makes none of its own.
        complete = [f"{path}{suffix}" for path in paths for suffix in (SUFFIX, "")]
        if isinstance(options.source, ImageFolder):
            complete.append(os.path.join(unfinished, os.path.basename(options.names.prefix) + _CLASSES))
            numbers = {name: number for number, name in enumerate(options.source.classes)}
            Path(complete[-1]).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        _publish(complete, folder)
    if isinstance(options.source, ImageFolder):
        _tell_classes(options.source.classes, options.names.prefix + _CLASSES, console)
    console.print(f"{len(parts):,} shards, {len(order):,} samples, {size / 1e9:,.2f} GB", soft_wrap=True)
    return 0


def _tell_classes(classes: list[str], file: str, console: Console) -> None:
    """Say which class has which number, and what a sample has."""
    shown = ", ".join(f"{number} {name}" for number, name in enumerate(classes[:_SHOWN_CLASSES]))
    more = f", and {len(classes) - _SHOWN_CLASSES} more" if len(classes) > _SHOWN_CLASSES else ""
    console.print(f"classes: {shown}{more}; all are in {file}", soft_wrap=True, markup=False)
    console.print(
        "each sample has its picture, the number of its class as 'cls', and the names of its class and file as 'json'",
        soft_wrap=True,
    )


def _publish(paths: list[str], folder: str) -> None:
    """Move files into a folder: all of them, or after an error or an interrupt none."""
    names = [os.path.join(folder, os.path.basename(path)) for path in paths]
    try:
        for path, name in zip(paths, names, strict=True):
            move_to_new(path, name)
    except BaseException:
        for path, name in zip(paths, names, strict=True):
            with suppress(FileNotFoundError):  # it was not moved
                if not os.path.exists(path) or os.path.samefile(path, name):
                    os.unlink(name)
        raise


def _write(options: Options, folder: str, shard: int, numbers: NDArray[np.int64]) -> str:
    """Write one shard into a folder; return its path.

    A dataset that draws random numbers gets those of the sample's place, whichever process writes it.
    """
    part = Subset(options.source, numbers.tolist())
    samples = DataLoader(part, None, seed=options.shuffle or 0, distributed=False, collate_fn=_as_it_is)
    samples.set_epoch(shard)
    pattern = os.path.join(folder.replace("%", "%%"), os.path.basename(options.names.pattern))
    with ShardWriter(pattern, options.maxcount, float("inf"), start_shard=shard, checksums=options.checksums) as writer:
        for place, sample in enumerate(samples, shard * options.maxcount):
            fields = {field: value for field, value in sample.items() if not field.startswith("__")}
            try:
                writer.write({"__key__": sample.get("__key__", f"{place:08}"), **fields})
            except (TypeError, ValueError) as error:
                raise ValueError(f"sample {part.indices[place % options.maxcount]}: {error}") from error
    return writer.shards[0]


def _as_it_is(sample: Any) -> Any:
    return sample
