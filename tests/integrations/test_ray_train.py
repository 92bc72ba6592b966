"""Ray Train's `TorchTrainer` with two workers, one of which is killed after a checkpoint."""

import gc
import json
import signal
from collections import Counter
from typing import Any

import psutil
import pytest

from waiting import LIMIT_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

ACTORS = ("ray::RayTrainWorker", "ray::TrainController", "ray::PlacementGroupCleaner")


def trainers_processes() -> list[str]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            found.append(process.name())
        except psutil.NoSuchProcess:
            continue
    return [name for name in found if name.startswith(ACTORS)]


@pytest.fixture(scope="module")
def ranks(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank read before one was killed, and what it found after that."""
    import ray.train
    from ray.train.torch import TorchTrainer

    from integrations.jobs import ray_train_loop

    folder = tmp_path_factory.mktemp("ray_train")
    folders = {name: folder / name for name in ("before", "resumed")}
    for one in folders.values():
        one.mkdir()
    free, interrupts = ray.available_resources()["CPU"], signal.getsignal(signal.SIGINT)
    TorchTrainer(
        ray_train_loop.train,
        train_loop_config={name: str(one) for name, one in folders.items()},
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=ray.train.RunConfig(
            name="run", storage_path=str(folder / "kept"), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    ).fit()
    signal.signal(signal.SIGINT, interrupts)  # that of Ray Train stays, and keeps its controller
    gc.collect()
    wait_until(lambda: not trainers_processes(), LIMIT_S)
    wait_until(lambda: ray.available_resources()["CPU"] >= free, LIMIT_S)  # nor do its loaders' actors hold any
    return [
        {name: json.loads((one / f"rank{rank}.json").read_text()) for name, one in folders.items()} for rank in range(2)
    ]


def test_what_follows_a_kill_is_what_would_have_followed(ranks: list[Any]) -> None:
    for rank in ranks:
        before, resumed = rank["before"], rank["resumed"]
        assert [before[0], before[1] + resumed["epochs"][0], resumed["epochs"][1]] == resumed["whole"]
        assert len(resumed["epochs"]) == 2
        assert len(before[1]) == 4, "it was in the middle of an epoch"
        assert resumed["made by threads"]


def test_the_ranks_share_each_epoch_and_each_is_shuffled_anew(ranks: list[Any]) -> None:
    orders = []
    for epoch in range(3):
        shares = [[index for index, _ in rank["resumed"]["whole"][epoch]] for rank in ranks]
        read = Counter(shares[0] + shares[1])
        assert len(shares[0]) == len(shares[1])
        assert set(read) == set(range(23))
        assert read.total() == 24, "there is one pad"
        orders.append(str(shares))
    assert len(set(orders)) == 3


def test_prepare_data_loader_wraps_the_loader_and_changes_nothing_else(ranks: list[Any]) -> None:
    for rank in ranks:
        found = rank["resumed"]
        assert found["left alone"]
        assert found["wrapped"]
        assert found["through the wrapper"] == found["whole"][0]
        assert found["made by threads for the wrapper"]
        assert found["samples in the state after one batch"] == 8, "the wrapper is a batch ahead, so use the raw loader"


def test_rays_workers_make_the_same_batches(ranks: list[Any]) -> None:
    assert ranks[0]["resumed"]["on ray"] == ranks[0]["resumed"]["whole"][0]
