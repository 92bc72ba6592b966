"""Where indexes are kept: beside each shard, in one manifest for all, or in the user's cache folder."""

import hashlib
import os
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from headrace.errors import ShardCorrupt
from headrace.shards.index import Index
from headrace.shards.names import SUFFIX, Shards, shard_paths
from headrace.shards.scanning import scan


def open_index(shards: Shards) -> Index:
    """Return the index of shards: a manifest's, or one joined from those of all shards, made where there is none yet.

    Args:
        shards: Names of shards, as for `shard_paths`, or of one manifest.

    Raises:
        OSError: A shard cannot be read.
        ShardCorrupt: A shard is no whole tar archive, or its index does not fit it.
        TypeError: `shards` is no text, path or list of these.
        ValueError: No shard is named, or a shard cannot be read by an index.
    """
    paths = shard_paths(shards)
    if len(paths) == 1 and paths[0].endswith(SUFFIX):
        return Index.load(Path(paths[0]))
    unplaced: list[Path] = []
    remarks: list[str] = []
    index = Index.join([_index_of(Path(path), unplaced, remarks) for path in paths])
    if remarks:
        more = f" There are {len(remarks) - 1} more such remarks." if len(remarks) > 1 else ""
        warnings.warn(f"{remarks[0]}.{more} headrace inspect SHARD says this at any time.", stacklevel=3)
    if unplaced:
        warnings.warn(
            f"the index of {unplaced[0]}{f' and of {len(unplaced) - 1} more' * (len(unplaced) > 1)} cannot be written, "
            "neither beside the shard nor in the cache folder: each process that opens the shards makes it again. Make "
            "a manifest where you may write: headrace index SHARDS --manifest FILE",
            stacklevel=3,
        )
    return index


def _index_of(path: Path, unplaced: list[Path], remarks: list[str]) -> Index:
    """Return the index of one shard, made and written where there is none yet.

    Args:
        path: The shard.
        unplaced: Where to add it if its index cannot be written.
        remarks: Where to add sentences about what is in the shard and not in an index that is made.
    """
    size = path.stat().st_size
    beside, cached = Path(f"{path}{SUFFIX}"), _cached(path)
    # An index is read here, not mapped: each mapping has a descriptor, and there may be many shards.
    with suppress(FileNotFoundError):
        return _checked(Index.load(beside, mapped=False), beside, path, size)
    if cached is not None:
        with suppress(OSError, ShardCorrupt):  # nobody made it by hand, so it is made again
            return _checked(Index.load(cached, mapped=False), cached, path, size)
    said: list[str] = []
    index = scan(path, remarks=said)
    remarks += [f"{path}: {remark}" for remark in said]
    for place in (beside,) if cached is None else (beside, cached):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            index.save(place)
            return index
        except OSError:  # a folder where nobody may write, or a full disk
            continue
    unplaced.append(path)
    return index


def _checked(index: Index, place: Path, path: Path, size: int) -> Index:
    """Return an index with the shard's name as it was given, if it is this shard's and no column is damaged."""
    found = index.shards[0] if len(index.shards) == 1 else None
    if found is None or os.path.basename(found.name) != path.name:
        raise ShardCorrupt(f"{place} is not the index of {path.name}. Make it again: headrace index {path}")
    if found.size != size:
        raise ShardCorrupt(
            f"{place} was made when the shard had {found.size} bytes; now it has {size}. If the shard is right, make "
            f"the index again: headrace index {path}"
        )
    return replace(index, shards=(found._replace(name=str(path)),), columns=dict(index.columns), origin=None)


def _cached(path: Path) -> Path | None:
    """Return where the index of a shard lies in the cache folder; a shard that has changed has another place.

    None if nobody knows where the cache folder is: the user has no home.
    """
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(folder):
        return None
    about = path.stat()
    words = f"{path.resolve()}\0{about.st_size}\0{about.st_mtime_ns}".encode("utf-8", "surrogateescape")
    return Path(folder, "headrace", hashlib.blake2b(words, digest_size=16).hexdigest() + SUFFIX)
