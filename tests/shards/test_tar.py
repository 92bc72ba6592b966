"""The members of an archive are those that Python's tarfile finds; a broken archive is an error."""

import io
import tarfile
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.errors import ShardCorrupt
from headrace.shards.tar import BLOCK, members

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
NAMES = st.text(st.sampled_from("ab.é/_"), min_size=1, max_size=12).filter(lambda name: name.strip("/"))
KINDS = [tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]
KINDS += [tarfile.CHRTYPE, tarfile.FIFOTYPE]


def an_archive(contents: list[tuple[str, bytes, bytes]], form: str = "gnu") -> bytes:
    """Return an archive with members of these names, types and data."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=FORMATS[form]) as tar:
        for name, kind, data in contents:
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, len(data) if kind in (b"0", b"\0", b"7") else 0
            member.linkname = "elsewhere" * 20 if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) and form != "ustar" else ""
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def found(archive: bytes) -> list[tuple[str, int, int]]:
    return [(one.name, one.start, one.size) for one in members(memoryview(archive), "a.tar")]


def expected(archive: bytes) -> list[tuple[str, int, int]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return [(one.name, one.offset_data, one.size) for one in tar if one.isreg()]


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.tuples(NAMES, st.sampled_from(KINDS), st.binary(max_size=1200)), max_size=6),
    st.integers(0, 3),
)
@example("pax", [("é/", b"0", b"")], 0)
def test_finds_what_tarfile_finds(form: str, contents: list[tuple[str, bytes, bytes]], long: int) -> None:
    for place in range(min(long, len(contents))):
        name, kind, data = contents[place]
        contents[place] = ("/".join(["d" * 60] * (2 if form == "ustar" else 5)) + name.replace("/", "x"), kind, data)
    archive = an_archive(contents, form)
    assert found(archive) == expected(archive)


def test_pax_headers_of_one_member_and_of_all() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "for all"}) as tar:
        for name in ("é" * 80, "plain"):
            tar.addfile(tarfile.TarInfo(name))
    assert found(file.getvalue()) == expected(file.getvalue())


@pytest.mark.parametrize("cut", [*range(1, 20 * BLOCK, 173), *range(BLOCK, 20 * BLOCK, BLOCK)])
def test_an_archive_that_was_cut_off_is_an_error(cut: int) -> None:
    """Also at the end of a member, where tarfile takes what is there for a whole archive."""
    archive = an_archive([(f"{number}.txt", b"0", bytes([65 + number]) * 700) for number in range(4)])
    end = len(archive.rstrip(b"\0")) // BLOCK * BLOCK + BLOCK
    if cut >= end + 2 * BLOCK:
        assert len(found(archive[:cut])) == 4
    else:
        with pytest.raises(ShardCorrupt, match="cut off"):
            found(archive[:cut])


@given(st.data())
def test_what_is_changed_is_an_error_or_the_same(data: Any) -> None:
    """Never another exception, never a member outside of the archive."""
    archive = bytearray(an_archive([("a/b.txt", b"0", b"x" * 600), ("é" * 90, b"0", b"y")], "pax"))
    for _ in range(data.draw(st.integers(1, 4))):
        archive[data.draw(st.integers(0, len(archive) - 1))] = data.draw(st.integers(0, 255))
    try:
        places = found(bytes(archive))
    except ShardCorrupt:
        return
    assert all(0 <= start <= start + size <= len(archive) for _, start, size in places)


def _with_field(archive: bytes, start: int, value: bytes) -> bytes:
    """Return the archive with a field of its first header changed, and the checksum set right."""
    changed = bytearray(archive)
    changed[start : start + len(value)] = value
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed[:BLOCK])
    return bytes(changed)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (b"77777777777\0", "does not fit"),
        (b"\x80" + b"\xff" * 11, "does not fit"),
        (b"\xff" * 12, "no number"),
        (b"hello       ", "no number"),
        (b"99999999999\0", "no number"),
    ],
)
@pytest.mark.parametrize("kind", [b"0", b"x", b"L"])
def test_a_size_that_only_the_header_claims_is_an_error(size: bytes, text: str, kind: bytes) -> None:
    archive = _with_field(_with_field(an_archive([("a.txt", b"0", b"x" * 600)]), 124, size), 156, kind)
    with pytest.raises(ShardCorrupt, match=text if kind == b"0" else "extension header"):
        found(archive)


def test_a_sparse_member_is_an_error() -> None:
    archive = _with_field(an_archive([("a.txt", b"0", b"x" * 600)]), 156, b"S")
    with pytest.raises(ShardCorrupt, match="sparse"):
        found(archive)


@pytest.mark.parametrize("data", [b"", b"x", b"x" * 5000, bytes(BLOCK), bytes(BLOCK) + b"x" * BLOCK])
def test_what_is_no_archive_is_an_error(data: bytes) -> None:
    with pytest.raises(ShardCorrupt, match=r"a\.tar is corrupt at byte 0"):
        found(data)
