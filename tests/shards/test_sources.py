"""Damaged sources, of every format: an error that names the shard, or the right samples."""

import bz2
import gzip
import lzma
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from headrace.errors import ShardCorrupt
from headrace.shards.stream import TarStream
from shards.test_index import write

Pack = Callable[[bytes], bytes]

FORMATS: dict[str, Pack] = {
    "plain": bytes,
    "gz": lambda data: gzip.compress(data, mtime=0),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def flipped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut_off(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def cleared(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data))
    size = draw.choice((1, 16, 512))
    return data[:start] + bytes(len(data[start : start + size])) + data[start + size :]


def missing(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data))
    return data[:start] + data[start + draw.choice((1, 512, 1024)) :]


def repeated(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data))
    return data[:start] + data[start : start + draw.choice((1, 512))] + data[start:]


def replaced(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data))
    part = draw.randbytes(len(data[start : start + draw.choice((2, 32, 600))]))
    return data[:start] + part + data[start + len(part) :]


DAMAGES = (flipped, cut_off, cleared, missing, repeated, replaced)


def archive(folder: Path) -> tuple[Path, bytes]:
    """A small archive, with a long name and with data that does not compress."""
    draw = random.Random(7)
    samples = [
        (f"{'n' * 120 * (one == 2)}{one}", {"bin": draw.randbytes(300 * one), "cls": b"%d" % one}) for one in range(5)
    ]
    path = write(folder / "whole.tar", samples)
    return path, path.read_bytes()


def outcomes(folder: Path, cases: int, seed: int) -> dict[str, dict[str, int]]:
    """Damage an archive again and again, in each format; count the errors and the readings that were right."""
    whole, data = archive(folder)
    right = list(TarStream(whole))
    counts = {}
    for name, pack in FORMATS.items():
        draw, packed = random.Random(f"{name} {seed}"), pack(data)
        shard = folder / f"a.{name}"
        expected = [sample | {"__url__": str(shard)} for sample in right]
        shard.write_bytes(packed)
        assert list(TarStream(shard)) == expected
        counts[name] = {"error": 0, "right": 0}
        for case in range(cases):
            damage = DAMAGES[case % len(DAMAGES)]
            shard.write_bytes(damage(packed, draw))
            try:
                read = list(TarStream(shard))
            except ShardCorrupt as error:
                text = str(error)
                counts[name]["error"] += 1
                assert str(shard) in text
                continue
            # In a plain archive, headers alone have checksums: damage to data cannot be seen.
            assert name == "plain" or read == expected, f"{name}, case {case}: {damage.__name__}"
            counts[name]["right"] += 1
    return counts


def test_damage_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    counts = outcomes(tmp_path, 102, 0)
    for name, of_format in counts.items():
        assert of_format["error"] > (30 if name == "plain" else 95), name


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_bit_of_a_header_is_watched(form: int, tmp_path: Path) -> None:
    """In a plain archive, whoever wrote it; its data has no checksum."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=form) as tar:
        tar.addfile(tarfile.TarInfo("a.cls"))
    data, expected = path.read_bytes(), list(TarStream(path))
    for bit in range(0, 8 * 512, 19):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert list(TarStream(path)) == expected, bit
        except ShardCorrupt:
            continue
