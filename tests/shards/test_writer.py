"""What is written is read back, by webdataset too; the same samples make the same bytes; nothing half-written stays."""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headrace.shards.dataset import TarDataset
from headrace.shards.encoding import encoded
from headrace.shards.index import Index
from headrace.shards.tar import members
from headrace.shards.writer import ShardWriter

PIXELS = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)


def sample(number: int, **more: Any) -> dict[str, Any]:
    fields = {"__key__": f"d/{number:04}", "png": PIXELS, "cls": number % 10, "json": {"n": [number]}, "txt": "é" * 9}
    return fields | more


def write(folder: Path, count: int, pattern: str = "%03d.tar", **options: Any) -> ShardWriter:
    with ShardWriter(folder / pattern, **options) as writer:
        for number in range(count):
            writer.write(sample(number))
    return writer


def test_is_read_back(tmp_path: Path) -> None:
    import webdataset

    writer = write(tmp_path, 25, maxcount=10)
    assert (writer.total, writer.shards) == (25, [f"{tmp_path}/00{number}.tar" for number in range(3)])
    assert sorted(os.listdir(tmp_path)) == [f"00{number}.tar{end}" for number in range(3) for end in ("", ".index")]
    found = list(TarDataset(f"{tmp_path}/*.tar", decode="rgb8"))
    expected = list(webdataset.WebDataset(writer.shards, shardshuffle=False).decode("rgb8"))
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert [one["__key__"], one["cls"], one["json"], one["txt"]] == [
            f"d/{number:04}",
            number % 10,
            {"n": [number]},
            "é" * 9,
        ]
        for read in (one, other):
            assert np.array_equal(read.pop("png"), PIXELS)
        other.pop("__local_path__", None)
        assert one == other


def test_the_same_samples_make_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        write(folder, 5)
    first, second = ((folder / "000.tar").read_bytes() for folder in folders)
    assert first == second


def test_shards_are_no_larger_than_they_may_be(tmp_path: Path) -> None:
    writer = write(tmp_path, 30, maxsize=30_000)
    assert len(writer.shards) > 3
    assert all(os.path.getsize(path) <= 30_000 for path in writer.shards)
    with ShardWriter(tmp_path / "large-%d.tar", maxsize=1, start_shard=7) as single:
        for number in range(2):
            single.write(sample(number))
    assert [os.path.basename(path) for path in single.shards] == ["large-7.tar", "large-8.tar"]


def test_an_error_leaves_what_is_complete(tmp_path: Path) -> None:
    def write_and_fail() -> None:
        with ShardWriter(tmp_path / "%d.tar", maxcount=2) as writer:
            for number in range(5):
                writer.write(sample(number))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    assert sorted(os.listdir(tmp_path)) == ["0.tar", "0.tar.index", "1.tar", "1.tar.index"]
    with ShardWriter(tmp_path / "none-%d.tar"):
        pass
    assert len(os.listdir(tmp_path)) == 4


def test_a_full_disk_leaves_no_part_of_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, 3)
    assert os.listdir(tmp_path) == []


def test_checksums(tmp_path: Path) -> None:
    write(tmp_path, 3, checksums=True)
    assert TarDataset(tmp_path / "000.tar", "cls", {}, verify=True)[2] == (2,)
    assert Index.load(tmp_path / "000.tar.index").shards[0].samples == 3


def test_names_that_need_extension_headers(tmp_path: Path) -> None:
    keys = ["é" * 70 + "/" + "x" * 150, "plain"]
    with ShardWriter(tmp_path / "%d.tar") as writer:
        for key in keys:
            writer.write({"__key__": key, "cls": 1})
    assert [TarDataset(writer.shards).key(number) for number in range(2)] == keys
    data = Path(writer.shards[0]).read_bytes()
    assert [one.name for one in members(memoryview(data), "a")] == [f"{key}.cls" for key in keys]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("cls", torch.tensor(3), b"3"),
        ("id", np.int64(3), b"3"),
        ("txt", "é", "é".encode()),
        ("jpg", b"as it is", b"as it is"),
        ("x.json", [1], b"[1]"),
        ("pkl", {1}, pickle.dumps({1})),
        ("bin", bytearray(b"x"), b"x"),
    ],
)
def test_encoding(field: str, value: Any, expected: bytes) -> None:
    assert encoded(field, value) == expected


@pytest.mark.parametrize("value", [PIXELS, torch.from_numpy(PIXELS).permute(2, 0, 1), Image.fromarray(PIXELS)])
def test_images(value: Any, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "%d.tar") as writer:
        writer.write({"__key__": "a", "png": value, "l.png": PIXELS[:, :, :1], "jpg": value, "npz.gz": {"x": PIXELS}})
    png, grey, jpg, arrays = TarDataset(writer.shards, "png l.png jpg npz.gz", "rgb8")[0]
    assert np.array_equal(png, PIXELS)
    assert np.array_equal(grey[:, :, 0], PIXELS[:, :, 0])
    assert jpg.shape == PIXELS.shape
    assert np.array_equal(arrays["x"], PIXELS)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"__key__": 3}, TypeError, r"sample\['__key__'\]=3 is not allowed"),
        ({"__key__": "a.b", "cls": 1}, ValueError, "key 'a.b' with field 'cls' is not allowed"),
        ({"__key__": "a", "JPG": b""}, ValueError, "a field in lower case"),
        ({"__key__": "a", "x/y": b""}, ValueError, "without '/'"),
        ({"__key__": "", "x": b""}, ValueError, "key ''"),
        ({"__key__": "a"}, ValueError, "sample 'a' has no field"),
        ({"__key__": "a", "weird": 3}, TypeError, "field 'weird' with a int is not allowed"),
        ({"__key__": "a", "cls": 1.5}, TypeError, "field 'cls' cannot hold a float: expected an integer"),
        ({"__key__": "a", "png": PIXELS / 2}, TypeError, "expected pixels of uint8, got float64"),
        ({"__key__": "a", "json": {1}}, TypeError, "field 'json' cannot hold a set"),
    ],
)
def test_samples_that_would_not_be_read_back(
    wrong: Mapping[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    with ShardWriter(tmp_path / "%d.tar") as writer:
        with pytest.raises(error, match=text):
            writer.write(wrong)
        writer.write(sample(0))
        with pytest.raises(ValueError, match="the sample before it has the same key"):
            writer.write(sample(0))
    assert len(TarDataset(writer.shards)) == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"pattern": "a.tar"}, ValueError, "pattern='a.tar' is not allowed"),
        ({"pattern": "%d-%d.tar"}, ValueError, "a place for a number"),
        ({"maxcount": 0}, ValueError, "maxcount=0"),
        ({"maxsize": 0}, ValueError, "maxsize=0"),
        ({"maxsize": "3GB"}, TypeError, "maxsize='3GB'"),
        ({"start_shard": -1}, ValueError, "start_shard=-1"),
        ({"checksums": 1}, TypeError, "checksums=1"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ShardWriter(**{"pattern": "%d.tar"} | options)
