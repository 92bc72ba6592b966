"""Names of shards are expanded as webdataset's are, and what is no local tar file is refused."""

from pathlib import Path
from typing import Any

import pytest
from braceexpand import UnbalancedBracesError, braceexpand  # type: ignore[import-untyped]
from hypothesis import assume, example, given
from hypothesis import strategies as st

from headrace.shards.names import shard_names, shard_paths


@given(st.text(st.sampled_from("{}ab,.-019"), min_size=1, max_size=14))
@example("{000..010}.{a..c}")
@example("x{1..10..3}y{10..1..-4}")
@example("{-03..2}{e..a..2}")
@example("{a,{b,c}{0..2}}{}{x}")
def test_braces(text: str) -> None:
    opened = [text[:end].count("{") - text[:end].count("}") for end in range(len(text) + 1)]
    assume(min(opened) == 0)  # the package takes "}{" for text
    try:
        expected = list(braceexpand(text))
    except UnbalancedBracesError:
        with pytest.raises(ValueError, match="do not match"):
            shard_names(text)
        return
    assume(all(expected) and len(expected) < 1000)
    assert shard_names(text) == expected


def test_several_texts_in_one(tmp_path: Path) -> None:
    for name in ("b1.tar", "b0.tar", "c[0].tar", "d/e/f.tar"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    text = f"a.tar::{tmp_path}/b*.tar::{tmp_path}/c[0].tar::{tmp_path}/**/f.tar::file:/x.tar"
    assert shard_paths(text) == [
        "a.tar",
        *(f"{tmp_path}/{name}" for name in ("b0.tar", "b1.tar", "c[0].tar", "d/e/f.tar")),
        "/x.tar",
    ]


def test_wildcards_stand_for_shards_alone(tmp_path: Path) -> None:
    for name in ("a.tar", "b", "a.tar.index", "all.index", "classes.json", "folder/c.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for text, names in (
        ("*", ["a.tar", "b"]),
        ("**", ["a.tar", "b", "folder/c.tar"]),
        ("a*", ["a.tar"]),
        ("al*.index", ["all.index"]),
        ("all.index", ["all.index"]),
    ):
        assert shard_paths(f"{tmp_path}/{text}") == [f"{tmp_path}/{name}" for name in names]
    with pytest.raises(FileNotFoundError, match="no file matches"):
        shard_paths(f"{tmp_path}/al*")


def test_what_is_in_a_list_is_taken_as_it_is() -> None:
    assert shard_paths(["{a,b}", Path("*.tar")]) == ["{a,b}", "*.tar"]
    assert shard_paths(Path("{a,b}")) == ["{a,b}"]


@pytest.mark.parametrize(
    ("shards", "error", "text"),
    [
        ("", ValueError, "names no shard"),
        ([], ValueError, "names no shard"),
        (3, TypeError, "shards=3 is not allowed"),
        ([3], TypeError, "expected a text, a path"),
        ("pipe:curl x", ValueError, "no local file"),
        ("https://x/a.tar", ValueError, "no local file"),
        (["s3://x/a.tar"], ValueError, "no local file"),
        ("a.tar.gz", ValueError, "compressed"),
        ("A.TAR.GZ", ValueError, "compressed"),
        ("nowhere-*.tar", FileNotFoundError, "no file matches"),
    ],
)
def test_what_is_refused(shards: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        shard_paths(shards)
