"""Generated archives have the samples that webdataset finds in them, or one of the differences that the page lists."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import ShardCorrupt
from headrace.shards.dataset import TarDataset
from headrace.shards.fields import ABOUT
from shards.test_tar import FORMATS, KINDS, an_archive

EXAMPLES = int(os.environ.get("HEADRACE_ARCHIVES", "300"))
"""How many archives are generated. Some thousands take a minute."""

PARTS = st.sampled_from(["a", "b", "0001", "é", "A", "x.y", ".hid", "__meta__", "__x", "日", "a b", "d" * 40, "\udce9"])
FIELDS = st.sampled_from(["jpg", "cls", "JPG", "seg.png", "b.c.d", "", "json", "é", "__key"])
NAMES = st.builds(
    lambda folders, key, field: "/".join([*folders, key]) + field,
    st.lists(st.sampled_from([".", "..", "d", "é.f", "__m__", "n" * 60]), max_size=4),
    PARTS,
    FIELDS.map(lambda field: f".{field}") | st.just(""),
)
MEMBERS = st.lists(st.tuples(NAMES, st.sampled_from([*KINDS[:1] * 8, *KINDS]), st.binary(max_size=700)), max_size=9)


def theirs(path: Path) -> list[dict[str, Any]]:
    import webdataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        found = list(webdataset.WebDataset([str(path)], shardshuffle=False, empty_check=False))
    return [{name: value for name, value in sample.items() if name != "__local_path__"} for sample in found]


def in_parts(found: list[dict[str, Any]]) -> bool:
    """Return whether two samples of one key have no field in common."""
    seen: dict[str, set[str]] = {}
    for sample in found:
        fields, before = sample.keys() - set(ABOUT), seen.setdefault(sample["__key__"], set())
        if before and before.isdisjoint(fields):
            return True
        before |= fields
    return False


@pytest.mark.filterwarnings("ignore:.*headrace inspect SHARD")
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(form=st.sampled_from(sorted(FORMATS)), contents=MEMBERS)
def test_the_samples_are_webdatasets(form: str, contents: list[tuple[str, bytes, bytes]], tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    try:
        path.write_bytes(an_archive(contents, form))
    except (ValueError, UnicodeEncodeError):  # a name that this format cannot hold
        return
    (tmp_path / "a.tar.index").unlink(missing_ok=True)
    try:
        expected = theirs(path)
    except ValueError:  # a sample has a field twice
        with pytest.raises(ShardCorrupt, match=r"has a second|not next to each other"):
            TarDataset(path)
        return
    if in_parts(expected):
        with pytest.raises(ShardCorrupt, match="not next to each other"):
            TarDataset(path)
        return
    if not expected:
        with pytest.raises(ValueError, match="have no sample"):
            TarDataset(path)
        return
    dataset = TarDataset(os.fspath(path))
    try:
        assert list(dataset) == expected
        assert [list(sample) for sample in dataset] == [list(sample) for sample in expected]
    finally:
        dataset._files.close()
