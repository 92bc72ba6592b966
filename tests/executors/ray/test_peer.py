"""What a worker on Ray is given, and how many tasks at a time."""

import pickle
import socket
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils import worker as torch_worker

from headrace.executors.dispatch.dispatcher import Dispatcher
from headrace.executors.link.frames import frame
from headrace.executors.link.wire import TAIL, Wire
from headrace.executors.ray.actor import PIECE_BYTES, Actor, Answers, Setup, SetupResult, pickled, versions
from headrace.executors.ray.events import CopiedSlots
from headrace.executors.ray.peer import RayFuture, RayPeer
from headrace.memory import pickling
from headrace.memory.codec import SlotWriter
from headrace.memory.pickling import Pickler
from headrace.memory.slots import Ring
from headrace.plan import Plan, Sequential
from headrace.randomness import callers_generators_kept
from headrace.telemetry.stages import StageTimes
from headrace.types import PlanTask
from headrace.worker.work import Work


def a_peer() -> RayPeer:
    peer = RayPeer(
        0, 1, None, used=False, dispatcher=Dispatcher(by_any_worker=True, deals_all=False, clock=time.monotonic)
    )
    peer.up = peer.takes = True
    return peer


def asked(number: int, deaths: int = 0) -> RayFuture:
    future = RayFuture(PlanTask(0, number), number, Pickler, Work([], default_collate, batched=True), None)
    future.deaths = deaths
    return future


def give(peer: RayPeer, *futures: RayFuture) -> None:
    for future in futures:
        future.holders.append(peer)
        peer.unanswered.append(future)
        peer.unsent.append(future)


def test_who_has_enough_takes_no_more() -> None:
    peer = a_peer()
    assert peer.accepts(asked(0))
    give(peer, asked(0), asked(1))
    assert not peer.accepts(asked(2)), "one that it is at, and one that it need not wait for"
    for _ in range(20):
        peer.note_speed(0.001, fits=1)
    assert peer.accepts(asked(2))
    assert peer.bundle == 1, "batches that come in slots, or apart, go one by one"


def test_short_tasks_go_several_at_a_time_and_are_worth_no_worker_of_their_own() -> None:
    peer = a_peer()
    for task_s, bundle, worth in ((0.00011, 32, 9), (0.0021, 2, 1), (0.021, 1, 1)):
        for _ in range(100):
            peer.note_speed(task_s, fits=36)
        assert (peer.bundle, peer.min_message) == (bundle, worth)
    assert peer.credit == 2


def test_a_busy_machine_makes_tasks_look_long_and_none_short() -> None:
    peer = a_peer()
    peer.note_speed(0.0001, fits=16)
    peer.note_speed(0.001, fits=16)
    assert peer.task_s == pytest.approx(0.00019)
    peer.note_speed(0.0001, fits=16)
    assert peer.task_s == pytest.approx(0.000145)


def no_others(calls: Sequence[Any]) -> Sequence[Any]:
    raise AssertionError("nothing came beside the answer")


@pytest.mark.parametrize(
    ("batch_bytes", "bundle", "worth"), [(1000, 32, 30), (10_000, 32, 30), (40_000, 16, 16), (200_000, 1, 1)]
)
def test_no_more_go_into_a_call_than_come_along_with_its_answer(batch_bytes: int, bundle: int, worth: int) -> None:
    """In a few pieces; and a call is worth more work than a message over a socket."""
    peer = a_peer()
    answers = Answers([[bytearray(batch_bytes)] for _ in range(3)], [], [], 0.0001)
    peer.receive_results([None], pickle.dumps(answers, 5), no_others)
    assert (peer.bundle, peer.min_message) == (bundle, worth)


@pytest.mark.parametrize(
    ("sizes", "pieces", "apart"),
    [
        ([2500] * 32, 3, 3),
        ([(2,) * 300] * 32, 4, 3),  # what pickling adds is a third of it
        ([2500] * 32, 2, 0),  # too many, all of them come as one
        ([2500] * 9, 3, 0),
        ([2500] * 10, 1, 1),
        ([4000, 4000, 10, 4000, 4000, 4000, 4000, 3000], 1, 1),
    ],
)
def test_small_batches_come_in_pieces_of_several(
    sizes: list[Any], pieces: int, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, none of the pieces larger than what Ray sends along with an answer."""
    dataset = [[torch.randn(one) for one in (size if isinstance(size, tuple) else (size,))] for size in sizes]
    work = Work(dataset, default_convert, batched=False, plan=Plan(Sequential(), len(dataset)))
    actor, peer = Actor(), a_peer()
    monkeypatch.setattr(pickling, "_fallback", None)  # and what else a worker does to its process is undone
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    futures = [asked(number) for number in range(len(sizes))]
    with callers_generators_kept():
        setup = Setup(1, 0, 1, torch.get_num_threads(), versions(), "")
        assert actor.set_up(setup, pickled(work)).failure is None
        results = actor.run(pickle.dumps(([(one.sent, one.key) for one in futures], pieces)))
    first, *others = results if pieces else [results]
    assert sum(map(bool, others)) == apart
    assert all(len(one) <= PIECE_BYTES + 1024 for one in (first, *others)) == bool(apart or len(sizes) < 10)
    answers = peer.receive_results(range(1 + pieces), first, lambda calls: [others[call - 1] for call in calls])
    for future, message in zip(futures, answers.messages, strict=True):
        future.land_from_store(message, CopiedSlots(iter(())), answers.received_s)
        assert future.stages.read_s > 0
        assert future.transport_s > 0
    for one, sample in zip(futures, dataset, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one.result(), sample, strict=True))


@pytest.mark.parametrize(
    ("size", "pieces", "bundle"), [(98_304, 1, 8), (98_305, 2, 4), (294_912, 3, 2), (393_216, 4, 2), (393_217, 0, 1)]
)
def test_batches_of_medium_size_come_in_pieces(size: int, pieces: int, bundle: int) -> None:
    peer = a_peer()
    answers = Answers([[bytearray(b"head")]] * 2, [], [size, 20_000], 0.0001)
    assert peer.receive_results([None], pickle.dumps(answers), no_others)._replace(received_s=0.0) == answers
    assert (peer.pieces, peer.bundle) == (pieces, bundle)
    assert peer.task_s == 0.0001


def test_what_workers_died_at_goes_alone() -> None:
    peer = a_peer()
    for _ in range(30):
        peer.note_speed(0.0001, fits=36)
    futures = [asked(0), asked(1), asked(2, deaths=1), asked(3), asked(4)]
    give(peer, *futures)
    bundles = []
    while peer.unsent:
        bundles.append([one.number for one in peer.next_bundle()])
    assert bundles == [[0, 1], [2], [3, 4]]


def test_a_task_that_two_died_at_has_its_worker_to_itself() -> None:
    """The answer before may be lost with its worker, whose death is then taken for the next task's fault."""
    peer, doubtful = a_peer(), asked(5, deaths=2)
    give(peer, asked(4))
    assert not peer.accepts(doubtful)
    assert not peer.may_hedge(doubtful)
    peer._dispatcher.answered(peer.unanswered[0], peer, was_done=False)
    assert peer.accepts(doubtful)
    assert peer.may_hedge(doubtful)
    give(peer, doubtful)
    assert not peer.accepts(asked(6)), "until it is answered"
    assert not peer.may_hedge(asked(7, deaths=2))


def test_how_long_a_task_takes_is_what_its_worker_says() -> None:
    """However late the rank hears of it, and of how many at once."""
    rank, worker, descriptors, others = ends = [*socket.socketpair(), *socket.socketpair()]
    peer = a_peer()
    peer.wire, peer.setup_result = Wire(rank, descriptors, peer.receive_answer), SetupResult(5, "here", {})
    futures = [asked(number) for number in range(50)]
    give(peer, *futures)
    writer = SlotWriter(Ring(others))
    for number in range(50):
        writer.begin()
        tail = memoryview(TAIL.pack(*StageTimes(), 0.02, number + 1, 5))
        for part in frame([*writer.write(torch.tensor(number)), tail]):
            worker.sendall(part)
    assert peer.wire.receive()
    assert [one.result() for one in futures] == [torch.tensor(number) for number in range(50)]
    assert peer.task_s == pytest.approx(0.02)
    assert (peer.credit, peer.bundle) == (2, 1)
    for end in ends:
        end.close()
