"""Datasets that end the workers that read them, at module level so that every start method can pickle them."""

import os
import select
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info


def once_more(folder: Path, name: str, times: int) -> bool:
    """Tell, at the first so many calls of all processes together, that it is one of them."""
    for number in range(times):
        try:
            os.close(os.open(folder / f"{name} {number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return True
    return False


def end_process(how: str) -> None:
    if how == "exit":
        os._exit(7)
    elif how == "leave":
        raise SystemExit(8)
    elif how == "hang":
        select.select([], [], [])
    elif how == "close":
        os.closerange(3, 4096)  # its sockets among them
    elif how == "copy":
        copy = os.fork()
        if copy:  # which goes on
            os.waitpid(copy, 0)
    elif how == "scribble":
        frame: Any = sys._getframe()
        while "end" not in frame.f_locals:
            frame = frame.f_back
        frame.f_locals["end"].sendall(b"progress: 17 %, which is not for the rank\n")
    else:
        os.kill(os.getpid(), signal.Signals[how])


class Mortal(Dataset[dict[str, Any]]):
    """Samples with random parts. Before some of them, the first few times, the worker ends.

    Args:
        folder: Where is noted what has happened.
        ends: Before which samples.
        how: "hang", "exit", "leave", "close", "copy" and "scribble" (whereupon the rank is to end it), or the name of
            a signal.
        times: How often for each sample.
        length: Samples.
        size: Numbers in each.
    """

    def __init__(
        self,
        folder: Path,
        ends: Sequence[int] = (),
        how: str = "SIGKILL",
        times: int = 1,
        length: int = 30,
        size: int = 4,
    ) -> None:
        self.folder, self.ends, self.how, self.times, self.length, self.size = folder, ends, how, times, length, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            self.note(index)
            if index in self.ends and once_more(self.folder, f"end {index}", self.times):
                end_process(self.how)
        return {"index": index, "drawn": torch.rand(self.size)}

    def note(self, index: int) -> None:
        """Note that a worker has begun with a sample."""
        info = get_worker_info()
        assert info is not None
        with (self.folder / "begun").open("a") as file:
            file.write(f"{index} {info.id} {os.getpid()}\n")

    def begun(self) -> list[list[int]]:
        """Return the samples that workers have begun with, each with the worker and its process."""
        path = self.folder / "begun"
        return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []

    def counts(self) -> Counter[int]:
        """Count how often each sample was begun."""
        return Counter(index for index, _, _ in self.begun())


class Gated(Mortal):
    """Some samples are waited for until the test opens a gate. For forked workers."""

    def __init__(self, folder: Path, gated: Sequence[int], **options: Any) -> None:
        super().__init__(folder, **options)
        self.gated = gated
        self.gate, self.opener = os.pipe()

    def __getitem__(self, index: int) -> Any:
        if index in self.gated and get_worker_info() is not None:
            self.note(index)
            os.read(self.gate, 1)
            return {"index": index, "drawn": torch.rand(self.size)}
        return super().__getitem__(index)

    def close(self) -> None:
        os.close(self.gate)
        os.close(self.opener)


class KillsAtStart:
    """A `worker_init_fn` that ends some workers, the first few times."""

    def __init__(self, folder: Path, times: int, how: str = "SIGKILL", workers: Sequence[int] = range(9)) -> None:
        self.folder, self.times, self.how, self.workers = folder, times, how, workers

    def __call__(self, worker_id: int) -> None:
        if worker_id in self.workers and once_more(self.folder, "start", self.times):
            end_process(self.how)


class KillsUnpickled(Mortal):
    """Ends the first few processes that unpickle it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if once_more(self.folder, "unpickled", self.times):
            os._exit(9)


class Unloadable(list[int]):
    """Cannot be unpickled in a worker."""

    def __init__(self) -> None:
        super().__init__(range(8))

    def __reduce__(self) -> Any:
        return _only_here, ()


def _only_here() -> Any:
    raise ModuleNotFoundError("No module named 'only_here'", name="only_here")


class HalfPickled:
    """Ends its worker when it is pickled, the first time: its batch's tensors are in the slot then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        if once_more(self.folder, "pickled", 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return HalfPickled, (self.folder,)


class HalfWritten(Mortal):
    """Large samples, one with something that ends its worker when half of it is written."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return [sample["index"], sample["drawn"], HalfPickled(self.folder) if index == 5 else 0]


class ManyParts(Mortal):
    """Samples of many small parts, more than a socket's buffer takes."""

    def __getitem__(self, index: int) -> Any:
        return [super(ManyParts, self).__getitem__(index)["drawn"] for _ in range(16)]


def first(samples: list[Any]) -> Any:
    """Collate to the only sample."""
    return samples[0]
