"""The work of a pool's workers: one picklable description, the same for every executor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker

from headrace.datasets.deferred import Deferred, built
from headrace.plan.plan import Plan
from headrace.types import StreamStart
from headrace.worker.in_memory import Allocate, no_memory
from headrace.worker.sharing import StreamShare


@dataclass
class Work:
    """Everything a worker needs to know, fixed while a pool of workers lives.

    Attributes:
        dataset: The user's dataset.
        collate_fn: Merges samples to a batch, or converts the single sample where `batched` is false.
        batched: Whether a task covers a list of samples.
        drop_last: Iterable datasets only: whether a worker's short last batch is dropped.
        plan: Gives the samples of a `PlanTask`; None where a sampler decides.
        share: Splits an iterable dataset over the ranks; None where it is not split.
        stream_words: Key an iterable dataset's randomness, together with the epoch; None for torch's own worker
            seeding.
        starts: Where each worker's pass over an iterable dataset begins; empty for its beginning.
        starts_stream: The number of the pass that `starts` is for; other passes begin at the beginning.
        base_seed: Worker i is seeded with `base_seed` + i when it starts, as torch does.
        worker_init_fn: The user's hook, called in each worker after seeding.
        fetch_threads: How many samples of a batch a worker fetches at a time.
        stacks: Whether `collate_fn` does the same as torch's default collation, so that batches of in-memory datasets
            may be gathered whole.
        allocate: Gives memory for gathered batches.
        reuses: Whether large batches get the memory of earlier ones, since they are made where they are used.
        in_threads: Whether workers share a process, which excludes torch's worker seeding.
        by_number: Whether the random numbers of a sampler's batch are keyed by its task's number in the pool, so that
            any worker may compute it. Otherwise they are torch's, and depend on the worker.
        replaces: Whether another sample replaces one that cannot be fetched; only with a plan.
        environment: Environment variables that a worker process takes over from the rank; None removes one.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    drop_last: bool = False
    plan: Plan | None = None
    share: StreamShare | None = None
    stream_words: tuple[int, ...] | None = None
    starts: Sequence[StreamStart] = ()
    starts_stream: int = 0
    base_seed: int = 0
    worker_init_fn: Callable[[int], None] | None = None
    fetch_threads: int = 1
    stacks: bool = False
    allocate: Allocate = no_memory
    reuses: bool = False
    in_threads: bool = False
    by_number: bool = False
    replaces: bool = False
    environment: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def keyed(self) -> bool:
        """Whether each batch has random numbers of its own, so that the caller's generators must not change."""
        return self.plan is not None or self.stream_words is not None or self.in_threads or self.by_number

    @property
    def repeatable(self) -> bool:
        """Whether its tasks can be computed again, by any worker, and yield the same bits."""
        return self.plan is not None or self.by_number

    def info(self, worker_id: int, workers: int) -> Any:
        """Return what `torch.utils.data.get_worker_info` returns in a worker."""
        kind = _DeferredInfo if isinstance(self.dataset, Deferred) else torch_worker.WorkerInfo
        return kind(id=worker_id, num_workers=workers, seed=self.base_seed + worker_id, dataset=self.dataset)


class _DeferredInfo(torch_worker.WorkerInfo):
    """Torch's worker info; its dataset is built when it is asked for, since the factory may ask for the rest."""

    @property
    def dataset(self) -> Any:
        return built(vars(self)["dataset"])

    @dataset.setter
    def dataset(self, dataset: Any) -> None:
        vars(self)["dataset"] = dataset


def is_iterable(dataset: Any) -> bool:
    """Tell whether torch treats a dataset as iterable-style."""
    return isinstance(dataset, IterableDataset)
