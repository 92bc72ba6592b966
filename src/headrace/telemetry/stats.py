"""Figures about a loader, for its user: counted while it runs, handed out as frozen values."""

import logging
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from headrace.types import Replaced

REPLACEMENTS_KEPT = 100
"""How many replaced samples are kept in full; the others are in the log."""

_log = logging.getLogger("headrace")


@dataclass(frozen=True)
class Stats:
    """What a loader has done since it was made, summed over all its epochs and readers.

    Attributes:
        batches: Batches handed to the caller.
        samples: Samples in them.
        received_bytes: What came from workers in other processes, in bytes; 0 where nothing crosses a border.
        wait_s: Time the caller spent inside `next()`, in seconds: with workers, waiting for them.
        elapsed_s: Time from the first `next()` of each pass to its last, in seconds: training and waiting. Passes that
            overlap count twice.
        restarts: How often a worker took the place of one that had died; where the pass ended with that, how often
            new workers took the place of all.
        slots: Shared memory slots that are mapped now, of the workers that were started last.
        slot_bytes: Their size, in bytes.
        replaced: Samples that were replaced by others, since they could not be fetched (`on_error="replace"`).
        replacements: The last 100 of them, the oldest first.
    """

    batches: int = 0
    samples: int = 0
    received_bytes: int = 0
    wait_s: float = 0.0
    elapsed_s: float = 0.0
    restarts: int = 0
    slots: int = 0
    slot_bytes: int = 0
    replaced: int = 0
    replacements: tuple[Replaced, ...] = ()

    @property
    def wait_percent(self) -> float:
        """The share of the elapsed time that the caller waited, in per cent; 0 before the first batch."""
        return 100 * self.wait_s / self.elapsed_s if self.elapsed_s else 0.0


class Meter:
    """The counts behind `Stats`, under the same names; readers add to it at every batch."""

    def __init__(self) -> None:
        self.batches = self.samples = self.received_bytes = self.restarts = self.replaced = 0
        self.wait_s = self.elapsed_s = 0.0
        self._replacements: deque[Replaced] = deque(maxlen=REPLACEMENTS_KEPT)
        self._pool: Any = None
        self._broken = False

    def watch(self, pool: Any) -> None:
        """Take note of the workers that were started last: of their slots, and of their having to be replaced."""
        self.restarts += self._broken
        self._broken = False
        self._pool = weakref.ref(pool)
        pool.when_broken = self._note_broken
        pool.when_restarted = self._note_restarted

    def _note_broken(self) -> None:
        self._broken = True

    def record(self, replaced: Replaced) -> None:
        """Count a sample that was replaced, keep what is known of it, and log it as a warning."""
        self.replaced += 1
        self._replacements.append(replaced)
        _log.warning("%s", replaced)

    def _note_restarted(self) -> None:
        self.restarts += 1

    def read(self) -> Stats:
        """Return the figures as they are now."""
        pool = self._pool and self._pool()
        slots, slot_bytes = (0, 0) if pool is None else pool.slots
        counts = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return Stats(**counts, slots=slots, slot_bytes=slot_bytes, replacements=tuple(self._replacements))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_pool": None}
