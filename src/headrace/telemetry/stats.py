"""Statistics of a loader, for its user: counted while it runs, returned as frozen values."""

import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from headrace.telemetry.stages import NO_TIMES, Packed, StageTimes
from headrace.types import Replaced

REPLACEMENTS_KEPT = 100
"""The number of replaced samples of which all details are kept; the log has the others."""

_SUMMED_TOGETHER = 256
"""How many batches' stage times are kept before they are summed: one sum of many costs less than many of two."""

_FIGURES_A_LINE = 5
"""How many figures the `repr` of statistics has in a line."""

_log = logging.getLogger("headrace")


@dataclass(frozen=True)
class Stats:
    """What a loader has done since it was made, summed over all its epochs and readers.

    Attributes:
        batches: Batches handed to the caller.
        samples: Samples in them.
        received_bytes: Bytes that came from workers in other processes; 0 where all work is done in the rank's process.
        wait_s: Time that the caller spent inside `next()`, in seconds; where there are workers it waits for them.
        elapsed_s: Time from the first `next()` of each pass to its last, in seconds: training and waiting. Passes that
            overlap count twice.
        restarts: How often a worker replaced one that had died. Where a death ends the pass it is how often new workers
            replaced all.
        workers: Workers that there are now, of those that were started last; see `max_workers` and `resize_workers`.
        slots: Slots of shared memory that are mapped now, of the workers that were started last.
        slot_bytes: Their size, in bytes.
        held_back: How often fewer batches were asked for in advance than `prefetch_factor` says, since
            `max_prefetch_bytes` was reached.
        replaced: Samples that were replaced by others, since they could not be fetched (`on_error="replace"`).
        replacements: The last 100 of them, the oldest first.
        read_s: Time that workers spent on reading the samples of these batches, in seconds. Where a dataset has only
            `__getitem__` or `__getitems__`, decoding cannot be told apart and is in it. An in-memory batch that is
            gathered whole is only read; in the caller's own thread all of `next()` counts as that.
        read_cpu_s: The CPU time of that, in seconds, that of `fetch_threads` included; 0 for batches that are gathered
            in the caller's own thread.
        decode_s: Time that workers spent on decoding them, in seconds, where the dataset has `read_many` and `decode`;
            0 elsewhere.
        decode_cpu_s: The CPU time of that, in seconds.
        collate_s: Time that workers spent on merging samples to batches, in seconds.
        collate_cpu_s: The CPU time of that, in seconds.
        encode_s: Time that workers spent on writing batches where the rank can read them, in seconds; 0 where they are
            computed in the rank's process.
        encode_cpu_s: The CPU time of that, in seconds.
        transport_s: Time that the rank spent on receiving and rebuilding batches, in seconds: reading their bytes once
            they are there, copying them out of Ray's store, mapping shared memory, unpickling; 0 where they are
            computed in the rank's process.
    """

    batches: int = 0
    samples: int = 0
    received_bytes: int = 0
    wait_s: float = 0.0
    elapsed_s: float = 0.0
    restarts: int = 0
    workers: int = 0
    slots: int = 0
    slot_bytes: int = 0
    held_back: int = 0
    replaced: int = 0
    replacements: tuple[Replaced, ...] = ()
    read_s: float = 0.0
    read_cpu_s: float = 0.0
    decode_s: float = 0.0
    decode_cpu_s: float = 0.0
    collate_s: float = 0.0
    collate_cpu_s: float = 0.0
    encode_s: float = 0.0
    encode_cpu_s: float = 0.0
    transport_s: float = 0.0

    def __repr__(self) -> str:
        """Write the figures that are not 0, the times in seconds, a few to a line."""
        shown = [f"{name}={_figure(value)}" for name, value in vars(self).items() if value]
        lines = [", ".join(shown[first : first + _FIGURES_A_LINE]) for first in range(0, len(shown), _FIGURES_A_LINE)]
        return "Stats(" + ",\n      ".join(lines) + ")"

    @property
    def wait_percent(self) -> float:
        """The share of the elapsed time that the caller waited, in per cent; 0 before the first batch."""
        return 100 * self.wait_s / self.elapsed_s if self.elapsed_s else 0.0


def _figure(value: object) -> str:
    if isinstance(value, tuple):
        return f"({len(value)} of them)"
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"


class Meter:
    """The counts behind `Stats`, under the same names; readers add to it at every batch.

    Attributes:
        gathered_s: The part of `wait_s` in which the caller's own thread gathered batches, in seconds; it is not in
            the meter's `wait_s`.
        last: The pass of the batch that was delivered last, and its task; None before the first.
        latest: The replacements of the last step that had some.
    """

    def __init__(self) -> None:
        self.batches = self.samples = self.received_bytes = self.restarts = self.held_back = self.replaced = 0
        self.transport_s = self.wait_s = self.elapsed_s = self.gathered_s = 0.0
        self.last: tuple[Any, Any] | None = None
        self.latest: list[Replaced] = []
        self._stages: list[Packed] = [NO_TIMES]  # first a sum, then those of batches that are not summed yet
        self._replacements: deque[Replaced] = deque(maxlen=REPLACEMENTS_KEPT)
        self._pool: Any = None
        self._broken = self._told_of_end = False

    def watch(self, pool: Any, tell: Callable[[str], None]) -> None:
        """Read slots from the workers that were started last, and count those that are replaced.

        Args:
            pool: These workers.
            tell: Called with the text of the warning about the first of all workers that has ended.
        """
        self.restarts += self._broken
        self._broken = False
        self._pool = weakref.ref(pool)
        pool.when_broken = self._note_broken
        pool.when_restarted = partial(self._note_restarted, tell)

    @property
    def pool(self) -> Any:
        """The workers that were started last; None if there are none any more."""
        return self._pool and self._pool()

    def _note_broken(self) -> None:
        self._broken = True

    def count_stages(self, packed: Packed) -> None:
        """Count what a worker spent on a batch, as packed `StageTimes`."""
        stages = self._stages
        stages.append(packed)
        if len(stages) > _SUMMED_TOGETHER:
            self._sum_stages()

    def _sum_stages(self) -> StageTimes:
        times = np.frombuffer(b"".join(self._stages), "<f8").reshape(-1, 8)
        self._stages = [times.sum(0).tobytes()]
        return StageTimes.unpacked(*self._stages)

    def record(self, replaced: Replaced) -> None:
        """Count a sample that was replaced, keep its details, and log it as a warning."""
        self.replaced += 1
        if self.latest and (self.latest[0].epoch, self.latest[0].step) != (replaced.epoch, replaced.step):
            self.latest = []
        self.latest.append(replaced)
        self._replacements.append(replaced)
        _log.warning("%s", replaced)

    def _note_restarted(self, tell: Callable[[str], None], end: str) -> None:
        self.restarts += 1
        if end and self._told_of_end:
            _log.warning("restart %d: DataLoader %s", self.restarts, end)
        elif end:
            self._told_of_end = True
            tell(
                f"DataLoader {end}. Another one takes its place and its tasks are computed again: no batch is lost or "
                'changed. Further ones are only logged, under "headrace", and counted in stats().restarts.'
            )

    def read(self) -> Stats:
        """Return the statistics as they are now."""
        pool = self.pool
        slots, slot_bytes = (0, 0) if pool is None else pool.slots
        counts = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        counts |= self._sum_stages()._asdict()
        del counts["last"], counts["latest"]
        gathered_s = counts.pop("gathered_s")
        counts["read_s"] += gathered_s
        counts["wait_s"] += gathered_s
        return Stats(
            **counts,
            workers=0 if pool is None else pool.workers,
            slots=slots,
            slot_bytes=slot_bytes,
            replacements=tuple(self._replacements),
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_pool": None, "last": None}
