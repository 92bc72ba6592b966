"""The samples of a shard: members with the same key, by the rules of WebDataset.

Source: "The WebDataset Format" (Thomas Breuel, 2021), as webdataset 1.0.2 reads it.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from headrace.errors import ShardCorrupt

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")
"""A member's key, which keeps its folder, and its field: all that follows the first dot of the file's name."""

_ABOUT = re.compile(r"__[^/]*__($|/)")
"""Names of members that tell about the shard and belong to no sample."""


def key_and_field(name: str) -> tuple[str, str] | None:
    """Return the key and the field of a member, the field in lower case; None if it belongs to no sample."""
    found = _NAME.match(name)
    if found is None or _ABOUT.match(name):
        return None
    return found[1], found[2].lower()


class Named(Protocol):
    """A member of a shard."""

    @property
    def name(self) -> str:
        """Its whole name."""

    @property
    def header(self) -> int:
        """Where its header begins, in bytes."""


M = TypeVar("M", bound=Named)


def samples(found: Iterable[M], where: str) -> Iterator[tuple[str, dict[str, M]]]:
    """Group the members of one shard: neighbours with the same key make a sample.

    A key that comes again later makes another sample.

    Args:
        found: The members, in the archive's order.
        where: The shard's name, for errors.

    Yields:
        The key of a sample, and its members by field.

    Raises:
        ShardCorrupt: A sample has two members of the same field.
    """
    current, fields = "", dict[str, M]()
    for member in found:
        named = key_and_field(member.name)
        if named is None:
            continue
        key, field = named
        if fields and key != current:
            yield current, fields
            fields = {}
        current = key
        if field in fields:
            raise ShardCorrupt(f"{where} is corrupt at byte {member.header}: sample {key!r} has a second {field!r}")
        fields[field] = member
    if fields:
        yield current, fields


def adjacent(found: Iterable[tuple[str, dict[str, M]]], where: str) -> Iterator[tuple[str, dict[str, M]]]:
    """Yield samples, and refuse those whose members are not all next to each other.

    Two samples of one key that have no field in common are taken for parts of one. With a common field they are two.

    Args:
        found: The samples of one shard.
        where: The shard's name, for errors.

    Raises:
        ShardCorrupt: Members of a sample come again later.
    """
    seen: dict[str, frozenset[str]] = {}
    shared: dict[frozenset[str], frozenset[str]] = {}  # most samples have the same fields
    for key, fields in found:
        names = frozenset(fields)
        before = seen.get(key)
        if before is not None:
            if before.isdisjoint(names):
                raise ShardCorrupt(
                    f"{where}: the members of sample {key!r} are not next to each other: {', '.join(fields)} comes "
                    f"after other samples, and {', '.join(sorted(before))} before them. Make the archive again from "
                    "its files, sorted by name: tar --sort=name -cf NEW.tar FOLDER"
                )
            names |= before
        seen[key] = shared.setdefault(names, names)
        yield key, fields
