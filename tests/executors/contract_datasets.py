"""Datasets of the contract suite, at module level so that every start method can pickle them."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from headrace.testing import FakeDataset


class Squares(Dataset[torch.Tensor]):
    """Sample i is i², with what the worker knows about itself."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        return {
            "square": torch.tensor([index * index, index]),
            "worker": -1 if info is None else info.id,
            "workers": 0 if info is None else info.num_workers,
        }


class Broken(Squares):
    """Every fifth sample raises, each time another type."""

    ERRORS = (ValueError, KeyError, ZeroDivisionError)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 5 == 4:
            raise self.ERRORS[index % 3](f"sample {index} is broken")
        return super().__getitem__(index)


class BrokenDraws(FakeDataset):
    """Every fifth sample raises, after it has drawn."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if index % 5 == 4:
            raise Broken.ERRORS[index % 3](f"sample {index} is broken")
        return sample


def collate_nothing(samples: Any) -> Any:
    raise ZeroDivisionError(f"cannot collate {len(samples)}")


class Blocked(Squares):
    """Opens a named pipe that nobody writes to: blocks until killed, without sleeping."""

    def __init__(self, pipe: Path) -> None:
        os.mkfifo(pipe)
        self.pipe = pipe

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.pipe.open():
            return super().__getitem__(index)


class Deadly(Squares):
    """Sample 9 ends the process that reads it."""

    def __init__(self, signal: int | None) -> None:
        self.signal = signal

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 9 and get_worker_info() is not None:
            if self.signal is None:
                os._exit(7)
            os.kill(os.getpid(), self.signal)
        return super().__getitem__(index)


class Unpicklable(Squares):
    """Samples that no other process can be told about."""

    def __getitem__(self, index: int) -> Any:
        return lambda: index


class Fragile:
    """Unpickling number 3 is interrupted the first time, as a Ctrl-C would."""

    interrupted = False

    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: dict[str, int]) -> None:
        self.number = state["number"]
        if self.number == 3 and not Fragile.interrupted:
            Fragile.interrupted = True
            raise KeyboardInterrupt


class FragileOnes(Squares):
    """Samples that are interrupted on their way."""

    def __getitem__(self, index: int) -> Any:
        return Fragile(index)


class Exhausted(Squares):
    """Sample 5 raises what a loop would take for the end."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise StopIteration
        return super().__getitem__(index)


class Secretive(Squares):
    """Raises an exception of a class that no other process can be told about."""

    def __getitem__(self, index: int) -> Any:
        class Secret(Exception):
            pass

        raise Secret("the real reason")


class Large(Dataset[torch.Tensor]):
    """Samples far larger than a socket's buffer."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1_000_003,), index, dtype=torch.int16)


class Stream(IterableDataset[int]):
    """Worker w of n yields the numbers ≡ w (mod n) below 20."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(start, 20, step))


class Resetting(IterableDataset[int]):
    """Its own iterator, as most are written; yields what `Stream` does."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        self.next, self.step = (0, 1) if info is None else (info.id, info.num_workers)
        return self

    def __next__(self) -> int:
        if self.next >= 20:
            raise StopIteration
        self.next += self.step
        return self.next - self.step


def as_list(samples: list[Any]) -> list[Any]:
    """Collate nothing."""
    return samples


def refuse(worker_id: int) -> None:
    """Fail as a worker_init_fn."""
    raise RuntimeError(f"worker {worker_id} refuses")


class Echo(Dataset[Any]):
    """Samples that are what they were asked for by."""

    def __getitem__(self, index: Any) -> Any:
        return index


class BulkReads(Dataset[Any]):
    """`FakeDataset`, read by the batch and decoded by the sample."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def read_many(self, indices: list[int]) -> list[bytes]:
        return [index.to_bytes(8, "little") for index in indices]

    def decode(self, raw: bytes) -> dict[str, Any]:
        return FakeDataset(self.length)[int.from_bytes(raw, "little")]


class BrokenReads(BulkReads):
    """`BrokenDraws`: every tenth sample cannot be read, nor a batch with it; the fifth after it cannot be decoded."""

    def read_many(self, indices: list[int]) -> list[bytes]:
        for index in indices:
            if index % 10 == 4:
                raise Broken.ERRORS[index % 3](f"sample {index} is broken")
        return super().read_many(indices)

    def decode(self, raw: bytes) -> dict[str, Any]:
        return BrokenDraws(self.length)[int.from_bytes(raw, "little")]


class TooFew(BulkReads):
    """Leaves out what it does not have."""

    def read_many(self, indices: list[int]) -> list[bytes]:
        return super().read_many([index for index in indices if index != 6])


READ_S, DECODE_S, COLLATE_S = 0.003, 0.001, 0.002


def spend(cpu_s: float) -> None:
    """Use a thread's CPU for this long."""
    began_s = time.thread_time()
    while time.thread_time() - began_s < cpu_s:
        pass


class Busy(BulkReads):
    """Every stage takes its time."""

    def read_many(self, indices: list[int]) -> list[bytes]:
        spend(READ_S)
        return super().read_many(indices)

    def decode(self, raw: bytes) -> Any:
        spend(DECODE_S)
        return torch.full((1000,), int.from_bytes(raw, "little"))


class BusySingly(Busy):
    """Tells nobody where its time goes."""

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.read_many([index])[0])


class BusyStream(IterableDataset[Any]):
    """Yields from the first worker alone what `Busy` has."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        for index in range(8 if info is None or info.id == 0 else 0):
            spend(DECODE_S)
            yield torch.full((1000,), index)


def collate_busily(samples: list[Any]) -> Any:
    spend(COLLATE_S)
    return torch.stack(samples)
