"""The real frameworks on real ranks, their own sharding left on: full cover, no duplicates, the loader still ours."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import DataLoader
from headrace.testing import FakeDataset
from launch import run_ranks

JOBS = Path(__file__).parent / "jobs"

pytestmark = pytest.mark.slow


def check_shuffled_epochs(ranks: list[Any], samples: int) -> None:
    """Each epoch covers every sample, pads aside once, in shares of equal size; each is shuffled anew."""
    pads = -samples % len(ranks)
    epochs = [[rank["epochs"][number] for rank in ranks] for number in range(3)]
    for shares in epochs:
        assert len({len(share) for share in shares}) == 1
        read = Counter(index for share in shares for index in share)
        assert set(read) == set(range(samples))
        assert read.total() == samples + pads
    assert len({str(shares) for shares in epochs}) == 3


def test_lightning_fabric(tmp_path: Path) -> None:
    ranks = run_ranks(JOBS / "fabric.py", 2, tmp_path)
    assert all(rank["ours"] for rank in ranks)
    check_shuffled_epochs(ranks, 23)


def test_lightning_trainer(tmp_path: Path) -> None:
    ranks = run_ranks(JOBS / "trainer.py", 2, tmp_path)
    assert all(rank["ours"] for rank in ranks)
    check_shuffled_epochs(ranks, 23)
    assert all(rank["told"] == [[0], [1], [2]] for rank in ranks)
    assert sorted(ranks[0]["validated"] + ranks[1]["validated"]) == list(range(13))
    assert sorted(ranks[0]["predicted"] + ranks[1]["predicted"]) == list(range(14))
    assert all(rank["made by threads"] for rank in ranks)
    assert not any(rank["workers_left"] for rank in ranks)


@pytest.mark.parametrize("size", [1, 3])
def test_accelerate(tmp_path: Path, size: int) -> None:
    ranks = run_ranks(JOBS / "accelerated.py", size, tmp_path)
    assert all(rank["ours"] for rank in ranks)
    check_shuffled_epochs(ranks, 23)
    for rank in ranks:
        assert rank["told"] == [[0], [1], [2]]
        assert rank["gathered"] == list(range(23)), "pads are cut off"
        assert rank["made by threads"]
        assert rank["ends"] == [False] * (len(rank["ends"]) - 1) + [True]
        assert rank["synced"] == [step % 2 == 1 or end for step, end in enumerate(rank["ends"])]
        assert not rank["idle"]
        assert rank["sizes"] == [4 * size, 23]
    # A sampler of the user's is Accelerate's to split, as with torch's loader.
    assert sorted({index for rank in ranks for index in rank["split"]}) == list(range(23))
    assert all((len(rank["split"]) < 23) == (size > 1) for rank in ranks)


@pytest.fixture(scope="module")
def beside_torch(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two ranks saw under Accelerate, with torch's loader and with ours."""
    return run_ranks(JOBS / "accelerate_beside_torch.py", 2, tmp_path_factory.mktemp("beside"))


def test_accelerate_treats_the_loader_as_torchs(beside_torch: list[Any]) -> None:
    """Order of gathered samples, ends, splitting, states, streams: equal, whatever Accelerate is set to."""
    for rank in beside_torch:
        assert rank["ours"] == rank["torch"]
    ours = beside_torch[0]["ours"]
    assert ours["order"][8] == list(range(19))
    assert ours["shuffled"] == [list(range(19))] * 2
    assert ours["split"][3:] == [[4, 4], True], "the batch size is that of all ranks"
    assert ours["saved"] == [list(range(24, 43)), list(range(43)), list(range(40))]
    assert ours["skipped"] == [2, list(range(16, 32)), list(range(16, 32)), list(range(32))]
    assert ours["moved"] == [[[False]], [[True]], [[]]]
    assert ours["synchronized"] == 1


def test_accelerate_has_its_configuration_heeded_or_the_user_told(beside_torch: list[Any]) -> None:
    one, other = (rank["alone"] for rank in beside_torch)
    for rank in one, other:
        early, dispatched, replaced, saved, skipped, twice = rank["told"]
        assert "before accelerate was imported does not see its DataLoaderConfiguration" in early
        assert "dispatch_batches=True is ignored" in dispatched
        assert "fetch_threads is ignored. Leave out the sampler" in replaced
        assert "Save what loader.state_dict() returns in a file for each rank" in saved
        for told in skipped, twice:
            assert "use the methods of Accelerator of these names" in told
        assert rank["replaced"]
        assert rank["placed"] == [True, [[], []]], (
            "a loader with a device of its own moves the batches, and no one else"
        )
        assert "distributed=None is not allowed: expected a World or a DeviceMesh, since 2 processes" in rank["mesh"]
        assert rank["together"] == [list(range(9))]
        assert "saved with split='in runs', this loader has True" in rank["in turn"], "it would skip other samples"
        assert rank["unknown length"] == [*range(19), 0], "the pad cannot be told"
    assert one["skipped by name"] == [[16, 17, 18, 19], [24, 25, 26, 27]]
    assert [one["stream"], other["stream"]] == [
        [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17]],
        [[4, 5, 6, 7], [12, 13, 14, 15], [18]],
    ]


def test_what_was_read_under_accelerate_goes_on_elsewhere(beside_torch: list[Any]) -> None:
    """The state knows nothing of how batches are dealt."""
    one, other = (rank["alone"] for rank in beside_torch)
    assert one["state"] == other["state"]
    loader = DataLoader(range(43), batch_size=5, shuffle=True, seed=1)
    whole = [index for batch in loader for index in batch.tolist()]
    begun = [share[at : at + 4] for at in (0, 4) for share in (one["begun"], other["begun"])]
    assert [index for run in begun for index in run] == whole[:16]
    loader.load_state_dict(one["state"])
    assert [index for batch in loader for index in batch.tolist()] == whole[16:]


def test_lightning_trainer_goes_on_from_any_step(tmp_path: Path) -> None:
    for outcomes in run_ranks(JOBS / "trainer_resume.py", 2, tmp_path):
        assert outcomes == [[True, True, True]] * 6, "stopped there; the same batches; the same parameters"


def test_fabric_and_accelerate_save_and_load_the_loader(tmp_path: Path) -> None:
    for outcomes in run_ranks(JOBS / "fabric_resume.py", 2, tmp_path):
        assert outcomes == dict.fromkeys(outcomes, True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"seed": 3},
        {"seed": 3, "num_workers": 1},
    ],
    ids=str,
)
def test_pytorch_geometrics_loaders_make_their_batches(options: dict[str, Any]) -> None:
    """They override `_get_iterator`, and turn what a sampler drew into data in the rank."""
    from torch_geometric.data import Data  # here: no test is to be forked from a process that has imported it
    from torch_geometric.loader import NodeLoader
    from torch_geometric.sampler import BaseSampler, SamplerOutput

    class Neighbours(BaseSampler):
        """Takes the nodes that are asked for, and the next of each."""

        def sample_from_nodes(self, index: Any, **_: Any) -> SamplerOutput:
            node = torch.cat([index.node, (index.node + 1) % 6]).unique()
            nothing = torch.empty(0, dtype=torch.long)
            found = {"node": node, "row": nothing, "col": nothing, "edge": nothing}
            return SamplerOutput(**found, metadata=(index.input_id, index.time))

        def sample_from_edges(self, index: Any, **_: Any) -> SamplerOutput:
            raise AssertionError("nodes are asked for")

        @property
        def edge_permutation(self) -> None:
            return None

    class OwnLoader(NodeLoader, DataLoader[Any]):
        pass

    def batches(kind: type, **own: Any) -> list[Any]:
        edges = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
        graph = Data(x=torch.arange(6.0)[:, None], edge_index=edges)
        loader = kind(graph, node_sampler=Neighbours(), batch_size=2, **own)
        read = [[(batch.x.tolist(), batch.batch_size) for batch in loader] for _ in range(2)]
        if kind is NodeLoader and own.get("persistent_workers"):
            loader._iterator._shutdown_workers()  # torch's, collected as garbage, wait 5 s for each worker
        return read

    torchs = {name: value for name, value in options.items() if name != "seed"}
    assert batches(OwnLoader, **options) == batches(NodeLoader, **torchs)


def test_distributed_checkpoints_go_on_in_any_world(tmp_path: Path) -> None:
    saved = run_ranks(JOBS / "checkpointed.py", 2, tmp_path, "save")
    assert {str(rank["state"]) for rank in saved} == {str(saved[0]["state"])}
    loader = DataLoader(FakeDataset(101), batch_size=8, shuffle=True, seed=0)
    loader.set_epoch(2)
    whole = sorted(
        list(row) for batch in loader for row in zip(*(part.tolist() for part in batch.values()), strict=True)
    )
    for size in (1, 3, 4):
        ranks = run_ranks(JOBS / "checkpointed.py", size, tmp_path, "load")
        assert sorted(row for rank in saved + ranks for row in rank["rows"]) == whole
        assert {rank["state"]["epoch"] for rank in ranks} == {3}
        assert all(rank["weights"] == [1, 1, 1] for rank in ranks)
