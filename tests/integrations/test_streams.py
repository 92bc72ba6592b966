"""Datasets that others wrote to be read as streams: WebDataset's pipelines, and those of Hugging Face's datasets."""

import io
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest

from headrace import DataLoader
from launch import run_ranks

JOBS = Path(__file__).parent / "jobs"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four shards of 25 samples each."""
    folder = tmp_path_factory.mktemp("shards")
    paths = [str(folder / f"{number}.tar") for number in range(4)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for sample in range(25 * shard, 25 * shard + 25):
                member = tarfile.TarInfo(f"{sample:03}.txt")
                member.size = 3
                tar.addfile(member, io.BytesIO(f"{sample:03}".encode()))
    return paths


def keys(samples: Any) -> list[int]:
    return [int(sample["__key__"]) for sample in samples]


def pipeline(shards: list[str], **shuffling: Any) -> Any:
    import webdataset  # here, as all of this size: no other test is to be forked from a process that has imported it

    dataset = webdataset.WebDataset(
        shards, shardshuffle=4, seed=1, nodesplitter=webdataset.split_by_node, empty_check=False
    )
    return dataset.shuffle(50, **shuffling)


def stream_of_numbers(length: int, num_shards: int) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"number": range(length)}).to_iterable_dataset(num_shards=num_shards)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pipeline_with_seeds_goes_on_where_it_was(shards: list[str], workers: int) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(pipeline(shards, seed=2), batch_size=None, seed=3, num_workers=workers)

    first, second = loader(), loader()
    reader = iter(first)
    got = keys(next(reader) for _ in range(33))
    second.load_state_dict(first.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        rest = keys(second)
    assert rest == keys(reader)
    assert sorted(got + rest) == list(range(100))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pipeline_that_seeds_itself_from_the_clock_is_told_of(shards: list[str], workers: int) -> None:
    first, second = (DataLoader(pipeline(shards), batch_size=None, seed=3, num_workers=workers) for _ in range(2))
    reader = iter(first)
    for _ in range(33):
        next(reader)
    second.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="read again .* yielded other data .* seeds itself from the time"):
        keys(second)


def test_what_splits_itself_is_left_alone(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import webdataset
    from datasets.distributed import split_dataset_by_node

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    table = stream_of_numbers(8, num_shards=2)
    split = {
        "webdataset.split_by_node": pipeline(shards, seed=1),
        "webdataset.ResampledShards": webdataset.WebDataset(
            shards, shardshuffle=False, resampled=True, nodesplitter=None
        ),
        "datasets.distributed.split_dataset_by_node": split_dataset_by_node(table, 1, 2),
    }
    for splitter, dataset in split.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            next(iter(DataLoader(dataset, batch_size=None)))
            next(iter(DataLoader(dataset, batch_size=None, distributed=False)))
        with pytest.warns(UserWarning, match=f"deals .* that {splitter} has split .* never read. Leave distributed="):
            next(iter(DataLoader(dataset, batch_size=None, distributed=True)))
    whole = webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=None)
    for dataset in (table, whole, whole.map(dict)):
        with pytest.warns(UserWarning, match=r"pass distributed=False to say so.* pass distributed=True to deal"):
            next(iter(DataLoader(dataset, batch_size=None)))
    with pytest.raises(ValueError, match="explicit nodesplitter"):
        next(iter(DataLoader(webdataset.WebDataset(shards, shardshuffle=False), batch_size=None)))


@pytest.mark.slow
@pytest.mark.ray
def test_ranks_share_the_shards_wherever_they_are_read_also_on_ray(shards: list[str], tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    ranks = run_ranks(JOBS / "shards.py", 2, tmp_path, *shards, RAY_ADDRESS=address)
    for executor in ranks[0]["read"]:
        shares = [rank["read"][executor] for rank in ranks]
        assert sorted(shares[0] + shares[1]) == list(range(100)), executor
        assert len(shares[0]) == len(shares[1]) == 50, executor
    for rank, places in enumerate(ranks):
        assert places["seen"] == {
            executor: [str(rank), "2", str(rank), "2"] for executor in ("process", "spawn", "thread", "ray")
        }
        assert all("explicit nodesplitter" in error for error in places["refused"].values())


# Hugging Face's datasets keep a state of their own.


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 3, 8])
def test_a_table_read_as_a_stream_goes_on_where_it_was(workers: int, stop: int, seed: int | None) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(stream_of_numbers(24, num_shards=4), batch_size=3, num_workers=workers, seed=seed)

    def numbers(batches: Any) -> list[int]:
        return [number for batch in batches for number in batch["number"].tolist()]

    first, second = loader(), loader()
    reader = iter(first)
    got = [next(reader)["number"].tolist() for _ in range(stop)]
    if stop == 8:
        assert next(reader, None) is None
    second.load_state_dict(first.state_dict())
    if stop < 8:
        rest = numbers(second)
        assert rest == numbers(reader)
        assert sorted(rest + [number for batch in got for number in batch]) == list(range(24))
        second.set_epoch(1)  # without which, and without seed=, such a dataset goes back to the state it was given
    following = numbers(second)
    assert following == numbers(first)
    assert sorted(following) == list(range(24))
