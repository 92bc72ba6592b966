"""An index says of every sample where its fields lie, for one shard and for many."""

import io
import os
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ShardCorrupt
from headrace.shards.columns import read_columns, write_columns
from headrace.shards.dataset import TarDataset
from headrace.shards.index import SUM, VALUES, Index
from headrace.shards.scanning import scan

Contents = list[tuple[str, dict[str, bytes]]]

CONTENTS = st.lists(
    st.tuples(
        st.text(st.sampled_from("abé/"), min_size=1, max_size=6).filter(lambda key: not key.endswith("/")),
        st.dictionaries(st.sampled_from(["jpg", "cls", "a.b"]), st.binary(max_size=900), min_size=1),
    ),
    max_size=5,
    unique_by=lambda sample: sample[0].lstrip("/"),
)


def write(path: Path, contents: Contents) -> Path:
    with tarfile.open(path, "w") as tar:
        for key, fields in contents:
            for field, data in fields.items():
                member = tarfile.TarInfo(f"{key}.{field}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


def contents_of(index: Index) -> Contents:
    """Read all samples by an index."""
    found = []
    for sample in range(len(index)):
        data, at = Path(index.shard_of(sample).name).read_bytes(), index.places([sample])
        rows = zip(at.name, at.header, at.size, at.check, strict=True)
        fields = {index.names[name]: data[header + 512 : header + 512 + size] for name, header, size, _ in rows}
        assert [zlib.crc32(data[header : header + 345]) for header in at.header] == at.check
        found.append((index.key(sample), fields))
    return found


@given(shards=st.lists(CONTENTS, min_size=1, max_size=3))
def test_samples_are_found_in_every_shard(shards: list[Contents], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("shards")
    some = [scan(write(folder / f"{number}.tar", contents)) for number, contents in enumerate(shards)]
    for index, contents in zip(some, shards, strict=True):
        assert contents_of(index) == contents
    joined = Index.join(some)
    joined.save(folder / "all.index")
    for one in (joined, Index.load(folder / "all.index")):
        assert contents_of(one) == [sample for contents in shards for sample in contents]
        assert [shard.samples for shard in one.shards] == [len(contents) for contents in shards]


def test_is_small(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [(f"{number:06}", {"jpg": b"x" * 300, "cls": b"1"}) for number in range(2000)])
    scan(path).save(tmp_path / "a.index")
    assert (tmp_path / "a.index").stat().st_size <= 2000 * (40 + 6)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    with pytest.raises(ShardCorrupt, match="empty"):
        scan(tmp_path / "a.tar")


def test_what_cannot_be_is_an_error(tmp_path: Path) -> None:
    path, file = write(tmp_path / "a.tar", [("a", {"jpg": b"x" * 300})]), tmp_path / "a.index"
    scan(path).save(file)
    columns, about, _ = read_columns(file)

    def changed(saying: dict[str, Any] | None = None, **others: Any) -> Path:
        write_columns(
            file, dict(columns) | {name: np.array(one, np.uint64) for name, one in others.items()}, saying or about
        )
        return file

    for outside in ({"block": [1000]}, {"size": [2**40]}, {"name": [7]}, {"first": [1, 2]}, {"first": [2**63, 1]}):
        with pytest.raises(ShardCorrupt, match="does not fit"):
            Index.load(changed(**outside)).places([0])
    for contradiction in ({"first": [0]}, {"key_end": [1, 2]}, {"check": []}, {"values of cls": []}, {"sum": [1, 2]}):
        with pytest.raises(ShardCorrupt, match="contradicts itself"):
            Index.load(changed(**contradiction))
    for saying in ({"names": ["jpg"]}, {"names": ["jpg"], "shards": [["a", "b", 1]]}, {"names": 5, "shards": []}):
        with pytest.raises(ShardCorrupt, match=r"cannot be understood|contradicts"):
            Index.load(changed(saying))


@pytest.mark.parametrize(
    ("column", "value"), [("size", 299), ("keys", ord("c")), ("name", 1), ("first", [0, 1, 4]), ("block", 2)]
)
def test_what_an_index_says_is_compared_with_the_header(column: str, value: Any, tmp_path: Path) -> None:
    """Also with the right checksum of the column: name, size, key and number of fields."""
    fields = {"jpg": b"x" * 300, "cls": b"1"}
    file = tmp_path / "a.index"
    scan(write(tmp_path / "a.tar", [("a", fields), ("b", fields)])).save(file)
    columns, about, _ = read_columns(file, mapped=False)
    changed = columns[column].copy()
    if isinstance(value, list):
        changed[:] = value
    else:
        changed[0] = value
    write_columns(file, dict(columns) | {column: changed}, about)
    with pytest.raises(ShardCorrupt, match=r"header|twice"):
        TarDataset(file, "jpg")[0]


@pytest.mark.parametrize(
    "more", [["a", 2**70, 1], ["a", float("inf"), 1], ["a\0", 1, 1], ["\ud800", 1, 1], [7, 1, 1], "abc"]
)
def test_shards_that_cannot_be_are_an_error(more: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.index"
    scan(write(tmp_path / "a.tar", [("a", {"jpg": b"x"})])).save(file)
    columns, about, _ = read_columns(file, mapped=False)
    write_columns(file, columns, about | {"shards": [more]})
    with pytest.raises(ShardCorrupt, match="cannot be understood"):
        Index.load(file)


def test_a_shard_that_becomes_shorter_while_it_is_indexed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.tar", [(f"{number}", {"jpg": b"x" * 9000}) for number in range(9)])
    pread, reads = os.pread, []

    def shrinking(descriptor: int, count: int, start: int) -> bytes:
        reads.append(start)
        if len(reads) == 4:
            os.truncate(path, 5000)
        return pread(descriptor, count, start)

    monkeypatch.setattr(os, "pread", shrinking)
    with pytest.raises(ShardCorrupt, match="cut off"):
        scan(path, sums=True)


def test_all_samples_at_once(tmp_path: Path) -> None:
    contents = [(f"{number}", {"a": b"x" * number, "b": b"y"}) for number in range(9)]
    index = scan(write(tmp_path / "a.tar", contents))
    at = index.places([8, 2, 2])
    assert at.first == [0, 2, 4, 6]
    assert [at.size[first] for first in at.first[:-1]] == [8, 2, 2]


def test_checksums_and_numbers(tmp_path: Path) -> None:
    contents = [
        (f"{number}", {"cls": b"%03d\n" % number, "json": b'{"f": %d.5, "i": 7}' % number}) for number in range(4)
    ]
    path = write(tmp_path / "a.tar", contents)
    values = ["cls", "json:f", "json:i"]
    whole = Index.join([scan(path, sums=True, values=values)] * 2)
    assert whole.columns[VALUES + "cls"].tolist() == [0, 1, 2, 3] * 2
    assert whole.columns[VALUES + "json:f"].tolist() == [0.5, 1.5, 2.5, 3.5] * 2
    assert whole.columns[VALUES + "json:i"].dtype == np.int64
    assert whole.places([5]).sum == [zlib.crc32(data) for data in contents[1][1].values()]
    assert not {SUM, VALUES + "cls"} & Index.join([whole, scan(path)]).columns.keys()
    for value in ("jpg", "json", "json:x"):  # x: no such key
        with pytest.raises(ValueError, match=r"sample '0' of .*a\.tar has no"):
            scan(path, values=[value])


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (["1" + "0" * 400], r"has b'\{\"n\": 10+"),
        (["9223372036854775808"], r"expected a number in \[-2\*\*63, 2\*\*63\)"),
        (["1e999"], "expected a number"),
        (["9007199254740993", "0.5"], r"whole numbers beyond 2\*\*53 and numbers with fractions"),
        (["[" * 100_000], "has no number"),
    ],
)
def test_numbers_that_no_array_holds_are_an_error(numbers: list[str], text: str, tmp_path: Path) -> None:
    contents = [(f"{at}", {"json": b'{"n": %s}' % number.encode()}) for at, number in enumerate(numbers)]
    with pytest.raises(ValueError, match=text):
        scan(write(tmp_path / "a.tar", contents), values=["json:n"])


def test_large_whole_numbers_are_kept_exactly(tmp_path: Path) -> None:
    def shard(name: str, number: str) -> Index:
        return scan(write(tmp_path / name, [("a", {"json": b'{"n": %s}' % number.encode()})]), values=["json:n"])

    large, fraction = shard("a.tar", "9007199254740993"), shard("b.tar", "0.5")
    assert Index.join([large, large]).columns[VALUES + "json:n"].tolist() == [2**53 + 1] * 2
    assert Index.join([shard("c.tar", "7"), fraction]).columns[VALUES + "json:n"].tolist() == [7, 0.5]
    with pytest.raises(ValueError, match=r"values of json:n are whole numbers beyond 2\*\*53 in one shard"):
        Index.join([large, fraction])


def test_names_are_relative_to_the_folder_of_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    inside, outside = (write(tmp_path / name, [("a", {"cls": b"1"})]) for name in ("in/a.tar", "b.tar"))
    Index.join([scan(inside), scan(outside)]).save(tmp_path / "in" / "all.index")
    (tmp_path / "in").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert [shard.name for shard in Index.load(Path("moved/all.index")).shards] == ["moved/a.tar", str(outside)]


def test_a_mapped_index_travels_as_the_name_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [(f"{number:06}", {"cls": b"1"}) for number in range(2000)]
    made = scan(write(tmp_path / "a.tar", contents))
    assert pickle.loads(pickle.dumps(made)).key(1999) == "001999"
    made.save(tmp_path / "a.index")
    monkeypatch.chdir(tmp_path)
    mapped = pickle.dumps(Index.load(Path("a.index")))
    assert len(mapped) < 500
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    again = pickle.loads(mapped)
    assert (again.key(1999), again.shards[0].name) == ("001999", "a.tar")
    scan(write(tmp_path / "a.tar", contents[1:])).save(tmp_path / "a.index")
    with pytest.raises(ShardCorrupt, match="has changed"):
        pickle.loads(mapped)
    os.unlink(tmp_path / "a.index")
    with pytest.raises(FileNotFoundError):
        pickle.loads(mapped)
