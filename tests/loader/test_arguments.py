"""Every argument of the loader: what is wrong is refused by name and value, what has no effect is named."""

import inspect
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from headrace import (
    Balanced,
    Budget,
    DataLoader,
    InlineExecutor,
    LengthBucketed,
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
from loader.argument_cases import AsTorch, Case, Ignored, InBulk, Numbers, Unsized, Wrong, arguments
from parity_tools import LOADERS, Raised, attempt, same, seed_everything

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore:This DataLoader will create")]

SAMPLER = {"sampler": [1, 0]}
OWN_BATCHES = {"batch_sampler": [[1, 0]]}
TWO_WORKERS = {"num_workers": 2}
FOUR = {"batch_size": 4}
INLINE = {"executor": "inline", "num_workers": 2}
FOREIGN = ([1], {1}, np.arange(2), torch.ones(2), object())
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
        *(Wrong(value, TypeError, "num_workers=.* is not allowed: expected") for value in FOREIGN[2:4]),
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
        Wrong(LengthBucketed([1] * 6, 2), ValueError, r"len\(lengths\)=6 is not allowed.*len\(dataset\)=5"),
        Wrong(LengthBucketed([1] * 5, 2), ValueError, "batch_size=4 is not allowed.*leave batch_size out", FOUR),
        Ignored(Sequential(), SAMPLER),
    ],
    "epoch_samples": [
        *(Wrong(value, ValueError) for value in (0, -1)),
        *(Wrong(value, TypeError) for value in (1.5, "5", True)),
        Wrong(3, ValueError, r"epoch_samples=3 is not allowed: expected None with an Itera", {"dataset": Numbers()}),
        Wrong(3, ValueError, r"epoch_samples=3 .*Balanced\(labels, length=", {"order": Balanced([0, 1, 0, 1, 0])}),
        Wrong(3, ValueError, beside={"order": LengthBucketed([1] * 5, 2)}),
        Ignored(3, SAMPLER),
    ],
    "distributed": [
        *(Wrong(value, TypeError) for value in (2, 0, (0, 2), "yes")),
        Ignored(True, SAMPLER),
        Ignored(World(0, 2), OWN_BATCHES),
    ],
    "tail": [
        *(Wrong(value, ValueError, r"^tail=.* is not allowed: expected") for value in FOREIGN),
        *(Wrong(value, ValueError) for value in ("wrap", 3, False)),
        Wrong("pad", ValueError, beside={"drop_last": True}),
        *(Ignored(tail, SAMPLER) for tail in ("pad", "drop", "exact")),
        *(Ignored(tail, {"dataset": Numbers()}, rf"tail='{tail}' is ignored: .*IterableDataset.*distributed=True")
          for tail in ("pad", "drop", "exact")),
        Ignored("exact", {"dataset": Numbers(), "distributed": False}, "tail='exact' is ignored"),
    ],
    "executor": [
        *(Wrong(value, TypeError, r"^executor=.* is not allowed: expected") for value in FOREIGN),
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
        *(Wrong(value, ValueError, r"^on_error=.* is not allowed: expected") for value in FOREIGN),
        *(Wrong(value, ValueError) for value in ("skip", None, 1)),
        Wrong("replace", ValueError, beside=SAMPLER),
        Wrong("replace", ValueError, beside={"dataset": Numbers()}),
    ],
    "device": [
        *(Wrong(value, ValueError) for value in ("quatsch", "cuda:99", "meta", "")),
        *(Wrong(value, TypeError) for value in (3, ["cpu"])),
    ],
    "device_prefetch": [
        Wrong(-1, ValueError),
        *(Wrong(value, TypeError) for value in (1.5, "2", None, True)),
        Ignored(2, {}, r"device_prefetch=2 is ignored: there is no device\. Pass device="),
    ],
    "max_prefetch_bytes": [
        *(Wrong(value, ValueError) for value in (0, -1)),
        *(Wrong(value, TypeError) for value in (1.5, "1GB", True)),
        Ignored(100, {}, r"max_prefetch_bytes=100 is ignored: nothing is computed in advance"),
        Ignored(Budget(7), INLINE, "num_workers, max_prefetch_bytes is ignored"),
    ],
    "max_workers": [
        *(Wrong(value, ValueError, r"max_workers=.* expected an integer >= 2. num_workers= is the smallest",
                TWO_WORKERS | {"seed": 1}) for value in (0, -1, 1)),
        *(Wrong(value, TypeError, beside=TWO_WORKERS | {"seed": 1}) for value in (1.5, "2", True)),
        Wrong(4, ValueError, r"max_workers= is not allowed: this loader follows no plan .*Pass seed=", TWO_WORKERS),
        Wrong(4, ValueError, r"max_workers= is not allowed with InlineExecutor\(\): only local processes", {"seed": 1}),
        Wrong(4, ValueError, r"max_workers= is not allowed with ThreadExecutor",
              TWO_WORKERS | {"seed": 1, "executor": "thread"}),
        Wrong(4, ValueError, "max_workers= is not allowed: this loader follows no plan", TWO_WORKERS | SAMPLER),
        Wrong(4, ValueError, "max_workers= is not allowed: this loader follows no plan",
              TWO_WORKERS | {"dataset": Numbers(), "seed": 1}),
    ],
}  # fmt: skip


def cases_of(kind: type) -> list[Any]:
    return [
        pytest.param(name, case, id=f"{name}-{index}")
        for name, cases in LOADER.items()
        for index, case in enumerate(cases)
        if isinstance(case, kind)
    ]


def test_no_argument_is_missing() -> None:
    assert LOADER.keys() == inspect.signature(DataLoader.__init__).parameters.keys() - {"self"}
    assert all(LOADER.values())


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
