"""`Budget`: how much memory, and how many CPUs, loaders may use for batches that nobody has received yet."""

import weakref
from collections import deque
from typing import Any, Protocol

from headrace.errors import whole_number
from headrace.system.interrupts import Living

_RECENT = 128
"""The number of recent batches of which the largest counts."""

_SLOT_GROWTH = 9 / 8
"""How much larger a slot of shared memory may be than the batches that it is made for."""


class Asking(Protocol):
    """What asks for batches in advance."""

    def computing(self) -> int:
        """Count the batches that are asked for and not there yet."""


class Budget:
    """A limit on what a rank's loaders compute ahead, for one loader or several: training and evaluation, for example.

    Each loader may use an equal part of the bytes. How large a batch will be is known only when it is there, so a batch
    that was asked for counts as much as the largest of the last 128. The first one is asked for alone; when n batches
    have come that n could be asked for, it is n + 1, as far as the bytes allow. One batch is always allowed.

    Args:
        max_bytes: Bytes of batches that were asked for and not delivered yet, of all loaders together, >= 1.
        cpus: How many batches of all loaders together are computed at a time, >= 1; None for no limit. A loader that
            computes none may always compute one.

    Raises:
        TypeError: An argument is no integer.
        ValueError: An argument is < 1.

    Example:
        >>> budget = Budget(4 * 2**30, cpus=8)
        >>> train = DataLoader(train_set, 64, num_workers=8, max_prefetch_bytes=budget)
        >>> evaluation = DataLoader(test_set, 256, num_workers=8, max_prefetch_bytes=budget)
    """

    def __init__(self, max_bytes: int, cpus: int | None = None) -> None:
        self.max_bytes = whole_number("max_bytes", max_bytes, low=1, fix="Leave it out for no limit.")
        self.cpus = None if cpus is None else whole_number("cpus", cpus, low=1, fix="Leave it out for no limit.")
        self._shares: weakref.WeakSet[Share] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"Budget({self.max_bytes}{'' if self.cpus is None else f', cpus={self.cpus}'})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Budget, (self.max_bytes, self.cpus)  # a copy elsewhere is for the loaders there

    def share(self) -> "Share":
        """Return the part of one more loader."""
        share = Share(self)
        self._shares.add(share)
        return share

    def part_bytes(self) -> int:
        """Return the bytes that each loader may use."""
        return self.max_bytes // max(1, len(self._shares))

    def computing(self) -> int:
        """Count the batches that all loaders compute."""
        return sum(share.computing() for share in self._shares)


class Share:
    """One loader's part of a budget.

    Args:
        budget: The budget.

    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._sizes: deque[int] = deque(maxlen=_RECENT)
        self._most, self._since = 1, 0  # how many batches may be asked for, and how many have come since
        self._windows = Living[Asking]()

    def watch(self, window: "Asking") -> None:
        """Count the batches that a window has asked for, too, as long as it lives."""
        self._windows.add(window)

    def computing(self) -> int:
        """Count the batches that the loader computes."""
        return sum(window.computing() for window in self._windows)

    def note(self, size: int) -> None:
        """Note the size of a batch that has come, in bytes."""
        self._sizes.append(size)
        self._since += 1
        if self._since == self._most:
            self._most, self._since = self._most + 1, 0

    def most_mapped(self) -> int:
        """Return how many bytes may be mapped for batches: the loader's part, and the batch that the user has."""
        return self._budget.part_bytes() + int(max(self._sizes, default=0) * _SLOT_GROWTH)

    def room(self, asked: int) -> int:
        """Count the batches that may be asked for now.

        Args:
            asked: How many batches were asked for and not delivered.
        """
        budget, allowed = self._budget, 1
        if self._sizes:
            each = max(1, *self._sizes) * _SLOT_GROWTH
            allowed = max(1, min(self._most, int(budget.part_bytes() / each)))
        room = allowed - asked
        if budget.cpus is not None and room > 0:
            own = self.computing()
            room = min(room, max(budget.cpus - budget.computing(), 1 - own))
        return max(0, room)
