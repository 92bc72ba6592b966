"""`headrace doctor`: what it finds on this machine, and on others that it is told of."""

import json
import os
import resource
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headrace
from headrace.cli import doctor
from headrace.cli.app import app
from headrace.cli.doctor import findings
from headrace.system import limits


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 0
    return result.output


def of(topic: str) -> doctor.Finding:
    return next(one for one in findings() if one.topic == topic)


def test_what_is_here() -> None:
    text = said()
    for expected in (headrace.__version__, torch.__version__, "anonymous memory", "open files", "CPUs", "accelerator"):
        assert expected in text
    found = {one["topic"]: one["value"] for one in json.loads(said("--json"))}
    assert found["torch"] == torch.__version__
    assert float(found["CPUs"]) <= (os.cpu_count() or 1)


def test_fewer_cpus_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(limits, "affinity", lambda: set(range(8)))
    monkeypatch.setattr(limits, "cpu_quota", lambda: None)
    assert of("CPUs").value == "8"
    assert of("CPUs").advice.startswith("The machine has 64. More than 8 busy workers")
    monkeypatch.setattr(limits, "cpu_quota", lambda: 1.5)
    assert of("CPUs").value == "1.5"


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[int, Any] = {resource.RLIMIT_NOFILE: 64, resource.RLIMIT_MEMLOCK: 65_536}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    assert of("open files") == ("open files", "at most 64", "Raise it for many workers: ulimit -n 4096.")
    assert of("locked memory").value == "at most 64 KiB"
    limits[resource.RLIMIT_NOFILE] = resource.RLIM_INFINITY
    assert of("open files") == ("open files", "no limit", "")


def test_ranks_and_threads_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert "RANK=1, WORLD_SIZE=4" in of("ranks").value
    assert of("OMP_NUM_THREADS").advice


def test_a_package_that_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        if package == "zstandard":
            raise doctor.PackageNotFoundError
        return "1"

    monkeypatch.setattr(doctor, "version", missing)
    assert of("zstandard").value == (
        'not installed; for shards compressed by zstd: pip install "headrace[zstd]" (in a checkout: '
        'pip install ".[zstd]")'
    )


def test_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("current_accelerator", torch.device("cuda")), ("device_count", 2)):
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    assert of("accelerator").value == "2 x cuda"
