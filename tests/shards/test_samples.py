"""Members become samples as webdataset makes them."""

import io
import tarfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ShardCorrupt
from headrace.shards.samples import adjacent, key_and_field, samples
from headrace.shards.tar import Member, members


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jpg", ("a", "jpg")),
        ("a.seg.PNG", ("a", "seg.png")),
        ("./d/a.b.c", ("./d/a", "b.c")),
        ("d.e/a.jpg", ("d.e/a", "jpg")),
        ("d/.hid.txt", ("d/", "hid.txt")),
        (".hidden", None),
        ("plain", None),
        ("d.e/plain", None),
        ("a.", ("a", "")),
        ("__info__.json", ("__info__", "json")),
        ("__info__", None),
        ("__info__/a.jpg", None),
        ("d/__info__/a.jpg", ("d/__info__/a", "jpg")),
    ],
)
def test_names(name: str, expected: tuple[str, str] | None) -> None:
    assert key_and_field(name) == expected


def test_neighbours_with_one_key_are_a_sample() -> None:
    names = ["a.jpg", "a.cls", "README", "a.txt", "b.jpg", "a.jpg"]
    found = [Member(name, at, at + 1, 0, b"") for at, name in enumerate(names)]
    assert [(key, [*fields]) for key, fields in samples(found, "x")] == [
        ("a", ["jpg", "cls", "txt"]),
        ("b", ["jpg"]),
        ("a", ["jpg"]),
    ]


def test_a_field_that_a_sample_has_twice_is_an_error() -> None:
    found = [Member(name, 512 * at, 512, 0, b"") for at, name in enumerate(["a.jpg", "a.JPG"])]
    with pytest.raises(ShardCorrupt, match="x is corrupt at byte 512: sample 'a' has a second 'jpg'"):
        list(samples(found, "x"))


@given(
    st.lists(
        st.text(st.sampled_from("ab./_A"), min_size=1, max_size=8).filter(lambda name: name.strip("/")), max_size=8
    )
)
def test_the_samples_are_webdatasets(names: list[str]) -> None:
    from webdataset.tariterators import group_by_keys, tar_file_iterator

    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size = 2
            tar.addfile(member, io.BytesIO(b"%02d" % number))
    data = file.getvalue()

    about = "__key__", "__url__", "__local_path__"

    def theirs() -> Any:
        found = ({**one, "__url__": ""} for one in tar_file_iterator(io.BytesIO(data)))
        for sample in group_by_keys(found):
            yield sample["__key__"], {field: value for field, value in sample.items() if field not in about}

    def ours() -> Any:
        for key, fields in samples(members(memoryview(data), "x"), "x"):
            yield key, {field: data[one.start : one.start + one.size] for field, one in fields.items()}

    def outcome(found: Any) -> Any:
        try:
            return list(found)
        except ValueError:
            return "a duplicate"

    assert outcome(ours()) == outcome(theirs())


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["a.jpg", "b.jpg", "a.cls", "b.cls"], "sample 'a'"),
        (["a.jpg", "a.cls", "b.jpg", "a.txt"], "sample 'a'"),
        (["a.jpg", "b.jpg", "a.jpg", "c.jpg", "a.cls"], "sample 'a'"),
        (["a.jpg", "a.cls", "b.jpg", "a.jpg", "a.cls"], None),
        (["d/a.jpg", "a.jpg", "d/b.jpg"], None),
    ],
)
def test_members_of_a_sample_that_are_not_next_to_each_other_are_refused(names: list[str], refused: str | None) -> None:
    found = adjacent(samples([Member(name, at, at + 1, 0, b"") for at, name in enumerate(names)], "x.tar"), "x.tar")
    if refused is None:
        assert sum(len(fields) for _, fields in found) == len(names)
    else:
        with pytest.raises(ShardCorrupt, match=rf"x\.tar: the members of {refused} are not next to.*tar --sort=name"):
            list(found)
