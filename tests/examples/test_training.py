"""What the examples with digits and with small images say of training on one rank and on two, and after a kill."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import LIMIT_S, Ranks
from waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
MNIST, CIFAR = EXAMPLES / "mnist_ddp.py", EXAMPLES / "cifar_ddp.py"
ROW = re.compile(r"^\| (\d) \| (\d+) \| ([\d,]+) \| ([01]\.\d{4}) \|$", re.MULTILINE)


def run(folder: Path, *arguments: str) -> str:
    """Run Python in a folder as a user does, and return what it prints."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def check_row(row: tuple[str, ...], ranks: int) -> None:
    assert row[:2] == (str(ranks), str(44 // ranks)), "len(loader) halves"
    assert int(row[2].replace(",", "")) > 0
    assert float(row[3]) > 0.7, "it learns"


def check_logs(told: str, ranks: int) -> None:
    """See that each rank logs under its own number, and that one saves."""
    epochs = re.findall(r"^rank (\d): epoch 0 of (\d+) batches, the last loss \d\.\d{4}$", told, re.MULTILINE)
    assert sorted(epochs) == [(str(rank), str(44 // ranks)) for rank in range(ranks)]
    assert re.findall(r"^.*saved.*$", told, re.MULTILINE) == ["rank 0: saved mnist.pt"]


def check_saved(folder: Path) -> None:
    saved = torch.load(folder / "mnist.pt", weights_only=True)
    assert {name: tuple(weights.shape) for name, weights in saved.items()} == {
        "0.weight": (16, 1, 5, 5),
        "0.bias": (16,),
        "4.weight": (10, 784),
        "4.bias": (10,),
    }, "of the network, not of what wraps it"


@pytest.mark.slow
def test_the_table_of_one_rank_and_two_by_torchrun(tmp_path: Path) -> None:
    header, line, *rows = run(tmp_path, str(MNIST), "--table", "--epochs=1").splitlines()
    assert header == "| ranks | len(loader) | samples/s | accuracy |"
    assert line == "| --- | --- | --- | --- |"
    assert len(rows) == 2
    for ranks, row in enumerate(rows, 1):
        (cells,) = ROW.findall(row)
        check_row(cells, ranks)
    check_saved(tmp_path)


@pytest.mark.slow
def test_the_old_launcher(tmp_path: Path) -> None:
    launch = "-m", "torch.distributed.launch", "--standalone", "--nproc-per-node=1"
    told = run(tmp_path, *launch, str(MNIST), "--epochs=1")
    check_logs(told, 1)
    (row,) = ROW.findall(told)
    check_row(row, 1)


@pytest.mark.slow
def test_without_the_marked_lines_it_trains_on_one_device_to_the_same_figures(tmp_path: Path) -> None:
    lines = MNIST.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.endswith("# DDP\n")]
    assert 0 < len(lines) - len(kept) < 10
    alone = tmp_path / "alone.py"
    alone.write_text("".join(kept))
    assert not re.findall(r"dist\.(?!all_reduce\b)\w+\(|DistributedDataParallel\(", alone.read_text())
    results = []
    for told in run(tmp_path, str(MNIST), "--epochs=1"), Ranks(alone, 1, tmp_path, "--epochs=1").finish():
        check_logs(told, 1)
        ((_, _, _, accuracy),) = ROW.findall(told)
        results.append((re.findall(r"the last loss (\S+)", told), accuracy))
    assert results[0] == results[1]


def ending(told: str) -> tuple[int, int]:
    """Return how many steps a run had, and how many test images it got right."""
    ((steps, right),) = re.findall(r"^after (\d+) steps of this run: (\d+) of 384 right$", told, re.MULTILINE)
    return int(steps), int(right)


def tensors(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Find the tensors of a state dict, with where they are in it."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors(value, f"{name}/{key}")


@pytest.mark.slow
def test_a_training_that_was_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    steps, right = ending(Ranks(CIFAR, 2, tmp_path, str(whole)).finish())
    assert steps == 4 * 22
    assert right > 0.7 * 384, "it learns"
    disturbed = Ranks(CIFAR, 2, tmp_path, str(killed))
    wait_until(killed.exists, LIMIT_S)
    assert all(rank.is_alive() for rank in disturbed.processes)
    disturbed.kill()
    told = Ranks(CIFAR, 2, tmp_path, str(killed)).finish()
    ((sample, epoch),) = re.findall(r"^begins at sample (\d+) of epoch (\d)$", told, re.MULTILINE)
    assert 0 < int(sample) < 1408, "in the middle of an epoch"
    assert ending(told) == (steps - int(epoch) * 22 - int(sample) // 64, right)

    one, other = (torch.load(path, weights_only=True) for path in (whole, killed))
    assert one["loader"] == other["loader"]
    assert one["loader"]["epoch"] == 4
    mine, its = dict(tensors(one)), dict(tensors(other))
    assert mine.keys() == its.keys()
    assert len(mine) == 6 + 6 * 3, "parameters, and for each the optimiser's step and two moments"
    for name, tensor in mine.items():
        assert torch.equal(tensor, its[name]), name

    alone = Ranks(CIFAR, 1, tmp_path, str(whole)).finish()
    assert "begins at sample 0 of epoch 4" in alone
    assert ending(alone) == (0, right), "one process counts the same images right as two ranks"
