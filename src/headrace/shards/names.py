"""The names of shards: braces, wildcards and lists, as users of WebDataset write them; and numbered ones to write."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from typing import NoReturn

from headrace.errors import bad_type, bad_value

COMMAND = "pipe:"
"""What the name of a shard begins with that is the output of a shell command."""

_RANGE = re.compile(r"(?:(-?\d+)\.\.(-?\d+)|([A-Za-z])\.\.([A-Za-z]))(?:\.\.-?(\d+))?")
_REMOTE = re.compile(r"(pipe|[a-z][a-z0-9+.-]*:/)[:/]")
_PACKED = (".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz", ".zst", ".tzst", ".lz4", ".zip")

SUFFIX = ".index"
"""What the index of a shard is called beyond the shard's own name; also the suffix of manifests."""

_ABOUT_SHARDS = (SUFFIX, ".json")
"""How files end that lie beside shards and tell about them."""

_LARGE = 10**18
"""A number whose digits no format shortens or pads."""

Shards = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def shard_paths(shards: Shards) -> list[str]:
    """Return the paths of shards that an index can be made of; see `shard_names`.

    Raises:
        TypeError: It is no text, path or list of these.
        ValueError: No shard is named; braces do not match; or a shard is no plain local file.
        FileNotFoundError: No file matches the wildcards.
    """
    paths = shard_names(shards)
    for path in paths:
        if path == "-" or _REMOTE.match(path):
            raise ValueError(
                f"shard {path!r} is no local file: an index needs files that can be read at any place. Copy it to a "
                "local or a network disk, or read it with TarStream."
            )
        if path.lower().endswith(_PACKED):
            raise ValueError(
                f"shard {path!r} is compressed: an index needs plain tar files. Decompress it, or use TarStream."
            )
    return paths


def shard_names(shards: Shards) -> list[str]:
    """Return the names of shards, in the order in which they are named.

    Args:
        shards: In a text, `::` separates names, braces stand for several (`{000..127}`, `{a,b}`), and wildcards
            (`*`, `?`, `[…]`, `**`) for those files that exist, sorted; not for folders, nor for `.index` and `.json`
            files, which tell about shards, unless the wildcards end so, too. A path, or what is in a list, is one name.

    Raises:
        TypeError: It is no text, path or list of these.
        ValueError: No shard is named, or braces do not match.
        FileNotFoundError: No file matches the wildcards.
    """
    if isinstance(shards, str):
        paths = [path for part in shards.split("::") for path in _named(part)]
    elif isinstance(shards, os.PathLike):
        paths = [os.fspath(shards)]
    elif isinstance(shards, Sequence) and all(isinstance(one, str | os.PathLike) for one in shards):
        paths = [os.fspath(one) for one in shards]
    else:
        bad_type("shards", shards, "a text, a path, or a list of them", "For example 'train-{000..127}.tar'.")
    if not paths or not all(paths):
        raise ValueError(f"shards={shards!r} names no shard: expected at least one, such as 'train-{{000..127}}.tar'.")
    return [_local(path) for path in paths]


def _local(path: str) -> str:
    """Return a path without the scheme of local files."""
    return path.removeprefix("file://") if path.startswith("file:///") else path.removeprefix("file:")


def _named(part: str) -> Iterator[str]:
    """Yield the names that a part of a text stands for. A shell command is taken as it is but for its braces."""
    for name in _expanded(part):
        yield from [name] if name.startswith(COMMAND) else _matching(name)


def _matching(name: str) -> list[str]:
    if not glob.has_magic(name) or os.path.exists(name):
        return [name]
    found = sorted(glob.glob(name, recursive=True))
    if not name.endswith(_ABOUT_SHARDS):
        found = [path for path in found if not path.endswith(_ABOUT_SHARDS) and not os.path.isdir(path)]
    if not found:
        raise FileNotFoundError(f"no file matches shards={name!r}, in the folder {os.getcwd()!r}.")
    return found


def _expanded(text: str) -> Iterator[str]:
    """Yield all texts that a text with braces stands for; braces without a comma or a range stand for themselves."""
    start = text.find("{")
    if start < 0:
        if "}" in text:
            _unmatched(text)
        yield text
        return
    end, inside = _parts(text, start)
    head, tail = text[:start], text[end + 1 :]
    if "}" in head:
        _unmatched(text)
    if len(inside) > 1:
        options = [option for part in inside for option in _expanded(part)]
    elif found := _RANGE.fullmatch(inside[0]):
        options = list(_counted(found))
    else:
        options = [f"{{{option}}}" for option in _expanded(inside[0])]
    for option in options:
        for rest in _expanded(tail):
            yield head + option + rest


def _parts(text: str, start: int) -> tuple[int, list[str]]:
    """Return where the brace at `start` closes, and what its commas separate."""
    depth, begun, parts = 0, start + 1, []
    for place in range(start, len(text)):
        letter = text[place]
        depth += (letter == "{") - (letter == "}")
        if depth == 0 or (depth == 1 and letter == ","):
            parts.append(text[begun:place])
            begun = place + 1
        if depth == 0:
            return place, parts
    _unmatched(text)


def _counted(found: re.Match[str]) -> Iterator[str]:
    """Yield a range of numbers or letters, both ends counted; numbers are as wide as an end that begins with 0."""
    first, last, *letters, by = found.groups()
    ends = [int(first), int(last)] if first else [ord(letter) for letter in letters]
    step = max(int(by or 1), 1)
    counted = range(ends[0], ends[1] + 1, step) if ends[0] <= ends[1] else range(ends[0], ends[1] - 1, -step)
    padded = bool(first) and any(re.match("-?0[0-9]", end) for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    for number in counted:
        yield f"{number:0{width}d}" if first else chr(number)


def _unmatched(text: str) -> NoReturn:
    raise ValueError(f"the braces of {text!r} do not match. For example 'train-{{000..127}}.tar'.")


class NumberedNames:
    """The names of shards that are written one after the other.

    Args:
        pattern: A path with a place for a number: "train-%06d.tar".

    Attributes:
        pattern: The same, without a scheme.
        prefix: What is before the number.
        suffix: What is after it.

    Raises:
        TypeError: It is no text or path.
        ValueError: It has no place for a decimal number, or no index could be made of a file of such a name.
    """

    def __init__(self, pattern: str | os.PathLike[str]) -> None:
        text = os.fspath(pattern) if isinstance(pattern, str | os.PathLike) else None
        if not isinstance(text, str):
            bad_type("pattern", pattern, "a text or a path", "For example 'train-%06d.tar'.")
        self.pattern = _local(text)
        try:
            self.prefix, found, self.suffix = (self.pattern % _LARGE).partition(str(_LARGE))
        except (TypeError, ValueError, OverflowError):
            found = ""
        if not found:
            bad_value("pattern", pattern, "a path with a place for a number", "For example 'train-%06d.tar'.")
        if self.pattern.lower().endswith((*_PACKED, *_ABOUT_SHARDS)):
            allowed = f"the name of a plain tar file: none that ends in {' '.join((*_PACKED, *_ABOUT_SHARDS))}"
            bad_value(
                "pattern", pattern, allowed, "For example 'train-%06d.tar'. An index cannot read compressed files."
            )
        if _REMOTE.match(self.pattern):
            bad_value("pattern", pattern, "a path of this machine", "Write the shards here, and upload them.")

    def __call__(self, number: int) -> str:
        """Return the name of a shard."""
        return self.pattern % number

    def refuse_existing(self, fix: str) -> None:
        """Refuse shards of such names that exist, whatever their numbers, and indexes of such shards.

        Raises:
            FileExistsError: There is one.
        """
        number = re.compile(f"{re.escape(self.prefix)} *[0-9]+ *{re.escape(self.suffix)}(?:{re.escape(SUFFIX)})?", re.S)
        start, end = glob.escape(self.prefix), glob.escape(self.suffix)
        found = [path for last in ("", SUFFIX) for path in glob.glob(f"{start}*{end}{last}") if number.fullmatch(path)]
        if found:
            more = f", as do {len(found) - 1} more files of such names" if len(found) > 1 else ""
            raise FileExistsError(
                f"{min(found)} exists{more}: who reads all shards of these names would read two sets. {fix}"
            )
