"""Columns come back as they were written; whatever was cut off or changed is an error."""

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ShardCorrupt
from headrace.shards.columns import read_columns, smallest, write_columns

COLUMNS = {
    "a": np.array([1, 2, 300], np.uint16),
    "empty": np.array([], np.uint8),
    "b": np.array([2**40, 5], np.uint64),
    "c": np.array([0.5, -1.0]),
}


def test_comes_back_read_only(tmp_path: Path) -> None:
    path = tmp_path / "x.index"
    write_columns(path, COLUMNS, {"fields": ["jpg", "é"], "size": 7})
    columns, about, _ = read_columns(path)
    assert about == {"fields": ["jpg", "é"], "size": 7}
    assert list(columns) == list(COLUMNS)
    for name, column in columns.items():
        assert column.dtype == COLUMNS[name].dtype
        assert column.tolist() == COLUMNS[name].tolist()
        assert not column.flags.writeable
    assert os.listdir(tmp_path) == ["x.index"]


def test_takes_the_place_of_another_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.index"
    write_columns(path, COLUMNS, {})
    before, _, _ = read_columns(path)
    write_columns(path, {"a": np.array([9], np.uint8)}, {})
    assert before["a"].tolist() == [1, 2, 300], "who has mapped the former file keeps it"
    assert read_columns(path)[0]["a"].tolist() == [9]
    with pytest.raises(TypeError):
        write_columns(path, {}, {"no": object()})
    assert read_columns(path)[0]["a"].tolist() == [9]
    assert os.listdir(tmp_path) == ["x.index"]


def test_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    write_columns(tmp_path / "x", COLUMNS, {})
    (tmp_path / "y").write_text("")
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "xy"].count(
        stat.S_IMODE((tmp_path / "y").stat().st_mode)
    ) == 2


def test_a_folder_that_cannot_be_written_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none"):
        write_columns(tmp_path / "none" / "x", COLUMNS, {})


@pytest.mark.parametrize("length", [0, 1, 20, 33, 34, 100, 250, 319])
def test_a_file_that_was_cut_off_is_an_error(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.index"
    write_columns(path, COLUMNS, {})
    whole = path.read_bytes()
    assert length < len(whole)
    path.write_bytes(whole[:length])
    with pytest.raises(ShardCorrupt, match=r"x\.index"):
        read_columns(path)


@given(data=st.data())
def test_a_changed_description_is_an_error(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("columns") / "x.index"
    write_columns(path, COLUMNS, {"about": "it"})
    whole = bytearray(path.read_bytes())
    described = int.from_bytes(whole[24:28], "little")
    place = data.draw(st.integers(0, 31 + described))
    whole[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    with pytest.raises(ShardCorrupt, match=r"x\.index"):
        read_columns(path)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_changed_column_is_an_error_when_it_is_first_read(name: str, mapped: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.index"
    write_columns(path, COLUMNS, {})
    whole = bytearray(path.read_bytes())
    whole[read_columns(path)[0].places[name].first] ^= 1
    path.write_bytes(whole)
    columns, _, _ = read_columns(path, mapped)
    with pytest.raises(ShardCorrupt, match=rf"x\.index is damaged: the checksum of its column '{name}' differs"):
        columns[name]
    assert [columns[other].tolist() for other in COLUMNS if other != name]


def test_a_mapped_file_that_was_overwritten_is_an_error(tmp_path: Path) -> None:
    """Reading what is no longer there would end the process by a signal."""
    path = tmp_path / "x.index"
    write_columns(path, COLUMNS, {})
    mapped, read = read_columns(path)[0], read_columns(path, mapped=False)[0]
    path.write_bytes(b"")
    with pytest.raises(ShardCorrupt, match=r"x\.index was overwritten while it was in use"):
        mapped["a"]
    assert read["a"].tolist() == [1, 2, 300]


def test_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.index"
    write_columns(path, COLUMNS, {})
    path.write_bytes(path.read_bytes().replace(b"headrace\0\3", b"headrace\0\2"))
    with pytest.raises(
        ShardCorrupt, match=r"is an index of version 2, and this headrace reads version 3\. Make it again"
    ):
        read_columns(path)


@pytest.mark.parametrize(("largest", "kind"), [(0, "u1"), (255, "u1"), (256, "u2"), (2**32, "u8"), (2**32 - 1, "u4")])
def test_smallest(largest: int, kind: str) -> None:
    assert smallest(np.array([0, largest], np.uint64)).dtype == np.dtype(kind)


def test_smallest_of_none() -> None:
    assert smallest(np.array([], np.int64)).dtype == np.uint8
