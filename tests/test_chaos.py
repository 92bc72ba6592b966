"""Workers that die at random, again and again: every sample comes once, in order, with the same bits."""

import os
import random
import select
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from executors.mortal_datasets import end_process, once_more
from headrace import DataLoader
from rays import RAY, pids_of

KILLS = int(os.environ.get("HEADRACE_KILLS", "30"))
"""How many local workers the soak kills."""

SPAWN_KILLS = int(os.environ.get("HEADRACE_SPAWN_KILLS", "4"))
"""How many spawned workers the soak kills: each costs the CPU seconds that it takes to import torch anew."""

RAY_KILLS = int(os.environ.get("HEADRACE_RAY_KILLS", "4"))
"""How many Ray workers the soak kills, likewise."""

MEAN_S = 0.1
"""How long it takes from one kill to the next, on average."""

SIGNALS = {"SIGKILL": 12, "SIGSEGV": 4, "SIGSTOP": 1, "SIGUSR2": 1}
"""What the soak sends to workers, and how often, relative to each other. SIGUSR2 makes a worker hang."""

TASK_S = 0.004
"""How long a batch takes its worker."""

WAYS = ("SIGKILL", "SIGSEGV", "SIGTERM", "exit", "leave")


class Doomed(Dataset[Any]):
    """Samples with random parts; at some visits, chosen by a seed, the worker ends."""

    def __init__(self, folder: Path, seed: int, length: int, stops: bool) -> None:
        draw = random.Random(seed)
        self.folder, self.length = folder, length
        self.ends = {index: (draw.choice(WAYS), draw.sample(range(3), 2)) for index in draw.sample(range(length), 5)}
        if stops:
            self.ends[draw.choice(sorted(self.ends))] = ("SIGSTOP", [1])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand(6_000 if index % 3 else 2)  # some through a slot, some through the socket
        if index in self.ends and get_worker_info() is not None:
            how, visits = self.ends[index]
            if next(visit for visit in count() if once_more(self.folder, f"{index} {visit}", 1)) in visits:
                end_process(how)
        return index, drawn


def one_by_one(samples: list[Any]) -> list[Any]:
    """Collate nothing."""
    return samples


def equal(batches: list[Any], others: list[Any]) -> bool:
    return len(batches) == len(others) and all(
        len(one) == len(other)
        and all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True))
        for one, other in zip(batches, others, strict=True)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:worker")
@pytest.mark.parametrize("seed", range(8))
def test_three_epochs_of_random_deaths(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    dataset = Doomed(tmp_path, seed, draw.randrange(40, 80), stops=seed % 4 == 3)
    options: dict[str, Any] = {"batch_size": draw.choice([1, 3, 4]), "shuffle": True, "seed": seed}
    options["collate_fn"] = one_by_one
    loader = DataLoader(
        dataset,
        num_workers=draw.choice([2, 3]),
        persistent_workers=draw.random() < 0.5,
        multiprocessing_context="forkserver" if seed == 2 else "fork",
        **options,
    )
    plain = DataLoader(dataset, **options)
    for _ in range(3):
        assert equal(list(loader), list(plain))
    stops = [how for how, _ in dataset.ends.values() if how == "SIGSTOP"]  # others do its tasks before it is replaced
    assert loader.stats().restarts >= 2 * (len(dataset.ends) - len(stops))


class Busy(Dataset[Any]):
    """Samples that take their time."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        ends = time.perf_counter() + TASK_S
        while time.perf_counter() < ends:
            time.sleep(TASK_S / 4)  # the work itself, as of storage; nothing is waited for by it
        return torch.cat([torch.tensor([float(index)]), torch.rand(8_000)])


def hang_on_signal(_worker: int) -> None:
    """Have a worker hang for ever when it gets SIGUSR2, wherever it is."""
    signal.signal(signal.SIGUSR2, lambda *_: select.select([], [], []))


class Killer:
    """A thread that kills, stops or hangs one of a reader's workers every so often, as a seed says.

    Args:
        seed: The seed.
        pids_of: Tells which of a reader's workers may be killed.
        most: How many it kills.

    Attributes:
        reader: Whose.
        kills: When it killed, in the clock of `time.perf_counter`.
        stops: How many it stopped, or made hang.
    """

    def __init__(self, seed: int, pids_of: Callable[[Any], list[int]], most: int) -> None:
        self.reader: Any = None
        self.pids_of, self.most = pids_of, most
        self.kills: list[float] = []
        self.stops = 0
        self._killed: list[int] = []
        self._silent = -1  # the worker that was stopped, or made hang, last
        self._draw = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer")

    @property
    def left(self) -> int:
        """How many are still to come."""
        return self.most - len(self.kills) - self.stops

    def _run(self) -> None:
        while self.left and not self._over.wait(self._draw.expovariate(1 / MEAN_S)):
            there = {*self.pids_of(self.reader)}
            pids = there - {*self._killed}
            if pids:
                self._killed.append(self._draw.choice(sorted(pids)))
                (name,) = self._draw.choices([*SIGNALS], [*SIGNALS.values()])
                # A second worker that hangs at the same task would make it the task's fault.
                if name in ("SIGKILL", "SIGSEGV") or self._silent in there:
                    os.kill(self._killed[-1], signal.SIGSEGV if name == "SIGSEGV" else signal.SIGKILL)
                    self.kills.append(time.perf_counter())
                else:
                    self._silent = self._killed[-1]
                    os.kill(self._silent, signal.Signals[name])
                    self.stops += 1

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()


def gaps(reader: Any, expected: list[Any]) -> list[tuple[float, float]]:
    """Read a pass, compare it, and return when each wait for a batch began and ended."""
    waits = []
    batches = iter(reader)
    for plain in expected:
        began = time.perf_counter()
        batch = next(batches)
        waits.append((began, time.perf_counter()))
        assert torch.equal(batch, plain)
    assert next(batches, None) is None
    return waits


def processes_of(reader: Any) -> list[int]:
    """The workers of a reader that are local processes."""
    return [worker.pid for worker in getattr(reader, "_workers", ()) if worker.pid is not None]


def processes_up_of(reader: Any) -> list[int]:
    """Those of them that are up: ten in a row that die before that end the pool, and spawned ones start slowly."""
    pool = getattr(reader, "_pool", None)
    return [peer.process.pid for peer in list(pool._peers) if peer.up] if pool is not None else []


def tell(
    capsys: pytest.CaptureFixture[str],
    what: str,
    killer: Killer,
    waits: list[tuple[float, float]],
    quiet: list[float],
) -> None:
    """Print how much longer than usual the longest wait takes that is under way at a kill or among the next."""
    usual_s = statistics.median(quiet)
    delays = []
    place = 0
    for kill in killer.kills:
        while place < len(waits) and waits[place][1] < kill:
            place += 1
        if near := waits[place : place + 6]:
            delays.append(max(0.0, max(end - began for began, end in near) - usual_s))
    delays.sort()
    median_ms, p99_ms = statistics.median(delays) * 1e3, delays[int(len(delays) * 0.99)] * 1e3
    with capsys.disabled():
        print(
            f"\n{len(killer.kills)} kills and {killer.stops} stops and hangs in {what}; "
            f"a batch takes {usual_s * 1e3:.1f} ms; a kill adds {median_ms:.1f} ms (median), {p99_ms:.1f} ms (p99)"
        )


def soak(capsys: pytest.CaptureFixture[str], killer: Killer, **options: Any) -> None:
    """Read the same epoch again and again until the killer is done.

    Each worker is replaced once, but for the last ones, which may not be noticed any more.
    """
    options |= {"batch_size": 1, "shuffle": True, "seed": 5}
    loader = DataLoader(Busy(), persistent_workers=True, worker_init_fn=hang_on_signal, **options)
    expected = list(DataLoader(Busy(), batch_size=1, shuffle=True, seed=5))
    quiet = [end - began for began, end in gaps(iter(loader), expected)[10:]]
    waits, epochs = list[tuple[float, float]](), 0
    began = time.perf_counter()
    with killer.at_work():
        while killer.left:
            loader.set_epoch(0)
            killer.reader = iter(loader)
            waits += gaps(killer.reader, expected)
            epochs += 1
    took = f"{time.perf_counter() - began:.0f} s, {loader.stats().restarts} replaced, {epochs} epochs"
    tell(capsys, took, killer, waits, quiet)
    assert killer.most - 3 <= loader.stats().restarts <= killer.most


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DataLoader worker")
@pytest.mark.parametrize(("method", "kills"), [("fork", KILLS), ("spawn", SPAWN_KILLS)])
@pytest.mark.timeout(240 + 5 * max(KILLS, SPAWN_KILLS))
def test_soak(capsys: pytest.CaptureFixture[str], method: str, kills: int) -> None:
    killer = Killer(11, processes_of if method == "fork" else processes_up_of, most=kills)
    soak(capsys, killer, num_workers=2, multiprocessing_context=method)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600 + 10 * RAY_KILLS)
def test_soak_on_ray(capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the kills hit workers that hand over shared memory, half those that go through Ray's store."""
    for executor in (RAY, replace(RAY, shared_memory=False)):
        # One is left alive: to start another takes longer than all that is measured.
        killer = Killer(11, lambda reader: pids_of(reader)[1:], most=RAY_KILLS // 2)
        soak(capsys, killer, num_workers=3, executor=executor)
