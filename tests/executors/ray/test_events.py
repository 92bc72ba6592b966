"""How batches come through Ray: several at a time, in pieces or by its store, and what is copied stays."""

import sys
import threading
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from comparable import flat
from executors.contract_datasets import Squares
from headrace import RayExecutor
from headrace.executors.ray import events as ray_events
from headrace.executors.ray.actor import Answers
from headrace.executors.ray.peer import RayFuture, RayPeer
from headrace.memory.slots import BufferPool
from rays import PLANES, STORE, a_loader, undisturbed
from waiting import LIMIT_S, wait_until

planes = pytest.mark.parametrize("executor", PLANES.values(), ids=PLANES.keys())

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore:epoch 0 was abandoned")]


def in_bundles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take all tasks for short ones; return where it is noted how many of them go together, each time.

    On a busy machine short tasks take long, and each would go alone.
    """
    counts: list[int] = []
    alone, note = RayPeer.next_bundle, RayPeer.note_speed
    monkeypatch.setattr(RayPeer, "note_speed", lambda peer, _, *rest: note(peer, 1e-5, *rest))

    def counted(peer: RayPeer) -> list[RayFuture]:
        some = alone(peer)
        counts.append(len(some))
        return some

    monkeypatch.setattr(RayPeer, "next_bundle", counted)
    return counts


@planes
def test_short_tasks_travel_together(executor: RayExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = in_bundles(monkeypatch)
    dataset = TensorDataset(torch.arange(3000))
    loader = a_loader(dataset, executor, prefetch_factor=16)
    assert [flat(batch) for batch in loader] == undisturbed(dataset)
    assert sum(counts) == 1000
    assert len(counts) < 500


def test_batches_of_medium_size_travel_together_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one or two pieces each, now and then of more than a call brings beside the store."""
    counts = in_bundles(monkeypatch)
    dataset = [torch.randn(60_000 if index % 100 == 50 else 20_000 + index) for index in range(300)]
    loader = a_loader(dataset, STORE, batch_size=None, prefetch_factor=8)
    assert [flat(batch) for batch in loader] == undisturbed(dataset, batch_size=None)
    assert sum(counts) == 300
    assert max(counts) > 1


@planes
def test_batches_that_are_kept_stay_as_they_were(executor: RayExecutor) -> None:
    """Rank's memory is used again only when nothing views it any more."""
    loader = a_loader(Squares(), executor, batch_size=2, collate_fn=_large, persistent_workers=True)
    first, second = list(loader), list(loader)
    for epoch in (first, second):
        for step, batch in enumerate(epoch):
            assert batch.shape == (60_000,)
            assert batch.eq(step).all()
            batch += 1
    del first, second, batch
    kept = [one[:2] for one in loader]
    assert [one.tolist() for one in kept] == [[step, step] for step in range(len(kept))]


def _large(samples: list[Any]) -> torch.Tensor:
    return torch.full((60_000,), samples[0]["square"][1] // 2)


class Growing(Dataset[torch.Tensor]):
    """Samples of few bytes and of many, one after another."""

    items = (3, 24_000, 24_576, 24_560, 30_000, 30_000, 9, 90_000, 98_304, 98_000, 150_000, 150_000, 30_000, 30_000)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(self.items[index])

    def set_epoch(self, epoch: int) -> None:
        """Be told of the epoch: then no batch of the next one is computed early."""


def test_batches_of_any_size_come_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Along with the answer, in pieces that are as many as the batch before needed, or through the store."""
    asked: list[int] = []
    ask = RayPeer.send_call

    def told(peer: RayPeer, some: Any) -> list[Any]:
        asked.append(peer.pieces)
        return ask(peer, some)

    monkeypatch.setattr(RayPeer, "send_call", told)
    options = {"batch_size": None, "shuffle": False}
    loader = a_loader(Growing(), STORE, num_workers=1, persistent_workers=True, prefetch_factor=1, **options)
    reader = iter(loader)
    assert [flat(batch) for batch in reader] == undisturbed(Growing(), **options)
    assert {*asked} == {0, 1, 2, 4}
    peers = reader._pool._peers
    assert all(peer.call is peer.first_call for peer in peers), "no batch stays in the store"


def test_a_batch_whose_pieces_are_not_found_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = sys.modules["ray"]
    nowhere = ray.remote(Growing).options(resources={"what no node has": 1}).remote()
    missing = [nowhere.__len__.remote()]
    copy = ray_events.Copier.copy

    def partly(copier: Any, answers: Any, calls: Any, label: Any) -> None:
        copy(copier, answers, calls if answers.slots or not missing else [calls[0], missing.pop()], label)

    monkeypatch.setattr(ray_events, "_GET_TIMEOUT_S", 0.01)
    monkeypatch.setattr(ray_events.Copier, "copy", partly)
    dataset = TensorDataset(torch.randn(60, 10_000))
    loader = a_loader(dataset, STORE)
    assert [flat(batch) for batch in loader] == undisturbed(dataset)
    assert not missing
    ray.kill(nowhere)


def test_small_batches_in_pieces_that_are_not_found_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = sys.modules["ray"]
    nowhere = ray.remote(Growing).options(resources={"what no node has": 1}).remote()
    found = ray_events.Copier.get_arrived
    asked: list[int] = []

    def once(copier: Any, calls: Any) -> Any:
        asked.append(len(calls))
        return found(copier, calls if len(asked) != 2 else [*calls[:-1], nowhere.__len__.remote()])

    in_bundles(monkeypatch)
    monkeypatch.setattr(ray_events, "_GET_TIMEOUT_S", 0.01)
    monkeypatch.setattr(ray_events.Copier, "get_arrived", once)
    dataset = TensorDataset(torch.randn(2000, 2000))
    options = {"batch_size": None}
    loader = a_loader(dataset, STORE, prefetch_factor=32, **options)
    assert [flat(batch) for batch in loader] == undisturbed(dataset, **options)
    assert len(asked) > 2
    assert max(asked) <= 3
    ray.kill(nowhere)


def test_a_pool_that_closes_waits_for_what_is_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the thread may let go of its references after `ray.shutdown()`, and Ray ends the process for that."""
    begun, done = threading.Event(), threading.Event()

    def copied(*_: Any) -> list[memoryview]:
        begun.set()
        wait_until(lambda: not copier._jobs.empty())  # the word to end
        done.set()
        return []

    monkeypatch.setattr(ray_events, "_copied", copied)
    events = ray_events.EventQueue()
    copier = ray_events.Copier(None, events, BufferPool(1))
    copier.copy(Answers([], [], [], 0.0), [], None)
    assert begun.wait(LIMIT_S)
    copier.close()
    assert done.is_set()
    assert not copier._thread.is_alive()
    events.close()
