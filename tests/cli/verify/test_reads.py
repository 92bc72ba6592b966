"""Whose line of code is to blame: never one of Python's, torch's, numpy's or headrace's."""

import os
from pathlib import Path

import pytest
import rich
import torch

import headrace
from headrace.cli.verify import reads as verify_reads
from headrace.cli.verify.reads import of_library, recorded


def test_packages_may_lie_in_pythons_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do where Python was installed without a virtual environment."""
    monkeypatch.setattr(verify_reads, "_STANDARD", verify_reads._folders(str(Path(torch.__file__).parents[2])))
    of_library.cache_clear()
    try:
        assert of_library(torch.__file__)
        assert of_library(headrace.__file__)
        assert not of_library(rich.__file__)
    finally:
        of_library.cache_clear()


def test_packages_may_lie_behind_a_link(tmp_path: Path) -> None:
    folder, link = tmp_path / "torch", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    assert set(verify_reads._folders(str(link))) == {f"{link}{os.sep}", f"{folder.resolve()}{os.sep}"}


def test_what_the_process_decides_is_named() -> None:
    reads = {
        "os.getppid": os.getppid,
        "os.getcwd": Path.cwd,
        "os.environ": lambda: os.environ.get("HOME"),
        "os.uname": os.uname,
    }
    for name, read in reads.items():
        with recorded() as calls:
            read()
        assert [call.kind for call in calls] == ["identity"], name
        assert f"({name})" in calls[0].what
        assert "test_reads.py" in calls[0].where
