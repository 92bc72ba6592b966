"""headrace: a drop-in torch.utils.data.DataLoader that splits every epoch exactly over ranks."""

from headrace.data import PackedList
from headrace.errors import DeliveryTimeout, HeadraceError, MissingExtra, SlotTooLarge, WorkerDied
from headrace.executors import Executor, InlineExecutor, ProcessExecutor
from headrace.loader import DataLoader
from headrace.plan import Balanced, Order, Plan, Sequential, Shuffled, Subset, Weighted
from headrace.types import World

__all__ = [
    "Balanced",
    "DataLoader",
    "DeliveryTimeout",
    "Executor",
    "HeadraceError",
    "InlineExecutor",
    "MissingExtra",
    "Order",
    "PackedList",
    "Plan",
    "ProcessExecutor",
    "Sequential",
    "Shuffled",
    "SlotTooLarge",
    "Subset",
    "Weighted",
    "WorkerDied",
    "World",
]
