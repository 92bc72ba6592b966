"""Wrong options: each gets an error that gives name, value, what is allowed, and the fix."""

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from headrace import (
    Balanced,
    DataLoader,
    Deferred,
    InlineExecutor,
    MissingExtra,
    ProcessExecutor,
    RayExecutor,
    Sequential,
    Shuffled,
    Subset,
    Weighted,
    World,
)
from headrace.testing import FakeDataset


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seed": -1}, ValueError, r"seed=-1 is not allowed: expected an integer in \[0, 18446744073709551615\]"),
        ({"seed": 2**64}, ValueError, r"seed=18446744073709551616 is not allowed"),
        ({"seed": 1.5}, TypeError, r"seed=1\.5 is not allowed.*got float"),
        ({"seed": True}, TypeError, r"seed=True is not allowed.*got bool"),
        ({"order": "shuffled"}, TypeError, r"order='shuffled' is not allowed.*shuffle=True"),
        ({"order": [3, 1]}, TypeError, r"order=\[3, 1\] is not allowed.*goes to sampler="),
        ({"distributed": 2}, TypeError, r"distributed=2 is not allowed: expected None, True, False, World"),
        ({"distributed": (0, 2)}, TypeError, r"distributed=\(0, 2\) is not allowed"),
        ({"tail": "wrap"}, ValueError, r"tail='wrap' is not allowed: expected None or one of \('pad', 'drop', 'exact'"),
        ({"tail": "pad", "drop_last": True}, ValueError, r"tail='pad' is not allowed.*drop_last=True"),
        ({"tail": "exact", "drop_last": True}, ValueError, r"tail='exact' is not allowed.*drop_last=True"),
        (
            {"executor": "threads"},
            ValueError,
            r"executor='threads' is not allowed: expected one of \('process', 'thread', 'in",
        ),
        ({"executor": ProcessExecutor}, TypeError, r"executor=.*ProcessExecutor.* is not allowed.*got ABCMeta"),
        ({"executor": "process"}, ValueError, r"num_workers=0 is not allowed.*executor=\"inline\""),
        ({"executor": ProcessExecutor()}, ValueError, r"num_workers=0 is not allowed: expected at least 1"),
        ({"on_error": "skip"}, ValueError, r"on_error='skip' is not allowed: expected one of \('raise', 'replace'\)"),
        ({"on_error": None}, ValueError, r"on_error=None is not allowed: expected one of \('raise', 'replace'\)"),
        (
            {"on_error": "replace", "sampler": [1]},
            ValueError,
            r"on_error='replace' is not allowed.*of your own.*order=",
        ),
        ({"on_error": "replace", "batch_sampler": [[1]]}, ValueError, r"on_error='replace' is not.*no positions"),
        ({"order": Weighted([1.0] * 6)}, ValueError, r"len\(weights\)=6 is not allowed.*len\(dataset\)=5"),
        ({"order": Balanced([1] * 4)}, ValueError, r"len\(labels\)=4 is not allowed.*len\(dataset\)=5"),
        ({"order": Subset([2, 5])}, ValueError, r"largest index=5 is not allowed.*below len\(dataset\)=5"),
    ],
)
def test_a_wrong_option(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        DataLoader(FakeDataset(5), **options)
    assert re.search(r"\. [A-Z].+\.$|\. Or .+\.$", str(caught.value)), "the last sentence says what to do"


def test_torchs_own_checks_come_first() -> None:
    with pytest.raises(ValueError, match="num_workers option should be non-negative"):
        DataLoader(FakeDataset(5), num_workers=-1, seed=-1)
    with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
        DataLoader(FakeDataset(5), sampler=[1], shuffle=True, order="wrong")  # type: ignore[arg-type]


def test_an_iterable_dataset_has_no_order() -> None:
    with pytest.raises(ValueError, match=r"order=.* is not allowed: expected None with an IterableDataset"):
        DataLoader(Numbers(), order=Sequential())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dataset", [Numbers(), SequenceWrapper(range(3)), IterableWrapper(range(3))])
def test_what_has_no_positions_has_no_substitutes(dataset: Any) -> None:
    with pytest.raises(ValueError, match=r"on_error='replace' is not allowed.*iterable dataset.*It has no positions"):
        DataLoader(dataset, on_error="replace")
    DataLoader(dataset, on_error="raise")


def test_drop_last_and_tail_drop_agree() -> None:
    assert len(DataLoader(FakeDataset(5), batch_size=2, drop_last=True, tail="drop")) == 2


def test_an_empty_dataset() -> None:
    assert list(DataLoader(FakeDataset(0))) == [], "as torch's"
    with pytest.raises(ValueError, match="num_samples should be a positive integer value, but got num_samples=0"):
        DataLoader(FakeDataset(0), shuffle=True)
    for options in ({"seed": 0}, {"distributed": World(1, 2)}):
        with pytest.raises(ValueError, match=r"len\(dataset\)=0 is not allowed.*empty dataset.*check the path"):
            iter(DataLoader(FakeDataset(0), **options))


def test_a_dataset_whose_length_changes_between_epochs() -> None:
    dataset = FakeDataset(5)
    parity, planned = DataLoader(dataset), DataLoader(dataset, seed=0)
    assert len(list(parity)) == len(list(planned)) == 5
    dataset.length = 7
    assert len(list(parity)) == 7, "as torch's"
    with pytest.raises(ValueError, match=r"len\(dataset\) changed from 5 to 7.*Make a new DataLoader"):
        iter(planned)
    assert len(list(DataLoader(dataset, seed=0))) == 7


def test_a_rank_outside_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"rank=4 is not allowed: expected an integer in \[0, 3\]"):
        World(4, 4)
    loader = DataLoader(FakeDataset(5))
    for rank, size in (("4", "4"), ("one", "4"), ("-1", "2")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(ValueError, match=rf"RANK, WORLD_SIZE=\('{rank}', '{size}'\) is not allowed.*torchrun"):
            iter(loader)


def test_options_beside_a_users_sampler_are_ignored_aloud() -> None:
    with pytest.warns(UserWarning, match="seed, order, tail, distributed is ignored: the sampler or batch_sampler"):
        DataLoader(FakeDataset(5), sampler=[0], seed=1, order=Sequential(), tail="exact", distributed=World(0, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(
            FakeDataset(5), sampler=DistributedSampler(FakeDataset(5), 2, 0), executor="inline", distributed=False
        )


def test_inline_overrides_the_number_of_workers() -> None:
    for executor in ("inline", InlineExecutor()):
        with pytest.warns(UserWarning, match=r"^num_workers, timeout is ignored: executor=.* has no use for it"):
            loader = DataLoader(FakeDataset(5), num_workers=2, executor=executor, timeout=1)  # type: ignore[arg-type]
        assert len(list(loader)) == 5
        assert not iter(loader)._workers


def test_a_rebuild_with_the_loaders_own_sampler_passes_what_the_first_was_given() -> None:
    first = DataLoader(FakeDataset(5), batch_size=2, on_error="replace", tail="exact", order=Shuffled())
    again = DataLoader(
        FakeDataset(5), batch_sampler=first.batch_sampler, on_error="replace", tail="exact", order=Shuffled()
    )
    assert sorted(index for batch in again for index in batch["index"].tolist()) == list(range(5))


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 1, "shuffle": True, "generator": torch.Generator()},
        {"order": Balanced([0, 1, 0, 1, 0]), "shuffle": False, "tail": "exact"},
        {"executor": "inline", "num_workers": 2, "persistent_workers": True, "timeout": 1},
        {"executor": "thread", "num_workers": 2, "multiprocessing_context": "fork", "distributed": World(0, 2)},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("part", ["sampler", "batch_sampler"])
def test_a_rebuild_is_not_told_again_what_has_no_effect(options: dict[str, Any], part: str) -> None:
    with pytest.warns(UserWarning, match="is ignored"):
        first = DataLoader(FakeDataset(5), **options)
    given = {name: getattr(first, name) for name in inspect.signature(DataLoader).parameters if hasattr(first, name)}
    given |= {"sampler": None, "batch_sampler": None, part: getattr(first, part)}
    if part == "batch_sampler":
        del given["batch_size"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(**given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_datapipes_are_torchs_alone() -> None:
    with pytest.warns(
        UserWarning, match="seed, tail, executor, fetch_threads is ignored: datapipes are read by torch's"
    ):
        DataLoader(SequenceWrapper(range(3)), seed=1, tail="pad", executor="inline", fetch_threads=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(SequenceWrapper(range(3)), shuffle=True)


def test_an_epoch_without_a_batch_is_explained_in_the_users_words() -> None:
    world = World(0, 3)
    with pytest.warns(
        UserWarning, match=r'^tail="drop" leaves no batch at all: 5 samples are fewer .* 3 ranks x 2 = 6'
    ):
        assert not list(DataLoader(FakeDataset(5), 2, tail="drop", distributed=world))
    with pytest.warns(UserWarning, match=r"^drop_last=True leaves no batch at all: 5 samples are fewer"):
        assert not list(DataLoader(FakeDataset(5), 2, drop_last=True, distributed=world))


@pytest.mark.parametrize("executor", ["ray", RayExecutor()])
def test_ray_that_is_not_installed_is_named_when_the_loader_is_made(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r'executor="ray" needs Ray: pip install "headrace\[ray\]"'):
        DataLoader(FakeDataset(5), num_workers=1, executor=executor)


def test_a_ray_client_that_is_not_installed_is_named_when_the_loader_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    DataLoader(FakeDataset(5), num_workers=1, executor="ray")
    with pytest.raises(MissingExtra, match=r'needs Ray and its client: pip install "headrace\[ray-client\]"'):
        DataLoader(FakeDataset(5), num_workers=1, executor=RayExecutor("ray://127.0.0.1:1"))
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    with pytest.raises(MissingExtra, match="needs Ray and its client"):
        DataLoader(FakeDataset(5), num_workers=1, executor="ray")


class Broken(FakeDataset):
    """It has no length, and nothing of it can be shown."""

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __repr__(self) -> str:
        raise RuntimeError("nor a line")


class Secret(Sequential):
    """It cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("nothing to see")


def _unbuilt() -> Any:
    raise AssertionError("the dataset is not to be built")


@pytest.mark.parametrize(
    ("loader", "line"),
    [
        (lambda: DataLoader([1, 2]), "DataLoader(list of 2 samples, batch_size=1)"),
        (
            lambda: DataLoader(FakeDataset(10**6), 64, seed=0, distributed=World(1, 4), tail="exact"),
            "DataLoader(FakeDataset of 1,000,000 samples, batch_size=64, seed=0, "
            "distributed=World(rank=1, size=4), tail='exact')",
        ),
        (
            lambda: DataLoader(
                FakeDataset(3),
                order=Subset([1, 2]),
                num_workers=1,
                executor="thread",
                fetch_threads=2,
                on_error="replace",
            ),
            "DataLoader(FakeDataset of 3 samples, batch_size=1, num_workers=1, order=Subset(2 indices), "
            "executor='thread', fetch_threads=2, on_error='replace')",
        ),
        (lambda: DataLoader(FakeDataset(3), batch_sampler=[[1]]), "DataLoader(FakeDataset of 3 samples)"),
        (lambda: DataLoader(Numbers(), distributed=False), "DataLoader(Numbers, batch_size=1, distributed=False)"),
        (lambda: DataLoader(Broken(3)), "DataLoader(Broken, batch_size=1)"),
        (lambda: DataLoader(Deferred(_unbuilt)), "DataLoader(Deferred(_unbuilt), batch_size=1)"),
        (lambda: DataLoader(Deferred(_unbuilt, 1234)), "DataLoader(Deferred(_unbuilt) of 1,234 samples, batch_size=1)"),
        (lambda: DataLoader.__new__(DataLoader), "DataLoader(NoneType)"),
    ],
)
def test_a_loader_is_shown_in_a_line(loader: Callable[[], Any], line: str) -> None:
    made = loader()
    before = torch.get_rng_state()
    assert repr(made) == line
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_is_shown_whatever_its_parts_are() -> None:
    half_made = DataLoader.__new__(DataLoader)
    half_made.__dict__["order"] = torch.zeros(1000)
    assert repr(half_made).startswith("DataLoader(NoneType, order=tensor([0., 0., ")
    assert len(repr(half_made)) < 300
    assert re.fullmatch(
        r"DataLoader\(list of 1 samples, batch_size=1, order=<Secret .*>\)", repr(DataLoader([1], order=Secret()))
    )
