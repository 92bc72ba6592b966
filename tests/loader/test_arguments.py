"""Every argument of every public class: what is wrong is refused by name and value, what has no effect is named."""

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

import headrace
from headrace import (
    Balanced,
    DataLoader,
    Deferred,
    Executor,
    InlineExecutor,
    Order,
    PackedList,
    Plan,
    ProcessExecutor,
    RayExecutor,
    Sequential,
    Shuffled,
    Subset,
    ThreadExecutor,
    Weighted,
    World,
)
from headrace.testing import FakeDataset
from parity_tools import LOADERS, Raised, attempt, same, seed_everything

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore:This DataLoader will create")]


class Numbers(IterableDataset[int]):
    """0, 1, 2."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized:
    """Sample i is i, for every i."""

    def __getitem__(self, index: int) -> int:
        return index


class InBulk:
    """Sample i is i, asked for in lists."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


@dataclass(frozen=True)
class Wrong:
    """A value that is refused at construction.

    Attributes:
        value: Which.
        error: The error's type.
        text: What it says; by default the argument's name and the value.
        beside: Other arguments.
    """

    value: Any
    error: type[Exception]
    text: str = ""
    beside: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ignored:
    """A value without effect beside other arguments: a warning names it, when the loader is made.

    Attributes:
        value: Which.
        beside: The other arguments.
        text: What the warning says; by default the argument's name, and that it is ignored.
    """

    value: Any
    beside: dict[str, Any]
    text: str = ""


@dataclass(frozen=True)
class AsTorch:
    """A value that torch judges: it raises what torch raises, there or earlier, or gives the same batch.

    Attributes:
        value: Which.
        beside: Other arguments.
        text: What headrace's own error says; "" where it is torch's, to the letter.
    """

    value: Any
    beside: dict[str, Any] = field(default_factory=dict)
    text: str = ""


Case = Wrong | Ignored | AsTorch

FLAG = "is not allowed: expected True or False"
SAMPLER = {"sampler": [1, 0]}
OWN_BATCHES = {"batch_sampler": [[1, 0]]}
TWO_WORKERS = {"num_workers": 2}
INLINE = {"executor": "inline", "num_workers": 2}
DATASET = "is not allowed: expected a dataset with __getitem__ and __len__"

LOADER: dict[str, list[Case]] = {
    "dataset": [
        AsTorch(None, text=rf"dataset=None {DATASET}.*got NoneType\. Check the function"),
        AsTorch(None, {"shuffle": True}, r"dataset=None is not allowed"),
        AsTorch(7, {"sampler": [1]}, r"dataset=7 is not allowed"),
        AsTorch(FakeDataset, text=r"dataset=<class '.*FakeDataset'> is not allowed.*Pass an instance: FakeDataset\("),
        AsTorch(Numbers, text=r"got _?\w+\. Pass an instance: Numbers\("),
        AsTorch(iter([1]), text=r"got list_iterator\. Wrap it: class Stream\(IterableDataset\)"),
        AsTorch((one for one in [1]), {"shuffle": True}, r"got generator\. Wrap it: class Stream\(IterableDataset\)"),
        AsTorch({1, 2}, text=r"dataset=\{1, 2\} is not allowed.*\(a list will do\)"),
        AsTorch([3, 4]),
        AsTorch(range(3)),
        AsTorch({0: 5, 1: 6}),
        AsTorch(torch.arange(3)),
        AsTorch(Numbers()),
        AsTorch(Unsized()),
        AsTorch(Unsized(), {"shuffle": True}),
        AsTorch(Unsized(), SAMPLER),
        AsTorch(Unsized(), {"batch_sampler": [[1, 0]]}),
        AsTorch(InBulk(), SAMPLER),
    ],
    "batch_size": [*map(AsTorch, (0, -1, "4", 2.0, None, True, [2], np.int64(2)))],
    "shuffle": [
        AsTorch("yes"),
        AsTorch(True, SAMPLER),
        *(Ignored(False, {"order": order}, r"shuffle=False is ignored: order=\w+\(.* is random by itself")
          for order in (Balanced([0, 1, 0, 1, 0]), Weighted([1.0] * 5), Shuffled(), Subset([1], shuffle=True))),
        Ignored(True, {"order": Sequential()}, r"shuffle=True is ignored: order=Sequential\(\) is in the same"),
    ],
    "sampler": [AsTorch(7), AsTorch([9]), AsTorch([1], OWN_BATCHES)],
    "batch_sampler": [AsTorch(7), AsTorch([1]), AsTorch([[9]]), AsTorch([[1]], {"batch_size": 2})],
    "num_workers": [
        AsTorch(-1),
        AsTorch("2", text=r"num_workers='2' is not allowed: expected an integer >= 0, got str\. 0 loads in the"),
        AsTorch("", text=r"num_workers='' is not allowed"),
        AsTorch(None, text=r"num_workers=None is not allowed: expected an integer >= 0, got NoneType"),
        AsTorch(1.5, text=r"num_workers=1\.5 is not allowed: expected an integer >= 0, got float"),
        AsTorch(1.0, text=r"num_workers=1\.0 is not allowed"),
        AsTorch([1], text=r"num_workers=\[1\] is not allowed"),
        *map(AsTorch, (0.0, False, True, np.int64(1), torch.tensor(1))),
        Wrong(0, ValueError, r"num_workers=0 is not allowed: expected at least 1", {"executor": "thread"}),
        Ignored(2, {"executor": "inline"}, r"num_workers is ignored: executor='inline' has no use for it\. Leave"),
        Ignored(2, {"executor": InlineExecutor()}, r"num_workers is ignored: executor=InlineExecutor\(\) has no use"),
    ],
    "collate_fn": [AsTorch(3)],
    "pin_memory": [AsTorch("")],
    "drop_last": [AsTorch("yes"), AsTorch(1), AsTorch(True, {"batch_size": None}), AsTorch(True, OWN_BATCHES)],
    "timeout": [
        AsTorch(-1),
        AsTorch(1),
        AsTorch("5", text=r"timeout='5' is not allowed: expected a number of seconds >= 0, got str\. 0 waits without"),
        AsTorch(None, text=r"timeout=None is not allowed"),
        AsTorch("5", TWO_WORKERS, text=r"timeout='5' is not allowed"),
        AsTorch(np.float64(60), {"num_workers": 1}),
        Ignored(1, INLINE, "num_workers, timeout is ignored"),
    ],
    "worker_init_fn": [AsTorch(3), AsTorch(3, {"num_workers": 1}), Ignored(print, INLINE)],
    "multiprocessing_context": [
        AsTorch("fork"),
        AsTorch("thread", TWO_WORKERS),
        AsTorch(7, TWO_WORKERS),
        Ignored("fork", INLINE),
        *(Ignored("fork", TWO_WORKERS | {"executor": one}) for one in ("thread", ThreadExecutor(), RayExecutor())),
    ],
    "generator": [
        AsTorch(7),
        AsTorch(7, {"shuffle": True}),
        Ignored(torch.Generator(), {"seed": 0}, r"generator is ignored: seed=0 keys all randomness\. Leave one"),
        Ignored(torch.Generator(), {"seed": 0, "dataset": Numbers()}, "generator is ignored: seed=0"),
    ],
    "prefetch_factor": [
        AsTorch(2),
        AsTorch("2"),
        AsTorch(-1, TWO_WORKERS),
        AsTorch(0, TWO_WORKERS),
        AsTorch("2", TWO_WORKERS, text=r"prefetch_factor='2' is not allowed: expected None or an integer >= 1, got s"),
        AsTorch(1.5, TWO_WORKERS, text=r"prefetch_factor=1\.5 is not allowed"),
        AsTorch(True, {"num_workers": 1}),
        AsTorch(np.int64(3), {"num_workers": 1}),
        Ignored(3, INLINE),
    ],
    "persistent_workers": [AsTorch(True), Ignored(True, INLINE)],
    "pin_memory_device": [AsTorch(""), AsTorch("cuda")],
    "in_order": [AsTorch(""), AsTorch(False), Ignored(False, INLINE)],
    "seed": [
        Wrong(-1, ValueError),
        Wrong(2**64, ValueError),
        *(Wrong(value, TypeError) for value in (1.5, "1", True, [1])),
        Ignored(0, SAMPLER, r"seed is ignored: the sampler or batch_sampler that was passed decides alone"),
        Ignored(1, OWN_BATCHES),
    ],
    "order": [
        Wrong("shuffled", TypeError),
        Wrong([3, 1], TypeError),
        Wrong(Shuffled, TypeError, "order=<class '.*Shuffled'> is not allowed"),
        Wrong(list(range(10**6)), TypeError, r"order=\[0, 1, 2, 3, 4, 5, \.\.\.\] is not allowed"),
        Wrong(Weighted([1.0] * 6), ValueError, r"len\(weights\)=6 is not allowed.*len\(dataset\)=5"),
        Wrong(Sequential(), ValueError, r"order=Sequential\(\) is not allowed", {"dataset": Numbers()}),
        Ignored(Sequential(), SAMPLER),
    ],
    "distributed": [
        *(Wrong(value, TypeError) for value in (2, 0, (0, 2), "yes")),
        Ignored(True, SAMPLER),
        Ignored(World(0, 2), OWN_BATCHES),
    ],
    "tail": [
        *(Wrong(value, ValueError) for value in ("wrap", 3, False)),
        Wrong("pad", ValueError, beside={"drop_last": True}),
        *(Ignored(tail, SAMPLER) for tail in ("pad", "drop", "exact")),
        *(Ignored(tail, {"dataset": Numbers()}, rf"tail='{tail}' is ignored: .*IterableDataset.*distributed=True")
          for tail in ("pad", "drop", "exact")),
        Ignored("exact", {"dataset": Numbers(), "distributed": False}, "tail='exact' is ignored"),
    ],
    "executor": [
        Wrong("threads", ValueError),
        Wrong(3, TypeError),
        Wrong(ProcessExecutor, TypeError, "executor=<class '.*ProcessExecutor'> is not allowed"),
    ],
    "fetch_threads": [
        Wrong(0, ValueError),
        *(Wrong(value, TypeError) for value in (1.5, "2", None, True)),
        Wrong(2, ValueError, beside={"batch_size": None}),
        Wrong(2, ValueError, beside={"dataset": Numbers()}),
    ],
    "on_error": [
        *(Wrong(value, ValueError) for value in ("skip", None, 1)),
        Wrong("replace", ValueError, beside=SAMPLER),
        Wrong("replace", ValueError, beside={"dataset": Numbers()}),
    ],
}  # fmt: skip

PLAN = {"order": Shuffled(), "length": 5}
OTHERS: dict[Callable[..., Any], tuple[dict[str, Any], dict[str, list[Wrong]]]] = {
    Sequential: ({}, {}),
    Shuffled: ({}, {}),
    Subset: (
        {"indices": [1]},
        {
            "indices": [
                Wrong([], ValueError, "indices is empty: expected a non-empty sequence of integers"),
                Wrong([[1], [2]], ValueError, r"indices of shape \(2, 1\) is not allowed: expected a non-empty"),
                Wrong([[1], [2, 3]], ValueError, "indices is not allowed: expected a non-empty sequence"),
                Wrong(5, TypeError),
                Wrong((one for one in [1]), TypeError, "indices=<generator .* is not allowed: .* got generator"),
                Wrong({1, 2}, TypeError, r"indices=\{1, 2\} is not allowed: expected a non-empty sequence"),
                Wrong([1.5], TypeError, "indices of dtype float64 are not allowed"),
                Wrong([True], TypeError, "indices of dtype bool are not allowed"),
                Wrong([3, -1], ValueError, "indices=-1 is not allowed"),
            ],
            "shuffle": [*(Wrong(value, TypeError, f"shuffle={value!r} {FLAG}") for value in ("yes", 1, None))],
        },
    ),
    Weighted: (
        {"weights": [1.0]},
        {
            "weights": [
                Wrong([], ValueError, "weights is empty: expected a non-empty sequence of numbers"),
                Wrong([[1.0]], ValueError, r"weights of shape \(1, 1\) is not allowed"),
                Wrong(1.0, TypeError),
                Wrong(["a"], TypeError, "weights of dtype <U1 are not allowed"),
                Wrong([1.0, -1.0], ValueError, r"weights\[1\]=-1\.0 is not allowed"),
                Wrong([0, 0], ValueError, "weights are all zero: expected at least one weight > 0"),
            ],
            "num_samples": [Wrong(0, ValueError), Wrong(1.5, TypeError), Wrong("3", TypeError)],
        },
    ),
    Balanced: (
        {"labels": [0, 1]},
        {
            "labels": [
                Wrong([], ValueError, "labels is empty: expected a non-empty sequence, one label a sample"),
                Wrong([[0]], ValueError, r"labels of shape \(1, 1\) is not allowed"),
                Wrong(3, TypeError),
                Wrong([0, float("nan")], ValueError, r"labels\[1\]='nan' is not allowed"),
                Wrong([1, "a", object()], TypeError, "labels cannot be put in order"),
            ],
            "length": [Wrong(0, ValueError), Wrong(1.5, TypeError), Wrong("3", TypeError)],
        },
    ),
    InlineExecutor: ({}, {}),
    ThreadExecutor: ({}, {}),
    ProcessExecutor: ({}, {}),
    RayExecutor: (
        {},
        {
            "address": [Wrong(7, TypeError)],
            "num_cpus": [Wrong(-1, ValueError), Wrong("1", TypeError), Wrong(True, TypeError)],
            "resources": [Wrong([1], TypeError), Wrong("gpu", TypeError)],
            "scheduling_strategy": [],  # anything that Ray takes, or will
            "label_selector": [Wrong("zone", TypeError)],
            "runtime_env": [Wrong("env", TypeError)],
            "hedge": [Wrong("yes", TypeError), Wrong(1, TypeError)],
            "shared_memory": [Wrong(None, TypeError)],
            "start_timeout_s": [Wrong(0, ValueError), Wrong("60", TypeError)],
            "idle_s": [Wrong(-1, ValueError), Wrong(float("nan"), ValueError), Wrong(None, TypeError)],
        },
    ),
    World: (
        {},
        {
            "rank": [Wrong(-1, ValueError), Wrong(1, ValueError), Wrong("0", TypeError), Wrong(0.0, TypeError)],
            "size": [Wrong(0, ValueError), Wrong("2", TypeError), Wrong(True, TypeError)],
        },
    ),
    Plan: (
        PLAN,
        {
            "order": [Wrong("shuffled", TypeError), Wrong(None, TypeError)],
            "length": [Wrong(0, ValueError, r"len\(dataset\)=0"), Wrong("5", TypeError, r"len\(dataset\)='5'")],
            "batch_size": [Wrong(0, ValueError), Wrong(None, TypeError)],
            "world": [Wrong((0, 2), TypeError), Wrong(None, TypeError)],
            "tail": [Wrong("wrap", ValueError), Wrong(None, ValueError)],
            "seed": [Wrong(-1, ValueError), Wrong(None, TypeError)],
            "in_runs": [Wrong("yes", TypeError)],
        },
    ),
    Deferred: (
        {"factory": list},
        {
            "factory": [Wrong(7, TypeError), Wrong(lambda one: one, TypeError, "factory=<function .* is not allowed")],
            "length": [Wrong(-1, ValueError), Wrong("5", TypeError)],
            "iterable": [Wrong("yes", TypeError), Wrong(None, TypeError)],
        },
    ),
    PackedList: ({}, {"items": [Wrong(7, TypeError), Wrong(None, TypeError)]}),
}


def cases_of(kind: type) -> list[Any]:
    return [
        pytest.param(name, case, id=f"{name}-{index}")
        for name, cases in LOADER.items()
        for index, case in enumerate(cases)
        if isinstance(case, kind)
    ]


def arguments(dataset: Any = None, **options: Any) -> dict[str, Any]:
    return {"dataset": FakeDataset(5) if dataset is None else dataset, **options}


def test_no_argument_is_missing() -> None:
    assert LOADER.keys() == inspect.signature(DataLoader.__init__).parameters.keys() - {"self"}
    assert all(LOADER.values())
    for made, (_, rows) in OTHERS.items():
        assert list(rows) == list(inspect.signature(made).parameters), made
        assert all(cases for name, cases in rows.items() if name != "scheduling_strategy"), made
    public = [getattr(headrace, name) for name in headrace.__all__]
    kinds = (Order, Executor, World, Plan, Deferred, PackedList)
    made = {one for one in public if isinstance(one, type) and issubclass(one, kinds)} - {Order, Executor}
    assert made == OTHERS.keys()


@pytest.mark.parametrize(("name", "case"), cases_of(Wrong))
def test_a_wrong_argument_of_the_loader(name: str, case: Wrong) -> None:
    with pytest.raises(case.error, match=case.text or re.escape(f"{name}={case.value!r} is not allowed")):
        DataLoader(**arguments(**case.beside) | {name: case.value})


@pytest.mark.parametrize(("name", "case"), cases_of(Ignored))
def test_an_argument_without_effect(name: str, case: Ignored) -> None:
    with pytest.warns(UserWarning, match=case.text or f"^(num_workers, )?{name} is ignored") as told:
        DataLoader(**arguments(**case.beside) | {name: case.value})
    assert len(told) == 1
    assert told[0].filename == __file__
    assert str(told[0].message).endswith(".")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:pin_memory_device")
@pytest.mark.parametrize(("name", "case"), cases_of(AsTorch))
def test_an_argument_that_torch_judges(name: str, case: AsTorch) -> None:
    """Refused by both, headrace perhaps earlier and in more words; or read by both, without a warning."""
    given = (arguments(**case.beside) if name != "dataset" else case.beside) | {name: case.value}
    seen = []
    for loader_class in LOADERS:
        seed_everything()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            seen.append(attempt(lambda loader_class=loader_class: next(iter(loader_class(**given)))))
        assert not [one for one in told if "ignored" in str(one.message)]
    theirs, ours = seen
    if not case.text:
        return same(theirs, ours)
    assert isinstance(theirs, Raised)
    assert (ours.kind, theirs.kind) == (theirs.kind, TypeError)
    with pytest.raises(TypeError, match=case.text):
        DataLoader(**given)
    return None


@pytest.mark.parametrize(
    ("made", "name", "case"),
    [
        pytest.param(made, name, case, id=f"{made.__name__}-{name}-{index}")
        for made, (_, rows) in OTHERS.items()
        for name, cases in rows.items()
        for index, case in enumerate(cases)
    ],
)
def test_a_wrong_argument(made: Callable[..., Any], name: str, case: Wrong) -> None:
    with pytest.raises(case.error, match=case.text or re.escape(f"{name}={case.value!r} is not allowed")):
        made(**OTHERS[made][0] | {name: case.value})


# What is known only when iteration begins.

SPLIT = "distributed=False says that it is meant"
IN_A_WORLD: dict[str, tuple[dict[str, Any], str]] = {
    "a random sampler": ({"sampler": RandomSampler(range(5))}, f"what its RandomSampler draws.*{SPLIT}"),
    "a sequential sampler": ({"sampler": SequentialSampler(range(5))}, "what its SequentialSampler draws"),
    "a subset": ({"sampler": torch.utils.data.SubsetRandomSampler([1])}, "what its SubsetRandomSampler draws"),
    "weights": ({"sampler": torch.utils.data.WeightedRandomSampler([1.0], 1)}, "WeightedRandomSampler draws.*Weighted"),
    "batches": ({"batch_sampler": BatchSampler(RandomSampler(range(5)), 2, False)}, "what its RandomSampler draws"),
    "no batches": ({"sampler": RandomSampler(range(5)), "batch_size": None}, "what its RandomSampler draws"),
    "a stream": ({"dataset": Numbers()}, "an IterableDataset is read as it is on every rank"),
    "a seeded stream": ({"dataset": Numbers(), "seed": 1}, "an IterableDataset is read as it is on every rank"),
    "a generator": ({"generator": torch.Generator()}, "generator is ignored: 2 ranks split the epoch.*Pass seed="),
    "a generator and a dealt stream": (
        {"dataset": Numbers(), "distributed": True, "generator": torch.Generator()},
        "generator is ignored: 2 ranks split the epoch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_A_WORLD)
def test_several_ranks_are_told_once_what_has_no_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, text = IN_A_WORLD[name]
    loader = DataLoader(**arguments(**options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)  # alone there is nothing to tell
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=text) as caught:
        _ = [list(loader) for _ in range(2)]
    told = [one for one in caught if not str(one.message).startswith("RANK=1")]  # there is no group
    assert len(told) == 1
    assert {one.filename for one in caught} == {__file__}


class Unknown(RandomSampler):
    """May split itself."""


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": torch.utils.data.DistributedSampler(range(5), 2, 0)},
        {"sampler": RandomSampler(range(5)), "distributed": False},
        {"sampler": Unknown(range(5))},
        {"sampler": [0, 1]},
        {"batch_sampler": [[0, 1]]},
        {"batch_sampler": BatchSampler(torch.utils.data.DistributedSampler(range(5), 2, 0), 2, False)},
        {"shuffle": True, "generator": torch.Generator(), "distributed": False},
        {"sampler": [0, 1], "generator": torch.Generator()},
        {"shuffle": True, "seed": 1},
        {"order": Weighted([1.0] * 5), "shuffle": True},
        {"order": Subset([1, 2, 3]), "shuffle": True},
        {"order": Subset([1, 2, 3]), "shuffle": False},
        {"order": Sequential(), "shuffle": False},
        {"seed": 0, "worker_init_fn": print, "in_order": False},
        {"executor": "inline", "worker_init_fn": print, "in_order": False},
        {"dataset": range(5), "executor": "thread", "num_workers": 2, "persistent_workers": True, "timeout": 60},
        {"dataset": Numbers(), "distributed": True, "tail": "exact"},
        {"distributed": False, "tail": "exact"},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_what_has_an_effect_is_not_warned_about(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "This DataLoader will create")
        warnings.filterwarnings("ignore", "RANK=1 and WORLD_SIZE=2")  # there is no group
        loader = DataLoader(**arguments(**options))
        list(loader)
        loader._iterator = None
