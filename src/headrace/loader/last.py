"""Which samples are in the batch that a loader handed over last."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset

from headrace.progress import PlanPass
from headrace.telemetry.stats import Meter
from headrace.types import IndexTask, PlanTask


def indices(meter: Meter) -> NDArray[np.int64] | None:
    """Return the dataset indices of the batch that was delivered last, shape (samples,); None where there are none."""
    if meter.last is None:
        return None
    reading, task = meter.last
    if isinstance(task, PlanTask) and isinstance(reading, PlanPass):
        return _planned(reading, task, meter)
    given = task.index if isinstance(task, IndexTask) else task
    if isinstance(given, Tensor):
        return given.numpy().astype(np.int64)
    try:
        found = np.atleast_1d(np.asarray(list(given) if isinstance(given, range) else given))
    except ValueError:  # a list of lists of different lengths
        return None
    return found.astype(np.int64) if found.dtype.kind in "iu" and found.ndim == 1 else None


def _planned(reading: PlanPass, task: PlanTask, meter: Meter) -> NDArray[np.int64]:
    plan = reading.plan
    positions = plan.positions(*task)
    found = np.array(plan.indices(task.epoch, positions), np.int64)
    for one in meter.latest:
        if one.epoch == task.epoch:
            found[positions == one.position] = one.substitute
    return found


def keys(dataset: Any, numbers: NDArray[np.int64] | None) -> list[str] | None:
    """Return the keys of samples, where a dataset, or the one behind torch's `Subset`, knows keys."""
    if numbers is None:
        return None
    if isinstance(dataset, Subset):
        return keys(dataset.dataset, np.asarray(dataset.indices, np.int64)[numbers])
    key = getattr(dataset, "key", None)
    return [*map(key, numbers.tolist())] if callable(key) else None
