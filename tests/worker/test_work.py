"""What a worker draws, and how it fails: each sample's random numbers are its position's, each error names samples."""

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from headrace import DataLoader
from headrace.plan import Plan, Shuffled
from headrace.plan.keys import sample_seeds
from headrace.randomness import callers_generators_kept, seed_from_words
from headrace.types import PlanTask, World
from headrace.worker.work import Work
from headrace.worker.worker import Worker


class Drawing(Dataset[tuple[Any, ...]]):
    """Each sample is its index, and a number of each global generator."""

    def __len__(self) -> int:
        return 1500

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return index, torch.rand(()).item(), random.random(), np.random.rand()


def listed(samples: list[Any]) -> list[Any]:
    return samples


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.data(), st.sampled_from([1, 3, 7, 300]), st.sampled_from([1, 4, 100]), st.integers(0, 2))
def test_whatever_was_computed_before(data: st.DataObject, batch_size: int, workers: int, rank: int) -> None:
    """Seeds are worked out for many samples at a time: the next step, one long after, one before, another epoch's."""
    plan = Plan(Shuffled(), 1500, batch_size, World(rank, 3), tail="exact", seed=5)
    cursors = st.sampled_from([0, 3 * batch_size])
    tasks = st.builds(PlanTask, st.integers(0, 1), st.integers(0, plan.steps(0, 3 * batch_size) - 1), cursors)
    runs = st.lists(st.tuples(tasks, st.integers(1, 300 // batch_size)), min_size=1, max_size=3)
    worker = Worker(Work(Drawing(), listed, batched=True, plan=plan), 0, workers)
    for task, count in data.draw(runs):
        for step in range(task.step, min(task.step + count, plan.steps(0, task.cursor))):
            with callers_generators_kept():
                samples = worker.run(task._replace(step=step))
                positions = plan.positions(task.epoch, step, task.cursor)
                indices = plan.indices(task.epoch, positions).tolist()
                assert [one[0] for one in samples] == indices
                for position, sample in zip(positions.tolist(), samples, strict=True):
                    seed_from_words(sample_seeds(5, task.epoch, [position])[0])
                    assert sample[1:] == (torch.rand(()).item(), random.random(), np.random.rand())


@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_last_step_has_its_own_samples_only(batch_size: int) -> None:
    plan = Plan(Shuffled(), 12, batch_size, tail="exact", seed=5)
    worker = Worker(Work(Drawing(), listed, batched=True, plan=plan))
    with callers_generators_kept():
        batches = [worker.run(PlanTask(0, step)) for step in range(plan.steps(0))]
    assert [len(batch) for batch in batches] == [plan.size(0, step) for step in range(plan.steps(0))]
    assert len({sample[1] for batch in batches for sample in batch}) == 12


TENSOR = torch.zeros(2)
NO_TYPE = "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found <class 'NoneType'>"
NO_TENSOR = "expected Tensor as element 1 in argument 0, but got NoneType"


@pytest.mark.parametrize(
    ("samples", "error", "text", "named"),
    [
        ([None, None], TypeError, NO_TYPE, [0, 1]),
        ([None, TENSOR], TypeError, NO_TYPE, [0]),
        ([TENSOR, None], TypeError, NO_TENSOR, [1]),
        ([(1, TENSOR), (2, None)], TypeError, NO_TENSOR, [1]),
        ([{"image": TENSOR}, {"image": None}], TypeError, NO_TENSOR, [1]),
        ([(1, TENSOR), None], TypeError, "object of type 'NoneType' has no len()", [1]),
        ([1, None], RuntimeError, "Could not infer dtype of NoneType", [1]),
        ([TENSOR, 1.0], TypeError, "expected Tensor as element 1 in argument 0, but got float", []),
        ([TENSOR, torch.zeros(3)], RuntimeError, "stack expects each tensor to be equal size", []),
    ],
    ids=repr,
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_collated_is_torchs_error_and_names_its_samples(
    samples: list[Any], error: type[Exception], text: str, named: list[int], workers: int
) -> None:
    """In the words that torch's collation has in the rank's own process, wherever a plan's batch is computed."""
    with pytest.raises(error, match=re.escape(text)) as caught:
        list(DataLoader(samples, batch_size=2, seed=1, num_workers=workers))
    notes = [line for line in caught.value.__notes__ if "None cannot be collated" in line]
    assert notes == ([f"headrace: None cannot be collated: samples {named} are None, or hold it"] if named else [])


class Short(Dataset[int]):
    """Ten samples, it says; there is no more after the third."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise StopIteration
        return index


@pytest.mark.parametrize("options", [{}, {"sampler": range(10)}], ids=["parity", "sampler"])
@pytest.mark.parametrize("cell", [{}, {"num_workers": 1}, {"num_workers": 1, "batch_size": None}], ids=str)
def test_a_dataset_that_ends_an_epoch_early_is_told_of(options: dict[str, Any], cell: dict[str, Any]) -> None:
    """Torch's loader ends there in silence; under a plan it is an error."""
    loader = DataLoader(Short(), **{"batch_size": 2} | options | cell)
    with pytest.warns(UserWarning, match=r"raised StopIteration while fetching sample 3, which ends the epoch") as told:
        batches = list(loader)
    assert len([one for one in told if one.category is UserWarning]) == 1
    assert len(batches) == (3 if "batch_size" in cell else 1)
