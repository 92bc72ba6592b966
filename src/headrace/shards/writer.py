"""`ShardWriter`: samples into plain tar shards, with their index, always the same bytes for the same samples."""

import os
import secrets
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

from headrace.errors import bad_type, bad_value, check_flag, shown, whole_number
from headrace.shards.encoding import encoded
from headrace.shards.member import summed_header
from headrace.shards.names import SUFFIX, NumberedNames
from headrace.shards.samples import key_and_field
from headrace.shards.scanning import scan
from headrace.shards.tar import BLOCK

_MOST_NAME_BYTES = 2**16
"""The longest name of a member: readers refuse headers that are much longer."""

_END_BYTES = tarfile.RECORDSIZE
"""How much the end of an archive takes at most, in bytes."""


class ShardWriter:
    """Writes samples into numbered tar shards. webdataset reads them, too.

    A shard gets its name when it is complete, so that no reader sees a part of one, and its index is written beside it.
    No file is ever replaced. Members have no owner and no time: the same samples make the same bytes, with the same
    version of headrace and of what encodes the fields. A block in `with` that ends with an exception leaves the shards
    that are complete, and no other.

    An error in `write` leaves no part of the sample: it may be written again. If a shard cannot be completed (a full
    disk), its samples are lost, and the writer raises an error from then on.

    Args:
        pattern: The names of the shards, with a place for their number: "train-%06d.tar".
        maxcount: The most samples in a shard, >= 1.
        maxsize: The most bytes in a shard, >= 1. A sample that is larger than that has a shard of its own.
        start_shard: The number of the first shard. A number says that there may be other shards of such names, which
            this writer adds to; None begins at 0 and refuses any.
        checksums: Whether the index has checksums of the data, for `TarDataset(verify=True)`.

    Attributes:
        shards: The paths of the shards that are complete.
        total: The number of samples that were written and not lost.

    Raises:
        FileExistsError: There are shards of such names.
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of its range, or `pattern` has no place for a number or names no plain tar file.

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
        start_shard: int | None = None,
        *,
        checksums: bool = False,
    ) -> None:
        self._names = NumberedNames(pattern)
        size: object = maxsize  # perhaps one of numpy's numbers
        if isinstance(size, bool) or not isinstance(size, Real):
            bad_type("maxsize", maxsize, "a number of bytes >= 1", "For example 3e9.")
        self._maxsize = int(size) if isinstance(size, Integral) else float(size)
        if not self._maxsize >= 1:
            bad_value("maxsize", maxsize, "a number of bytes >= 1", "For example 3e9.")
        check_flag("checksums", checksums, default=False)
        self._maxcount = whole_number("maxcount", maxcount, low=1)
        self._first = 0 if start_shard is None else whole_number("start_shard", start_shard)
        self._checksums = checksums
        self._open: _OpenShard | None = None
        self._lost: str | None = None
        self._complete: dict[str, int] = {}  # the samples of each shard
        if start_shard is None:
            self._names.refuse_existing("Remove them, choose other names, or pass start_shard=N to add to them.")

    @property
    def shards(self) -> list[str]:
        """The paths of the shards that are complete."""
        return list(self._complete)

    @property
    def total(self) -> int:
        """The number of samples that were written and not lost."""
        begun = {} if self._open is None else {self._open.path: self._open.written.samples}
        return sum((self._complete | begun).values())

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
            FileExistsError: The sample begins a shard, and there is one of its name.
            MissingExtra: An image is to be encoded, and Pillow is not installed.
            OSError: It cannot be written, or samples before it are lost.
            TypeError: A value does not fit its field.
            ValueError: The key or a field's name would not be read back.
        """
        self._refuse_if_lost()
        key, fields = _checked(sample)
        pieces: list[bytes] = []
        for field, value in fields.items():
            content = encoded(field, value)
            pieces += summed_header(f"{key}.{field}", content), content, bytes(-len(content) % BLOCK)
        data = b"".join(pieces)
        shard = self._open
        if shard is not None and (
            shard.written.samples >= self._maxcount or shard.written.size + len(data) + _END_BYTES > self._maxsize
        ):
            self._finish(shard)
            shard = None
        if shard is None:
            shard = self._open = _OpenShard(self._names(self._first + len(self._complete)))
        shard.add(key, frozenset(fields), data)

    def close(self) -> None:
        """Complete the last shard.

        Raises:
            OSError: It cannot be completed, or an earlier one could not.
        """
        self._refuse_if_lost()
        if self._open is not None:
            self._finish(self._open)

    def _finish(self, shard: "_OpenShard") -> None:
        try:
            shard.finish(self._checksums)
        except BaseException:
            self._open, self._lost = None, shard.path
            shard.discard()
            raise
        self._complete[shard.path] = shard.written.samples
        self._open = None

    def _refuse_if_lost(self) -> None:
        if self._lost is not None:
            raise OSError(
                f"{self._lost} could not be completed, and its samples are lost: this writer writes no more. Write "
                f"them again by another ShardWriter, with start_shard={self._first + len(self._complete)}: the "
                f"{self.total} samples before them are complete."
            )


def _checked(sample: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the key of a sample and its fields, if they can be read back."""
    if not isinstance(sample, Mapping):
        bad_type("sample", sample, "a mapping of fields to values", "For example {'__key__': '0001', 'cls': 1}.")
    key = sample.get("__key__")
    if not isinstance(key, str):
        bad_type("sample['__key__']", key, "a text", "It names the sample in the shard.")
    for field in sample:
        if not isinstance(field, str):
            bad_type("field", field, "a text", f"It names a value of sample {key!r}, as 'jpg' does.")
    fields = {field: value for field, value in sample.items() if not field.startswith("_")}
    for field in fields:
        name = f"{key}.{field}"
        if key_and_field(name) != (key, field) or not _is_read_back(name):
            raise ValueError(
                f"key {shown(key)} with field {shown(field)} is not allowed: expected a key without a dot in its last "
                f"part, a field in lower case, without '/', and up to {_MOST_NAME_BYTES:,} bytes of UTF-8, but for NUL."
            )
    if not fields:
        raise ValueError(f"sample {key!r} has no field: expected at least one, such as 'jpg'.")
    return key, fields


def _is_read_back(name: str) -> bool:
    """Return whether readers get the same name; halves of characters stand for bytes that are no UTF-8."""
    try:
        data = name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return "\0" not in name and data.decode("utf-8", "surrogateescape") == name and len(data) <= _MOST_NAME_BYTES


class _Written(NamedTuple):
    """What a shard has: whole samples alone.

    Attributes:
        size: Their bytes.
        samples: How many they are.
        last: The key of the last one.
    """

    size: int
    samples: int
    last: str | None


class _OpenShard:
    """A shard that is being written, under a name of its own in the same folder.

    Args:
        path: Where it will be.

    Attributes:
        path: The same.
        written: What it has. A part of a sample beyond that, which an error has left, is written over or cut off.

    Raises:
        FileExistsError: It exists, or there is an index for it.
        OSError: It cannot be written.
    """

    def __init__(self, path: str) -> None:
        for existing in (path, f"{path}{SUFFIX}"):
            if os.path.lexists(existing):
                _refuse(existing)
        self.path = path
        self.written = _Written(0, 0, None)
        self._fields: dict[str, frozenset[str]] = {}
        folder, name = os.path.split(path)
        self._temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")
        # Without a buffer, whose contents an error would leave behind; with the mode that the user's umask gives.
        self._file = open(self._temporary, "xb", buffering=0)  # noqa: SIM115 - `finish` or `discard` closes it
        self._identity = os.fstat(self._file.fileno())

    def add(self, key: str, fields: frozenset[str], data: bytes) -> None:
        """Add a sample, wholly or not at all."""
        if self.written.last == key:
            raise ValueError(f"sample {key!r} is not allowed: the sample before it has the same key.")
        before = self._fields.get(key, fields)
        if before.isdisjoint(fields):
            raise ValueError(
                f"sample {key!r} with {', '.join(sorted(fields))} is not allowed: the shard has a sample of this key "
                f"with {', '.join(sorted(before))}. Write all fields of a sample at once."
            )
        size = self._write_at(self.written.size, data)
        self._fields[key] = before | fields
        self.written = _Written(size, self.written.samples + 1, key)

    def finish(self, checksums: bool) -> None:
        """Complete the archive, give it its name, and write its index. An error leaves what `discard` removes."""
        if self._file.closed:  # an interrupt came when all was done
            return
        size = self.written.size
        end = -(-(size + 2 * BLOCK) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE
        self._file.truncate(self._write_at(size, bytes(end - size)))
        os.fsync(self._file.fileno())
        index = scan(Path(self._temporary), checksums)
        index = replace(index, shards=(index.shards[0]._replace(name=self.path),))
        move_to_new(self._temporary, self.path)
        index.save(Path(f"{self.path}{SUFFIX}"))
        self._file.close()

    def discard(self) -> None:
        """Remove what was written, whichever name it has by now."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self.path), self._identity):
                Path(f"{self.path}{SUFFIX}").unlink(missing_ok=True)
                os.unlink(self.path)
        Path(self._temporary).unlink(missing_ok=True)
        self._file.close()

    def _write_at(self, place: int, data: bytes) -> int:
        """Write bytes at a place; return the place after them."""
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self._file.fileno(), rest, place)
            place, rest = place + count, rest[count:]
        return place


def move_to_new(path: str, name: str) -> None:
    """Give a file a name in the same file system that no file has.

    Raises:
        FileExistsError: A file has it.
        OSError: It cannot be given.
    """
    try:
        os.link(path, name)
    except FileExistsError:
        _refuse(name)
    except OSError:  # the file system has no links
        if os.path.lexists(name):
            _refuse(name)
        os.rename(path, name)
    else:
        os.unlink(path)


def _refuse(path: str) -> NoReturn:
    raise FileExistsError(f"{path} exists, and no file is replaced. Remove it, or choose another name or start_shard.")
