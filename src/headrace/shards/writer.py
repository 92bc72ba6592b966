"""`ShardWriter`: samples into plain tar shards, with their index, always the same bytes for the same samples."""

import os
import tarfile
import tempfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from headrace.errors import bad_type, bad_value, check_flag, whole_number
from headrace.shards.catalog import SUFFIX
from headrace.shards.encoding import encoded
from headrace.shards.member import SummedMember
from headrace.shards.samples import key_and_field
from headrace.shards.scanning import scan
from headrace.shards.tar import BLOCK

_END_BYTES = tarfile.RECORDSIZE
"""How much the end of an archive takes at most, in bytes."""


class ShardWriter:
    """Writes samples into numbered tar shards. webdataset reads them, too.

    A shard gets its name when it is complete, so that no reader sees a part of one. Its index is written beside it.
    Members have no owner and no time: the same samples make the same bytes. A block in `with` that ends with an
    exception leaves the shards that are complete, and no other.

    Args:
        pattern: The names of the shards, with a place for their number: "train-%06d.tar".
        maxcount: The most samples in a shard, >= 1.
        maxsize: The most bytes in a shard, >= 1. A sample that is larger than that has a shard of its own.
        start_shard: The number of the first shard.
        checksums: Whether the index has checksums of the data, for `TarDataset(verify=True)`.

    Attributes:
        shards: The paths of the shards that are complete.
        total: The number of samples that were written.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of its range, or `pattern` has no place for a number.

    Example:
        >>> with ShardWriter("train-%06d.tar", maxcount=1000) as writer:
        ...     for number, (image, label) in enumerate(dataset):
        ...         writer.write({"__key__": f"{number:08}", "png": image, "cls": label})
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        maxcount: int = 100_000,
        maxsize: float = 3e9,
        start_shard: int = 0,
        *,
        checksums: bool = False,
    ) -> None:
        self._pattern = os.fspath(pattern)
        try:
            named = self._pattern % 0 != self._pattern % 1
        except (TypeError, ValueError):
            named = False
        if not named:
            bad_value("pattern", pattern, "a path with a place for a number", "For example 'train-%06d.tar'.")
        if isinstance(maxsize, bool) or not isinstance(maxsize, int | float):
            bad_type("maxsize", maxsize, "a number of bytes >= 1", "For example 3e9.")
        if not maxsize >= 1:
            bad_value("maxsize", maxsize, "a number of bytes >= 1", "For example 3e9.")
        check_flag("checksums", checksums, default=False)
        self._maxcount = whole_number("maxcount", maxcount, low=1)
        self._maxsize = maxsize
        self._number = whole_number("start_shard", start_shard)
        self._checksums = checksums
        self._open: _OpenShard | None = None
        self.shards: list[str] = []
        self.total = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._open is not None:
            self._open.discard()
            self._open = None

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write a sample.

        Args:
            sample: Its `__key__`, which is unique and has no dot in its last part, and its fields by name, such as
                "jpg" or "seg.png". Values are encoded by the fields' names; bytes stay as they are. Other names that
                begin with an underscore are left out, as webdataset does.

        Raises:
            MissingExtra: An image is to be encoded, and Pillow is not installed.
            OSError: It cannot be written.
            TypeError: A value does not fit its field.
            ValueError: The key or a field's name would not be read back.
        """
        key = sample.get("__key__")
        if not isinstance(key, str):
            bad_type("sample['__key__']", key, "a text", "It names the sample in the shard.")
        fields = {field: value for field, value in sample.items() if not field.startswith("_")}
        for field in fields:
            if key_and_field(f"{key}.{field}") != (key, field):
                raise ValueError(
                    f"key {key!r} with field {field!r} is not allowed: expected a key without a dot in its last part, "
                    "and a field in lower case, without '/'."
                )
        if not fields:
            raise ValueError(f"sample {key!r} has no field: expected at least one, such as 'jpg'.")
        members = [(f"{key}.{field}", encoded(field, value)) for field, value in fields.items()]
        size = sum(BLOCK - (-len(data) // BLOCK) * BLOCK for _, data in members)
        shard = self._open
        if shard is not None and (shard.samples >= self._maxcount or shard.size + size + _END_BYTES > self._maxsize):
            self._finish(shard)
            shard = None
        if shard is None:
            shard = self._open = _OpenShard(Path(self._pattern % self._number))
        if shard.last == key:
            raise ValueError(f"sample {key!r} is not allowed: the sample before it has the same key.")
        shard.add(key, members)
        self.total += 1

    def close(self) -> None:
        """Complete the last shard."""
        if self._open is not None:
            self._finish(self._open)

    def _finish(self, shard: "_OpenShard") -> None:
        self._open = None
        self._number += 1
        shard.finish(self._checksums)
        self.shards.append(str(shard.path))


class _OpenShard:
    """A shard that is being written, under a name of its own in the same folder.

    Attributes:
        path: Where it will be.
        samples: How many it has.
        last: The key of the last one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples = 0
        self.last: str | None = None
        descriptor, self._temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        self._file: BinaryIO = open(descriptor, "wb")  # noqa: SIM115 - `finish` or `discard` closes it
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.GNU_FORMAT)  # noqa: SIM115

    @property
    def size(self) -> int:
        """The bytes of the members so far."""
        return self._tar.offset

    def add(self, key: str, members: list[tuple[str, bytes]]) -> None:
        """Add a sample."""
        for name, data in members:
            self._tar.addfile(SummedMember(name, data), BytesIO(data))
        self.samples += 1
        self.last = key

    def finish(self, checksums: bool) -> None:
        """Complete the archive, give it its name, and write its index."""
        try:
            self._tar.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            Path(f"{self.path}{SUFFIX}").unlink(missing_ok=True)  # of another shard that had this name
            os.chmod(self._temporary, 0o644)
            os.replace(self._temporary, self.path)
        except BaseException:
            self.discard()
            raise
        scan(self.path, checksums).save(Path(f"{self.path}{SUFFIX}"))

    def discard(self) -> None:
        """Remove what was written."""
        self._file.close()
        Path(self._temporary).unlink(missing_ok=True)
