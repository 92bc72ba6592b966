"""With torch's arguments the batches are torch's, to the last bit, and so is every draw from the global generators."""

import os
from functools import partial
from multiprocessing.resource_sharer import DupFd
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import parity_datasets as data
from parity_tools import (
    LOADERS,
    abandoned,
    assert_parity,
    interleaved,
    name_of,
    observe,
    one_epoch,
    pairwise,
    same,
    three_epochs,
    two_epochs,
)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def _sharing_has_begun():
    """Start multiprocessing's listener: torch sends index tensors to workers through it, and never stops it."""
    with open(os.devnull) as file:
        DupFd(file.fileno())


USES = {"two epochs": two_epochs, "three epochs": three_epochs, "abandoned": abandoned, "interleaved": interleaved}
BATCHING: dict[Any, dict[str, Any]] = {
    "unbatched": {"batch_size": None},
    "default": {},
    "by 5": {"batch_size": 5},
    "by 6": {"batch_size": 6},
    "by 6 dropping": {"batch_size": 6, "drop_last": True},
    "theirs": {},
}
BATCH_SAMPLERS = ("batch sampler", "lists", "uneven")
WORKERS = {
    "workers": (1, 2, 0),
    "generator": (False, True),
    "persistent": (False, True),
    "prefetch": (None, 1, 4),
    "init": (False, True),
    "use": tuple(USES),
}
MAP_FACTORS = {
    "source": (
        *("sequential", "shuffle", "list", "lazy", "eager", "tensors", "weighted", "subset", "replacement"),
        *BATCH_SAMPLERS,
    ),
    "batching": tuple(BATCHING),
    "dataset": tuple(data.MAP_STYLE),
    "collate": tuple(data.COLLATE),
    **WORKERS,
}
STREAM_FACTORS = {
    "dataset": tuple(data.ITERABLE),
    "batching": ("unbatched", "default", "by 5", "by 6", "by 6 dropping"),
    "collate": ("default", "dict", "drawn"),
    **WORKERS,
    "workers": (1, 2, 3, 0),
}


def source(name: str, generator: torch.Generator | None) -> dict[str, Any]:
    match name:
        case "sequential":
            return {"shuffle": False}
        case "shuffle":
            return {"shuffle": True}
        case "list":
            return {"sampler": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]}
        case "lazy":
            return {"sampler": data.Lazy()}
        case "eager":
            return {"sampler": data.Eager()}
        case "tensors":
            return {"sampler": data.Tensors()}
        case "weighted":
            weights = [1.0 + number % 3 for number in range(data.LENGTH)]
            return {"sampler": WeightedRandomSampler(weights, 17, generator=generator)}
        case "subset":
            return {"sampler": SubsetRandomSampler(range(3, 17), generator)}
        case "replacement":
            return {"sampler": RandomSampler(range(data.LENGTH), True, 23, generator)}
        case "batch sampler":
            return {"batch_sampler": BatchSampler(RandomSampler(range(data.LENGTH)), 6, True)}
        case "lists":
            return {"batch_sampler": [[0, 1, 2], [3, 4, 5], [3, 3, 3], [19, 0, 7]]}
        case _:
            return {"batch_sampler": data.UnevenBatches()}


def allowed(cell: Any) -> bool:
    if {"source", "batching"} <= cell.keys() and (cell["source"] in BATCH_SAMPLERS) != (cell["batching"] == "theirs"):
        return False
    return cell.get("workers") != 0 or not (cell.get("persistent") or cell.get("prefetch") or cell.get("init"))


def make(cell: dict[str, Any], loader_class: Any, **more: Any) -> Any:
    generator = torch.Generator().manual_seed(5) if cell["generator"] else None
    stream = "source" not in cell
    dataset = (data.ITERABLE if stream else data.MAP_STYLE)[cell["dataset"]]()
    init = data.cut_stream if cell["dataset"] == "cut by init" else data.reseed_and_mutate
    return loader_class(
        dataset,
        **({} if stream else source(cell["source"], generator)),
        **BATCHING[cell["batching"]],
        collate_fn=data.COLLATE[cell["collate"]],
        num_workers=cell["workers"],
        generator=generator,
        persistent_workers=cell["persistent"],
        prefetch_factor=cell["prefetch"],
        worker_init_fn=init if cell["init"] else None,
        **more,
    )


@pytest.mark.parametrize("cell", pairwise(MAP_FACTORS, allowed), ids=name_of)
def test_map_style(cell):
    result = assert_parity(partial(make, cell), USES[cell["use"]])
    assert any(isinstance(part, list) and part for part in result)


@pytest.mark.parametrize("cell", pairwise(STREAM_FACTORS, allowed), ids=name_of)
def test_iterable(cell):
    assert assert_parity(partial(make, cell), USES[cell["use"]])


AFRESH = [
    ("spawn", "lazy", "by 6", "drawing", "drawn", 2, 1),
    ("forkserver", "uneven", "theirs", "mixed", "default", 1, 4),
    ("forkserver", "shuffle", "unbatched", "bulk", "custom", 1, 2),
    ("spawn", None, "by 5", "sized", "default", 2, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("start_method", "source", "batching", "dataset", "collate", "workers", "prefetch"), AFRESH)
def test_workers_that_start_afresh(start_method, source, batching, dataset, collate, workers, prefetch):
    cell = {
        **({} if source is None else {"source": source}),
        **{"batching": batching, "dataset": dataset, "collate": collate, "workers": workers, "prefetch": prefetch},
        **{"generator": True, "persistent": True, "init": source is not None},
    }
    assert assert_parity(partial(make, cell, multiprocessing_context=start_method), two_epochs)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_tensors_of_every_kind(workers):
    assert_parity(lambda cls: cls(data.Exotic(5), 2, num_workers=workers, collate_fn=data.keep), one_epoch)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_shares_memory_as_it_did(workers):
    def use(loader):
        whole, part = next(iter(loader))
        whole.fill_(7)
        return part

    part = assert_parity(lambda cls: cls([0], num_workers=workers, collate_fn=whole_and_part), use)
    assert part.tolist() == [7.0, 7.0]


def whole_and_part(batch):
    whole = torch.zeros(4)
    return whole, whole[:2]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("value", [None, ValueError("a sample"), (), "", StopIteration(), {}], ids=repr)
def test_any_object_may_be_a_batch(value, workers):
    def use(loader):
        return [(type(batch), getattr(batch, "args", batch)) for batch in loader]

    result = assert_parity(lambda cls: cls([value] * 3, batch_size=None, num_workers=workers), use)
    assert len(result) == 3


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("dataset", [data.Plain, data.Bulk, data.Sharded])
def test_out_of_order_is_the_same_multiset(dataset, workers):
    def use(loader):
        return [sorted(loader), sorted(loader)]

    assert_parity(lambda cls: cls(dataset(23), 3, num_workers=workers, in_order=False, collate_fn=data.to_number), use)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_dataset_may_grow_between_epochs(workers):
    def use(loader):
        seen = one_epoch(loader)
        loader.dataset.grow()
        return [seen, one_epoch(loader)]

    assert_parity(lambda cls: cls(data.Growing(), 6, shuffle=True, num_workers=workers), use)


def test_the_samplers_draw_what_torchs_draw():
    def use(loader):
        return [list(loader.sampler), list(loader.batch_sampler), list(loader.sampler)]

    for generator in (None, torch.Generator()):
        assert_parity(
            lambda cls, given=generator: cls(range(9), 2, shuffle=True, generator=given and given.manual_seed(1)), use
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_attributes_set_later_take_effect(workers):
    def use(loader):
        seen = list(loader)
        loader.collate_fn = data.to_drawn
        loader.generator = torch.Generator().manual_seed(3)
        loader.num_workers = 2 - workers
        loader.prefetch_factor = None if workers else 3
        return [seen, list(loader)]

    assert_parity(lambda cls: cls(data.Drawing(), 6, shuffle=True, num_workers=workers), use)


@pytest.mark.parametrize("workers", [0, 2])
def test_draws_between_iter_and_next(workers):
    """The dataset's own iterator is made when torch makes it: what it draws then, it draws then."""

    def use(loader):
        iterator = iter(loader)
        torch.rand(3)
        return list(iterator)

    assert_parity(lambda cls: cls(EagerStream(), 2, num_workers=workers), use)
    assert_parity(lambda cls: cls(data.Drawing(), 2, sampler=data.Eager(), num_workers=workers), use)


class EagerStream(data.Stream):
    def __iter__(self):
        return iter(torch.randperm(self.length).tolist())


def test_the_pairs_are_covered_and_the_comparison_can_fail():
    cells = pairwise(MAP_FACTORS, allowed)
    assert {(cell["source"], cell["workers"]) for cell in cells} == {
        (source, workers) for source in MAP_FACTORS["source"] for workers in MAP_FACTORS["workers"]
    }
    shuffled = observe(lambda cls: cls(data.Drawing(), shuffle=True), two_epochs, LOADERS[1])
    seeded = observe(lambda cls: cls(data.Drawing(), shuffle=True, seed=1), two_epochs, LOADERS[1])
    with pytest.raises(AssertionError):
        same(shuffled, seeded)
    for one, other in ([1, True], [(1,), [1]], [0.0, -0.0], [torch.zeros(2), torch.zeros(2, 1)], [b"a", b"b"]):
        with pytest.raises(AssertionError):
            same(one, other)
