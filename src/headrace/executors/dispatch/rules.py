"""The numbers behind the rules: how many tasks a worker has, and when a batch, a worker or a task is given up."""

import statistics
from collections.abc import Collection

MOST_DEATHS = 5
"""Worker deaths at one task after which the task is to blame.

Kills at random hit the same task again only by chance: it goes to a worker that is up, and is hit only while it is
computed. Where that takes 5 ms, and each of two workers is killed five times a second, the chance is one in forty for
each further death, and below one in a million for four of them.
"""

DOUBTFUL = 2
"""After this many deaths at a task, the next worker gets it alone: another death is then certainly its fault."""

MOST_FALSE_STARTS = 10
"""Deaths in a row, before a worker is set up, after which the pool gives up.

No task is to blame for these. More of them are allowed than deaths at a task, since a start takes longer, so that kills
at random hit it more often: at 20 ms and five kills a second one start in ten is hit, and ten in a row hardly ever.
"""

MOST_COPIES = 2
"""How many workers may have the same task at a time."""

CREDIT = 2
"""The number of tasks that a worker may have: the present one, and the next, so that it does not wait for that."""

MOST_CREDIT = 64
"""The largest number of tasks that a worker may have because they are short."""

BUSY_S = 0.01
"""A worker may have more short tasks: as many as keep it busy for this time, in seconds."""

MOST_BUNDLE = 32
"""The largest number of tasks in one message."""

MESSAGE_S = 0.001
"""The least work, in seconds, that is sent to an idle worker in a message of its own while others are busy."""

WEIGHT_SHORTER, WEIGHT_LONGER = 0.5, 0.1
"""The weight of a new measurement of the task time, if it is shorter than the average, and if it is longer. Other
processes on a busy machine can only make a measurement longer. A longer average puts fewer tasks into a message, and
more messages would add to the load of that machine."""

RATED_AGAIN = 0.1
"""The numbers of tasks above are calculated again when the average time has changed by this share."""

OVERDUE_S, _OVERDUE_MEDIANS, _FIRST_OVERDUE_S = 0.25, 2.0, 30.0
"""A batch is overdue after `OVERDUE_S` seconds plus `_OVERDUE_MEDIANS` times the median time of a batch; before the
first answer after `_FIRST_OVERDUE_S` seconds, since nobody knows yet what a batch takes."""

PATIENCE_S, MOST_PATIENCE_S = 2.0, 60.0
"""A worker is replaced after this time without an answer, in seconds, if others have finished what it is at.
The time doubles, up to `MOST_PATIENCE_S`, with each replacement that has not answered either: some workers take long
for their first task."""

_PATIENCE_TIMES = 2.0
"""It is replaced later where another worker needed long for one of its tasks: after this many times that time more."""

_HUNG_S, _HUNG_MEDIANS = 300.0, 50.0
"""Where the user gave no time limit, a task hangs after `_HUNG_S` seconds, or where that is more after `_HUNG_MEDIANS`
times the median time of a task. Before the first answer that median counts as `_FIRST_OVERDUE_S` seconds: a dataset may
take long for the first sample in each worker, to load an index for example."""


def overdue_after(ages: Collection[float]) -> float:
    """Return the time after which a batch is overdue, in seconds, from the ages of the last batches."""
    return OVERDUE_S + _OVERDUE_MEDIANS * statistics.median(ages) if ages else _FIRST_OVERDUE_S


def hangs_after(times: Collection[float], timeout_s: float | None) -> float:
    """Return the time after which a task hangs that no worker has answered, in seconds.

    Args:
        times: What the last tasks took their workers, in seconds.
        timeout_s: The user's time limit for a batch, or None.
    """
    if timeout_s is not None:
        return timeout_s
    return max(_HUNG_S, _HUNG_MEDIANS * (statistics.median(times) if times else _FIRST_OVERDUE_S))


def patience(patience_s: float, elsewhere_s: float) -> float:
    """Return the time after which a worker is replaced that has not answered, in seconds.

    Args:
        patience_s: The time that it has in any case, in seconds.
        elsewhere_s: The time that another worker needed for the task that it is at, in seconds.
    """
    return patience_s + _PATIENCE_TIMES * elsewhere_s
