"""The time that each stage of a batch takes: reading, decoding, collating and encoding."""

import struct
from time import perf_counter, thread_time
from typing import NamedTuple, Self

SHORT_S = 50e-6
"""A stage that takes less, in seconds, is taken for one that used the CPU all the time, and so is the time between two
batches: reading the CPU's clock is a system call, and no disk or network answers sooner."""


class StageTimes(NamedTuple):
    """The seconds that a worker spent on one batch, stage by stage: of wall time, and of its CPU.

    The CPU time of a stage that took less than 50 us is its wall time.

    Attributes:
        read_s: Fetching samples; of a dataset with `read_many` only the raw samples. Also gathering a batch of an
            in-memory dataset, and reading an iterable dataset.
        read_cpu_s: The CPU time of that; 0 for a batch that was gathered in the rank's own process.
        decode_s: Decoding samples, where the dataset has `read_many` and `decode`; else 0. It includes reading samples
            one by one, after reading them together has failed.
        decode_cpu_s: The CPU time of that.
        collate_s: Merging the samples to a batch.
        collate_cpu_s: The CPU time of that.
        encode_s: Writing the batch to memory or bytes that another process can read; 0 in the rank's own process.
        encode_cpu_s: The CPU time of that.
    """

    read_s: float = 0.0
    read_cpu_s: float = 0.0
    decode_s: float = 0.0
    decode_cpu_s: float = 0.0
    collate_s: float = 0.0
    collate_cpu_s: float = 0.0
    encode_s: float = 0.0
    encode_cpu_s: float = 0.0

    @classmethod
    def unpacked(cls, packed: "Packed") -> Self:
        """Return the times that `StageClock` packed."""
        times = list(PACKED.unpack(packed))
        for stage in STAGES:
            times[stage + 1] = times[stage] - times[stage + 1]
        return cls._make(times)


Packed = bytes | bytearray

PACKED = struct.Struct("<8d")
"""Stage times as bytes: for each stage its wall time, and the part of it without the CPU, in seconds. As such they come
from a worker, wait in a future, and are summed with those of other batches; numbers would cost five times as much."""

NO_TIMES = bytes(PACKED.size)
"""The packed stage times of a batch that has not been computed."""

STAGES = READ, DECODE, COLLATE, ENCODE = range(0, len(StageTimes._fields), 2)
"""The stages, by where their times are among `StageTimes`."""


class StageClock:
    """Measures the stages of one batch after another.

    Attributes:
        seconds: The times of the last batch so far, in the order of `PACKED`.
        wall_s: When the last lap ended, as `perf_counter` says.
    """

    __slots__ = ("_cpu_ahead_s", "seconds", "wall_s")

    def __init__(self) -> None:
        self.wall_s = self._cpu_ahead_s = 0.0  # the latter does not change while the CPU is used all the time
        self.start()

    def start(self) -> None:
        """Begin with a batch."""
        self.seconds = [0.0] * 8
        before_s, self.wall_s = self.wall_s, perf_counter()
        if self.wall_s - before_s >= SHORT_S:
            self._cpu_ahead_s = thread_time() - self.wall_s

    def lap(self, stage: int) -> None:
        """Count the time since the last lap, or since the start, as one stage's."""
        now_s = perf_counter()
        took_s = now_s - self.wall_s
        self.wall_s = now_s
        self.seconds[stage] += took_s
        if took_s >= SHORT_S:
            before_s, self._cpu_ahead_s = self._cpu_ahead_s, thread_time() - now_s
            # Within its limits even if another thread goes on with the clock.
            self.seconds[stage + 1] += min(max(before_s - self._cpu_ahead_s, 0.0), took_s)

    def add_cpu(self, stage: int, cpu_s: float) -> None:
        """Count CPU time that other threads spent on a stage, in seconds."""
        self.seconds[stage + 1] -= cpu_s

    def packed(self) -> bytes:
        """Return the times of the last batch so far, as `PACKED`."""
        return PACKED.pack(*self.seconds)
