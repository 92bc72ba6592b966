"""Everything that `import headrace` offers."""

from headrace.datasets.deferred import Deferred
from headrace.datasets.packed_list import PackedList
from headrace.delivery.budget import Budget
from headrace.delivery.device.iterable import prefetch_to_device
from headrace.errors import (
    ClusterUnavailable,
    DeliveryTimeout,
    HeadraceError,
    MissingExtra,
    ShardCorrupt,
    SlotTooLarge,
    StateMismatch,
    WorkerDied,
)
from headrace.executors import Executor, InlineExecutor, ProcessExecutor, RayExecutor, ThreadExecutor
from headrace.loader import DataLoader
from headrace.plan import Balanced, Blocks, LengthBucketed, Order, Plan, Sequential, Shuffled, Subset, Weighted
from headrace.randomness import rng, torch_rng
from headrace.shards import ImageDecoder, ShardWriter, TarDataset, TarStream
from headrace.telemetry.stats import Stats
from headrace.types import Replaced, World

__all__ = [
    "Balanced",
    "Blocks",
    "Budget",
    "ClusterUnavailable",
    "DataLoader",
    "Deferred",
    "DeliveryTimeout",
    "Executor",
    "HeadraceError",
    "ImageDecoder",
    "InlineExecutor",
    "LengthBucketed",
    "MissingExtra",
    "Order",
    "PackedList",
    "Plan",
    "ProcessExecutor",
    "RayExecutor",
    "Replaced",
    "Sequential",
    "ShardCorrupt",
    "ShardWriter",
    "Shuffled",
    "SlotTooLarge",
    "StateMismatch",
    "Stats",
    "Subset",
    "TarDataset",
    "TarStream",
    "ThreadExecutor",
    "Weighted",
    "WorkerDied",
    "World",
    "prefetch_to_device",
    "rng",
    "torch_rng",
]
