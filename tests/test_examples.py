"""The examples keep what they promise, in the environment that torchrun makes; tests/examples/ runs it itself, too."""

import itertools
import re
from pathlib import Path

import pytest
import torch

from in_turn import SEPARATOR
from launch import Ranks
from waiting import wait_until

EXAMPLES = Path(__file__).parent.parent / "examples"
DDP = EXAMPLES / "ddp.py"
RANK = Path(__file__).parent / "rank.py"
IN_TURN = Path(__file__).parent / "in_turn.py"
LIMIT_S = 300


def check(printed: str) -> None:
    accuracies = re.findall(r"^accuracy ([01]\.\d+) on 359\b", printed, re.MULTILINE)
    assert len(accuracies) == 1, "rank 0 alone prints, and each test sample is counted once"
    assert float(accuracies[0]) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ddp(ranks: int, tmp_path: Path) -> None:
    check(Ranks(DDP, ranks, tmp_path).finish())


@pytest.mark.slow
def test_ddp_resume_ends_with_the_weights_of_a_run_that_was_not_killed(tmp_path: Path) -> None:
    def finish(run: Ranks) -> tuple[str, int]:
        printed = run.finish()
        ((steps, weights),) = re.findall(r"^after (\d+) steps .* the weights are (\w{64})$", printed, re.MULTILINE)
        return weights, int(steps)

    script = EXAMPLES / "ddp_resume.py"
    undisturbed, steps = finish(Ranks(script, 2, tmp_path, "undisturbed.pt"))
    killed = Ranks(script, 2, tmp_path, "killed.pt")
    wait_until((tmp_path / "killed.pt").exists, LIMIT_S)
    assert all(rank.is_alive() for rank in killed.processes)
    killed.kill()
    weights, steps_left = finish(Ranks(script, 2, tmp_path, "killed.pt"))
    assert 0 < steps_left < steps
    assert weights == undisturbed


def command(name: str, executor: str) -> list[str]:
    """Return the command that runs an example in short."""
    return [str(EXAMPLES / name), "--epochs", "2", "--executor", executor]


@pytest.fixture(scope="module")
def alone_told(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return what two examples print, inline and on Ray, all in one process: Ray starts workers for each process."""
    names = "ray_single.py", "ray_data_parallel.py"
    commands = [[*command(name, executor), SEPARATOR] for name in names for executor in ("inline", "ray")]
    folder = tmp_path_factory.mktemp("alone")
    out = Ranks(IN_TURN, 1, folder, *itertools.chain(*commands), RAY_ADDRESS=address()).finish()
    _, *told = out.split(f"{SEPARATOR}\n")
    return {name: told[2 * place : 2 * place + 2] for place, name in enumerate(names)}


def address() -> str:
    """Return that of the cluster that the tests have."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ray_single.py", "ray_data_parallel.py"])
def test_where_samples_are_made_changes_no_digit(name: str, alone_told: dict[str, list[str]]) -> None:
    check_digits(*alone_told[name])
    for told in alone_told[name]:
        assert ("no GPU here" in told) == ("data_parallel" in name and not torch.cuda.is_available())


@pytest.mark.ray
@pytest.mark.slow
def test_where_samples_of_ranks_are_made_changes_no_digit_on_ray(tmp_path: Path) -> None:
    commands = [command("ray_ddp.py", executor) for executor in ("inline", "ray")]
    check_digits(
        *(Ranks(Path(script), 2, tmp_path, *rest, RAY_ADDRESS=address()).finish() for script, *rest in commands)
    )


def check_digits(inline: str, on_ray: str) -> None:
    """See that both runs of an example learn the same."""
    ((accuracy, loss),) = re.findall(r"^accuracy (\S+), loss (\S+), \d+\.\d s$", inline, re.MULTILINE)
    assert re.findall(r"^accuracy (\S+), loss (\S+), \d+\.\d s$", on_ray, re.MULTILINE) == [(accuracy, loss)]
    assert float(accuracy) > 0.5, "it learns"


def test_examples_are_short() -> None:
    assert len(DDP.read_text().splitlines()) < 60
    for script in EXAMPLES.glob("ray_*.py"):
        assert len(script.read_text().splitlines()) < 90
