"""An index says of every sample where its fields lie, for one shard and for many."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ShardCorrupt
from headrace.shards.columns import read_columns, write_columns
from headrace.shards.index import Index

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
        data = Path(index.shards[index.shard_of(sample)].name).read_bytes()
        fields = index.fields(sample)
        found.append((index.key(sample), {name: data[at.start : at.start + at.size] for name, at in fields.items()}))
    return found


@given(shards=st.lists(CONTENTS, min_size=1, max_size=3))
def test_samples_are_found_in_every_shard(shards: list[Contents], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("shards")
    indexes = [Index.scan(write(folder / f"{number}.tar", contents)) for number, contents in enumerate(shards)]
    for index, contents in zip(indexes, shards, strict=True):
        assert contents_of(index) == contents
    joined = Index.join(indexes)
    joined.save(folder / "all.index")
    for one in (joined, Index.load(folder / "all.index")):
        assert contents_of(one) == [sample for contents in shards for sample in contents]
        assert [shard.samples for shard in one.shards] == [len(contents) for contents in shards]


def test_is_small(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [(f"{number:06}", {"jpg": b"x" * 300, "cls": b"1"}) for number in range(2000)])
    Index.scan(path).save(tmp_path / "a.index")
    assert (tmp_path / "a.index").stat().st_size <= 2000 * (40 + 6)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    with pytest.raises(ShardCorrupt, match="empty"):
        Index.scan(tmp_path / "a.tar")


def test_what_cannot_be_is_an_error(tmp_path: Path) -> None:
    path, file = write(tmp_path / "a.tar", [("a", {"jpg": b"x" * 300})]), tmp_path / "a.index"
    Index.scan(path).save(file)
    columns, about = read_columns(file)

    def changed(saying: dict[str, Any] | None = None, **others: Any) -> Path:
        write_columns(file, columns | {name: np.array(one, np.uint64) for name, one in others.items()}, saying or about)
        return file

    for outside in ({"block": [1000]}, {"size": [2**40]}, {"name": [7]}):
        with pytest.raises(ShardCorrupt, match="does not fit"):
            Index.load(changed(**outside)).fields(0)
    for contradiction in ({"first": [0]}, {"key_end": [1, 2]}, {"check": []}):
        with pytest.raises(ShardCorrupt, match="contradicts itself"):
            Index.load(changed(**contradiction))
    for saying in ({"names": ["jpg"]}, {"names": ["jpg"], "shards": [["a", "b", 1]]}, {"names": 5, "shards": []}):
        with pytest.raises(ShardCorrupt, match=r"cannot be understood|contradicts"):
            Index.load(changed(saying))
