"""What is asked for and staged in advance: for a device, over the end of an epoch, and within a budget."""

import copy
import multiprocessing
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as Torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from accelerators import ThreadBackend
from headrace import Budget, DataLoader, DeliveryTimeout, prefetch_to_device
from headrace.delivery.device import backends
from headrace.testing import FakeDataset, ManualExecutor, ManualPool
from headrace.types import PlanTask
from waiting import wait_for_reapers

TOO_SLOW = "ignore:This DataLoader will create"


def made(length: int = 12, **options: Any) -> tuple[DataLoader[Any], ManualExecutor]:
    """A loader over single samples whose batches the test completes."""
    executor = ManualExecutor()
    options = {"num_workers": 2, "prefetch_factor": 2, "batch_size": None, "seed": 0} | options
    return DataLoader(options.pop("dataset", FakeDataset(length)), executor=executor, **options), executor


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> list[ThreadBackend]:
    """The accelerators that were made in the place of the CPU."""
    found: list[ThreadBackend] = []

    def make(device: torch.device) -> ThreadBackend:
        found.append(ThreadBackend(device))
        return found[-1]

    monkeypatch.setitem(backends.BACKENDS, "cpu", make)
    return found


# For a device.


def test_what_is_done_is_copied_ahead_and_nothing_waits_for_more(accelerator: list[ThreadBackend]) -> None:
    loader, executor = made(dataset=TensorDataset(torch.arange(12)), device="cpu", device_prefetch=2)
    reader = iter(loader)
    (pool,), (backend,) = executor.pools, accelerator
    pool.complete(0)
    assert next(reader)[0] == 0
    assert backend.copies == 1, "the second batch is not done"
    for number in range(1, 5):
        pool.complete(number)
    assert next(reader)[0] == 1
    assert backend.copies == 4, "two are copied ahead, the fifth is not"
    assert len(pool.submitted) == 8, "their places in the window are taken by others"
    assert loader.state_dict()["samples"] == 2, "what lies staged was not handed over"
    assert loader.stats().batches == 2


def test_an_error_behind_a_staged_batch_comes_in_its_turn(accelerator: list[ThreadBackend]) -> None:
    loader, executor = made(device="cpu")
    reader = iter(loader)
    (pool,) = executor.pools
    pool.complete(0)
    pool.complete(1, error=ValueError("broken"))
    pool.complete(2)
    assert next(reader)["index"] == 0
    with pytest.raises(ValueError, match="broken"):
        next(reader)
    assert next(reader)["index"] == 2


def test_a_batch_that_could_not_be_handed_over_comes_again(
    accelerator: list[ThreadBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, executor = made(device="cpu")
    reader = iter(loader)
    (pool,) = executor.pools
    pool.complete(0)
    with monkeypatch.context() as patch:
        patch.setattr(ThreadBackend, "wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(ThreadBackend, "current_stream", lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError):
            next(reader)
    assert loader.state_dict()["samples"] == 0
    assert next(reader)["index"] == 0
    assert loader.state_dict()["samples"] == 1


def test_work_in_the_callers_thread_is_not_ahead(accelerator: list[ThreadBackend]) -> None:
    asked: list[int] = []

    class Noted(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            asked.append(index)
            return torch.tensor(index)

    reader = iter(DataLoader(Noted(), device="cpu", device_prefetch=3))
    assert next(reader) == 0
    assert asked == [0]


def test_the_slots_of_workers_are_pinned_once_and_let_go_before_they_are_unmapped(
    accelerator: list[ThreadBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = type(ThreadBackend.locks)()
    monkeypatch.setattr(ThreadBackend, "locks", locks)
    data = torch.arange(40.0).repeat_interleave(10_000).reshape(40, 10_000)
    loader = DataLoader(TensorDataset(data), 4, num_workers=1, multiprocessing_context="fork", device="cpu")
    found = torch.cat([batch for (batch,) in loader])
    assert torch.equal(found, data)
    assert 1 <= locks.registered <= 6, "not once a batch"
    del loader
    wait_for_reapers()  # which unmap them
    assert locks.held == {}


def test_a_refusal_to_pin_is_said_once(accelerator: list[ThreadBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, size: int) -> None:
        raise RuntimeError("out of locked memory")

    monkeypatch.setattr(ThreadBackend.locks, "register", refuse)
    data = torch.zeros(8, 50_000)
    loader = DataLoader(TensorDataset(data), 1, num_workers=1, multiprocessing_context="fork", device="cpu", seed=0)
    with pytest.warns(UserWarning, match="cannot be registered as pinned .out of locked memory.*ulimit -l") as caught:
        batches = [*loader, *loader]
    assert len(caught) == 1
    assert len(batches) == 16


def test_the_user_may_hold_batches_while_others_are_copied(accelerator: list[ThreadBackend]) -> None:
    data = torch.arange(30.0).repeat_interleave(8_000).reshape(30, 8_000)
    loader = DataLoader(TensorDataset(data), 2, num_workers=2, multiprocessing_context="fork", device="cpu")
    reader, kept = iter(loader), []
    for _ in range(9):
        kept.append(next(reader)[0])
    del reader
    assert torch.equal(torch.cat(kept), data[:18])


def test_prefetch_to_device_gives_an_iterables_batches(accelerator: list[ThreadBackend]) -> None:
    loader = Torch(TensorDataset(torch.arange(10)), 3)
    batches = prefetch_to_device(loader, "cpu", 2)
    assert len(batches) == 4  # type: ignore[arg-type]
    for _ in range(2):
        assert [batch.tolist() for (batch,) in batches] == [batch.tolist() for (batch,) in loader]


def test_prefetch_to_device_raises_errors_in_their_turn(accelerator: list[ThreadBackend]) -> None:
    def broken() -> Any:
        yield torch.tensor(0)
        yield torch.tensor(1)
        raise ValueError("broken")

    reader = iter(prefetch_to_device(broken(), "cpu", 5))
    assert [next(reader), next(reader)] == [0, 1]
    with pytest.raises(ValueError, match="broken"):
        next(reader)


def test_prefetch_to_device_goes_on_after_an_error(accelerator: list[ThreadBackend], monkeypatch: Any) -> None:
    reader = iter(prefetch_to_device([torch.tensor(number) for number in range(4)], "cpu"))
    assert next(reader) == 0
    with monkeypatch.context() as patch:
        patch.setattr(ThreadBackend, "current_stream", lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError):
            next(reader)
    assert [*reader] == [1, 2, 3]


def test_warnings_come_without_workers_too(accelerator: list[ThreadBackend], monkeypatch: Any) -> None:
    def copy(self: ThreadBackend, tensor: torch.Tensor) -> torch.Tensor:
        if self._current is not None:
            raise torch.OutOfMemoryError("full")
        return tensor.clone()

    monkeypatch.setattr(ThreadBackend, "copy", copy)
    with pytest.warns(UserWarning, match="memory on cpu ran out") as caught:
        assert (
            torch.cat([batch for (batch,) in DataLoader(TensorDataset(torch.arange(6)), 2, device="cpu")]).sum() == 15
        )
    assert len(caught) == 1


def test_what_cannot_be_marked_as_used_is_copied_when_it_is_handed_over(accelerator: list[ThreadBackend]) -> None:
    data = [torch.eye(3).to_sparse() * number for number in range(5)]
    batches = [*DataLoader(data, None, device="cpu", num_workers=1, seed=0)]
    assert [batch.to_dense().sum() for batch in batches] == [0, 3, 6, 9, 12]


def test_a_tensor_that_comes_twice_is_copied_once(accelerator: list[ThreadBackend]) -> None:
    data = torch.zeros(3)
    ((one, other),) = prefetch_to_device([(data, data)], "cpu")
    assert one is other
    assert one is not data


class Lazy(Sequence[torch.Tensor]):
    """It makes its tensors when it is asked for them."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, at: Any) -> torch.Tensor:
        if at >= 3:
            raise IndexError
        return torch.full((2,), at)


def test_tensors_that_are_made_meanwhile_are_told_apart(accelerator: list[ThreadBackend]) -> None:
    (batch,) = prefetch_to_device([[Lazy(), Lazy()]], "cpu")
    assert [[one.tolist() for one in half] for half in batch] == [[[0, 0], [1, 1], [2, 2]]] * 2


def test_on_the_cpu_nothing_is_done() -> None:
    batches = [torch.zeros(2)]
    assert next(iter(prefetch_to_device(batches, "cpu"))) is batches[0]
    loader = DataLoader(TensorDataset(torch.zeros(2)), device="cpu")
    iter(loader)
    assert loader._transfer is None


# Over the end of an epoch.


def run(reader: Any, pool: ManualPool, first: int, count: int) -> None:
    for number in range(first, first + count):
        pool.complete(number)
        next(reader)


def tasks(pool: ManualPool) -> list[Any]:
    return [task for task, _ in pool.submitted]


def test_the_next_epoch_begins_while_the_last_batches_are_read() -> None:
    loader, executor = made(6, persistent_workers=True)
    reader = iter(loader)
    (pool,) = executor.pools
    run(reader, pool, 0, 4)
    assert len(pool.submitted) == 8, "at most one window"
    assert tasks(pool)[6:] == [PlanTask(1, 0), PlanTask(1, 1)]
    run(reader, pool, 4, 2)
    assert next(reader, None) is None
    assert len(pool.submitted) == 10
    assert loader.stats().batches == 6
    reader = iter(loader)
    assert len(pool.submitted) == 10, "they are the first of this epoch"
    run(reader, pool, 6, 1)
    assert len(pool.submitted) == 11
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("what", ["set_epoch", "load_state_dict", "abandoned"])
def test_what_was_computed_for_another_epoch_is_thrown_away(what: str) -> None:
    loader, executor = made(6, persistent_workers=True)
    reader = iter(loader)
    (pool,) = executor.pools
    state = loader.state_dict()
    run(reader, pool, 0, 5)
    assert tasks(pool)[6:] == [PlanTask(1, 0), PlanTask(1, 1), PlanTask(1, 2)]
    expected = PlanTask(0, 0)
    if what == "set_epoch":
        loader.set_epoch(3)
        expected = PlanTask(3, 0)
    elif what == "load_state_dict":
        loader.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an epoch was abandoned
        reader = iter(loader)
        assert tasks(pool)[9] == expected
        pool.complete(9)
        next(reader)
    assert loader.state_dict()["epoch"] == expected.epoch


def test_an_epoch_that_is_set_before_its_first_batch_is_read() -> None:
    """Lightning sets it after `iter()`."""
    loader, executor = made(6, persistent_workers=True)
    reader = iter(loader)
    (pool,) = executor.pools
    run(reader, pool, 0, 6)
    assert next(reader, None) is None
    reader = iter(loader)
    loader.set_epoch(1)
    run(reader, pool, 6, 1)
    assert len(pool.submitted) == 11
    loader.set_epoch(7)
    reader = iter(loader)
    pool.complete(11)
    assert tasks(pool)[11] == PlanTask(7, 0)


class WithEpoch(FakeDataset):
    def set_epoch(self, epoch: int) -> None:
        """Set what the samples are made of."""


class Told(FakeDataset):
    """It can be told something through shared memory."""

    def __init__(self, length: int, shared: Any) -> None:
        super().__init__(length)
        self.shared = shared


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": WithEpoch(6)},
        {"dataset": Subset(WithEpoch(9), range(6))},
        {"dataset": Told(6, torch.zeros(1).share_memory_())},
        {"dataset": Told(6, [multiprocessing.Value("i", 0)])},
        {"persistent_workers": False},
    ],
    ids=["set_epoch", "of a part", "a shared tensor", "a shared value", "workers that end"],
)
def test_where_it_could_be_another_nothing_is_computed(options: dict[str, Any]) -> None:
    loader, executor = made(6, **({"persistent_workers": True} | options))
    reader = iter(loader)
    (pool,) = executor.pools
    run(reader, pool, 0, 6)
    assert next(reader, None) is None
    assert len(pool.submitted) == 6


@pytest.mark.filterwarnings(TOO_SLOW)
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_no_bit_changes(start: str) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5}
    workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": start}
    expected, found = DataLoader(FakeDataset(10), **options), DataLoader(FakeDataset(10), **options, **workers)
    for epoch in (0, 1, 2, 6, 7, 3):
        for loader in (expected, found):
            if epoch in (6, 3):
                loader.set_epoch(epoch)
        for one, other in zip(expected, found, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


# Within a budget.


class Sized(Dataset[torch.Tensor]):
    """Sample n has sizes[n] bytes."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sizes[index],), index, dtype=torch.uint8)


def outstanding(pool: ManualPool, taken: int) -> int:
    return len(pool.submitted) - taken


def test_the_budget_bounds_what_is_asked_for_by_the_largest_batch_of_late() -> None:
    loader, executor = made(dataset=Sized(*[100] * 4, 800, *[100] * 200), max_prefetch_bytes=400, prefetch_factor=4)
    reader = iter(loader)
    (pool,) = executor.pools
    assert outstanding(pool, 0) == 1, "the first batch is asked for alone"
    for taken in range(4):
        run(reader, pool, taken, 1)
        expected = 2 if taken > 1 else 1  # 3 x 112.5 bytes fit, with the one that is handed over
        assert outstanding(pool, taken + 1) == expected
    run(reader, pool, 4, 2)
    for taken in range(6, 133):
        assert outstanding(pool, taken) == 0, "a batch as large as the largest does not fit beside another"
        with pytest.raises(DeliveryTimeout):
            next(reader)
        assert outstanding(pool, taken) == 1, "the one that is waited for"
        run(reader, pool, taken, 1)
    assert loader.stats().held_back > 100
    for taken in range(133, 140):
        pool.complete(taken)
        next(reader)
    assert outstanding(pool, 140) == 2, "that large one was long ago"


def test_loaders_share_a_budget_in_equal_parts() -> None:
    budget = Budget(1200)
    one, executor = made(dataset=Sized(*[100] * 20), max_prefetch_bytes=budget, prefetch_factor=5)
    reader = iter(one)
    one._share._most = 99
    (pool,) = executor.pools
    run(reader, pool, 0, 1)
    assert outstanding(pool, 1) == 9
    other, _ = made(dataset=Sized(*[100] * 20), max_prefetch_bytes=budget)
    run(reader, pool, 1, 1)
    assert outstanding(pool, 2) == 9, "the other is not read yet"
    iter(other)
    run(reader, pool, 2, 6)
    assert outstanding(pool, 8) == 4
    del other
    run(reader, pool, 8, 1)
    assert outstanding(pool, 9) == 9


def test_loaders_share_cpus() -> None:
    budget = Budget(10**6, cpus=3)
    train, executor = made(dataset=Sized(*[100] * 20), max_prefetch_bytes=budget, prefetch_factor=4)
    training = iter(train)
    train._share._most = 99
    (pool,) = executor.pools
    run(training, pool, 0, 1)
    assert outstanding(pool, 1) == 3
    evaluation, executor = made(dataset=Sized(*[100] * 20), max_prefetch_bytes=budget, prefetch_factor=4)
    evaluating = iter(evaluation)
    evaluation._share._most = 99
    (other,) = executor.pools
    assert outstanding(other, 0) == 1, "one is always allowed"
    run(evaluating, other, 0, 1)
    assert outstanding(other, 1) == 3, "what the other asked for before is computed by now"
    run(training, pool, 1, 1)
    assert outstanding(pool, 2) == 2, "both are read"
    run(evaluating, other, 1, 1)
    assert outstanding(other, 2) == 2


def test_copies_of_a_loader_share_its_budget() -> None:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "seed": 0}
    loader = DataLoader(Sized(*[100] * 6), max_prefetch_bytes=Budget(400), **options)
    iter(loader)
    copied = copy.deepcopy(loader)
    assert copied.max_prefetch_bytes is loader.max_prefetch_bytes
    assert copied._share is None
    iter(copied)
    assert loader._share._budget.part_bytes() == 200
    assert pickle.loads(pickle.dumps(loader.max_prefetch_bytes)).part_bytes() == 400


def test_two_readers_of_a_loader_have_one_share() -> None:
    loader, executor = made(dataset=Sized(*[100] * 20), max_prefetch_bytes=400, persistent_workers=True)
    reader = iter(loader)
    loader._share._most = 99
    (pool,) = executor.pools
    run(reader, pool, 0, 1)
    assert outstanding(pool, 1) == 2
    iter(loader)
    assert outstanding(pool, 1) == 3


def test_the_limit_is_not_reached_where_it_is_large() -> None:
    loader, executor = made(12, max_prefetch_bytes=10**12)
    reader = iter(loader)
    run(reader, executor.pools[0], 0, 12)
    assert loader.stats().held_back == 0


@dataclass
class Batch:
    data: torch.Tensor


@pytest.mark.parametrize("form", [Batch, lambda data: data.to_sparse(), lambda data: {"a": [data]}])
def test_threads_keep_a_budget_of_batches_of_any_form(form: Any) -> None:
    data = [torch.ones(1000, dtype=torch.float32)] * 8
    loader = DataLoader(
        data,
        1,
        num_workers=2,
        executor="thread",
        collate_fn=lambda batch: form(batch[0]),
        max_prefetch_bytes=9000,
        prefetch_factor=4,
    )
    assert len([*loader]) == 8
    assert [*loader._share._sizes] == [4000] * 8


def test_the_next_epoch_counts_too() -> None:
    loader, executor = made(dataset=Sized(*[100] * 6), max_prefetch_bytes=400, persistent_workers=True)
    reader = iter(loader)
    (pool,) = executor.pools
    for number in range(6):
        pool.complete(number)
        next(reader)
    assert next(reader, None) is None
    assert outstanding(pool, 6) == 3


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize("options", [{"seed": 0}, {"sampler": range(10)}, {}])
@pytest.mark.filterwarnings(TOO_SLOW, "ignore:seed is ignored")
def test_every_kind_of_loader_keeps_a_budget(options: dict[str, Any]) -> None:
    for dataset in (Sized(*[20_000] * 10), Numbers()):
        if isinstance(dataset, Numbers) and "sampler" in options:
            continue
        for workers in (1, 2):
            limits: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"}
            loader = DataLoader(dataset, 1, **options, **limits, max_prefetch_bytes=1)
            assert len([*loader]) == (10 if isinstance(dataset, Sized) else 10 * workers)


def test_a_budget_is_copied_for_other_loaders() -> None:
    budget = Budget(5, 2)
    assert repr(budget) == "Budget(5, cpus=2)"
    assert repr(Budget(*budget.__reduce__()[1])) == repr(budget)


def test_what_functions_refuse() -> None:
    for call, error, text in (
        (lambda: Budget(0), ValueError, "max_bytes=0 is not allowed"),
        (lambda: Budget(1, cpus=0), ValueError, "cpus=0 is not allowed"),
        (lambda: prefetch_to_device(3, "cpu"), TypeError, "iterable=3 is not allowed"),
        (lambda: prefetch_to_device([], "quatsch"), ValueError, "device='quatsch' is not allowed"),
        (lambda: prefetch_to_device([], "cpu", -1), ValueError, "depth=-1 is not allowed"),
    ):
        with pytest.raises(error, match=text):
            call()  # type: ignore[no-untyped-call]
