"""Whatever an index says, a sample that is read by it is the right one, or there is a `ShardCorrupt`.

More cases by hand, in about a minute: HEADRACE_DAMAGES=40000 pytest -s tests/shards/test_damage.py
"""

import json
import os
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ShardCorrupt
from headrace.shards import columns
from headrace.shards.catalog import open_index
from headrace.shards.columns import read_columns, write_columns
from headrace.shards.dataset import TarDataset
from headrace.shards.index import SUM, VALUES, Index
from headrace.shards.scanning import scan
from headrace.shards.writer import ShardWriter
from shards.test_index import write

CASES = int(os.environ.get("HEADRACE_DAMAGES", "2000"))
"""How many damaged indexes are tried."""

HOSTILE = [None, True, -1, 0, 1, 2**40, 2**63, 2**70, 1e308, float("inf"), float("nan"), "", "a\0b", "\ud800", [], {}]
NUMBERS = [0, 1, 2, 255, 2**16, 2**31, 2**32 - 1, 2**47, 2**55, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shard of ours and one of another program's, their indexes with all columns that there are, and a manifest."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    with ShardWriter(tmp_path / "%d.tar") as writer:
        for number in range(4):
            writer.write({"__key__": f"k{number}", "cls": number, "txt": f"{number}" * (300 + number)})
    contents = [(f"d/{number}", {"cls": b"%d" % number, "seg.png": b"x" * 5000, "txt": b""}) for number in range(3)]
    path = write(tmp_path / "1.tar", contents)
    parts = [scan(one, True, ["cls"]) for one in (Path(writer.shards[0]), path)]
    for number, part in enumerate(parts):
        part.save(tmp_path / f"{number}.tar.index")
    Index.join(parts).save(tmp_path / "a.index")
    return tmp_path


def flipped(path: Path, case: int, draw: random.Random) -> None:
    """Change a bit, of each byte in turn."""
    data = bytearray(path.read_bytes())
    data[case % len(data)] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut_or_longer(path: Path, _: int, draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))] if draw.random() < 0.5 else data + draw.randbytes(64))


def with_another_column(path: Path, case: int, draw: random.Random) -> None:
    """Change a column, each in turn, and its checksum with it."""
    found, about, _ = read_columns(path, mapped=False)
    name = list(found)[case % len(found)]
    column = found[name].copy()
    how = draw.randrange(6)
    place = draw.randrange(len(column))
    if how < 2:
        column.view(np.uint8)[draw.randrange(column.nbytes)] ^= 1 << draw.randrange(8)
    elif how == 2 and not name.startswith(VALUES):
        column = column.astype(np.uint64)
        column[place] = draw.choice(NUMBERS)
    elif how == 3:
        other = draw.randrange(len(column))
        column[[place, other]] = column[[other, place]]
    elif how == 4:
        column = column.astype(draw.choice([np.uint8, np.uint64, np.int64, np.float64]))
    else:
        column = np.delete(column, place) if draw.random() < 0.5 else np.insert(column, place, column[place])
    write_columns(path, dict(found) | {name: column}, about)


def with_another_description(path: Path, _: int, draw: random.Random) -> None:
    """Change the description, and its checksum with it."""
    data = path.read_bytes()
    magic, _, described, _ = columns._HEAD.unpack_from(data)
    start, text = columns._HEAD.size, data[columns._HEAD.size :][:described]
    said = json.loads(text)
    if draw.random() < 0.1:
        text = draw.choice([b"[" * 100_000, b"", b"7", b'{"columns":{}}', bytes(described), b"9" * 5000])
    elif draw.random() < 0.3:
        changed = bytearray(text)
        changed[draw.randrange(described)] = draw.randrange(256)
        text = bytes(changed)
    else:
        replaced(said, draw)
        text = json.dumps(said, separators=(",", ":")).encode()
    rest = data[columns._aligned(start + described) :]
    end = columns._aligned(start + len(text))
    head = columns._HEAD.pack(magic, end + len(rest), len(text), zlib.crc32(text))
    path.write_bytes((head + text).ljust(end, b"\0") + rest)


def replaced(said: Any, draw: random.Random) -> None:
    """Replace a value at a random place of what JSON holds, or remove it."""
    at: Any = draw.choice(list(said) if isinstance(said, dict) else range(len(said)))
    if isinstance(said[at], dict | list) and said[at] and draw.random() < 0.9:
        replaced(said[at], draw)
    elif draw.random() < 0.2:
        del said[at]
    else:
        said[at] = draw.choice(HOSTILE)


WAYS: list[Callable[[Path, int, random.Random], None]] = [
    flipped,
    cut_or_longer,
    with_another_column,
    with_another_description,
]


def outcomes(shards: str, expected: list[Any], verify: bool, untouched: bool) -> Iterator[str]:
    """Read all samples by an index, each alone and all at once; yield what came of it.

    Args:
        shards: The manifest, or the shards that have indexes beside them.
        expected: The right samples.
        verify: Whether to compare their data.
        untouched: Whether all checksums are those of the right index.
    """
    try:
        index = open_index(shards)
        names = [shard.name for shard in index.shards]
        dataset = TarDataset(index, verify=verify and SUM in index.columns)
        labels = index.columns.get(VALUES + "cls")  # nothing else tells a label that has the right checksum
        assert labels is None or not untouched or labels.tolist() == [int(sample["cls"]) for sample in expected]
    except ShardCorrupt:
        yield "refused"
        return
    try:
        for number in [*range(len(expected)), None]:
            try:
                if number is None:
                    raw = dataset.read_many(range(len(dataset)))
                    assert [dataset.decode(one) for one in raw] == expected
                else:
                    assert dataset[number] == expected[number]
                yield "right"
            except ShardCorrupt:
                yield "refused"
            except OSError:  # its description names another file, which does not exist
                assert names != list(dict.fromkeys(sample["__url__"] for sample in expected))
                yield "refused"
    finally:
        dataset._files.close()


@pytest.mark.parametrize("name", ["a.index", "0.tar.index", "1.tar.index"])
def test_a_damaged_index_gives_the_right_sample_or_an_error(name: str, whole: Path) -> None:
    path, shards = whole / name, str(whole / ("a.index" if name == "a.index" else "*.tar"))
    expected, original = list(TarDataset(shards, verify=True)), path.read_bytes()
    counts: Counter[str] = Counter()
    for case in range(CASES // 3):
        draw = random.Random(case)
        way = WAYS[case % len(WAYS)]
        path.write_bytes(original)
        way(path, case // len(WAYS), draw)
        try:
            found = outcomes(shards, expected, draw.random() < 0.3, way in (flipped, cut_or_longer))
            counts.update(f"{way.__name__}: {one}" for one in found)
        except BaseException as error:
            error.add_note(f"case {case}, {way.__name__}")
            raise
    print(dict(sorted(counts.items())))
    assert all(counts[f"{way.__name__}: refused"] for way in WAYS)
