"""Hugging Face Accelerate: a loader that splits the data itself does the work of Accelerate's own wrapper.

Accelerate asks each loader whether it is prepared already (`_is_accelerate_prepared`). A loader that splits the data by
itself answers yes, and `prepare` returns it unchanged. The loader must then do what Accelerate's wrapper does:
register while it is iterated, mark the last batch, count the samples of that batch that are no pads, put batches on the
device, and follow the `DataLoaderConfiguration`. Only the `Accelerator` has that configuration, and it does not pass
itself to a loader that it returns unchanged. Therefore two of its methods are wrapped: they tell the loader first.
"""

import sys
import warnings
import weakref
from collections.abc import Iterator
from functools import wraps
from itertools import islice
from typing import Any, NamedTuple

from headrace.datasets.told_epoch import tell_epoch
from headrace.errors import bad_value, whole_number
from headrace.plan.plan import MAX_SEED
from headrace.progress.base import Observer, Pass
from headrace.progress.source import Kind
from headrace.worker.sharing import StreamShare


class Settings(NamedTuple):
    """The settings of the `Accelerator` that prepared a loader, as each pass needs them.

    Attributes:
        on_device: Whether batches are put on Accelerate's device.
        non_blocking: Whether a batch may be delivered before its copy to the device has ended.
        rng_types: The generators that take rank 0's state at the beginning of each pass.
    """

    on_device: bool = True
    non_blocking: bool = False
    rng_types: tuple[Any, ...] = ()


class AccelerateLink(Observer):
    """Reports one pass of a loader to the Accelerate state of this process.

    Args:
        loader: Gets the attributes `end_of_dataloader` and `remainder`, which Accelerate reads.
        settings: What its `Accelerator` is set to; the generators named there are synchronized at once.
        reading: The pass.
        remainder: Samples of the last global batch that are no pads; 0 for all, -1 for unknown.
    """

    def __init__(self, loader: Any, settings: Settings, reading: Pass, remainder: int) -> None:
        accelerate = sys.modules["accelerate"]
        accelerate.utils.synchronize_rng_states(settings.rng_types)
        self._gradient_state: Any = accelerate.state.GradientState()
        self._device = accelerate.PartialState().device
        self._send = accelerate.utils.send_to_device
        self._settings = settings
        # Both refer to this: the pass has it as an observer, and the loader may keep the reader.
        self._loader, self._pass = weakref.ref(loader), weakref.ref(reading)
        self._remainder = remainder
        self._announced = False

    def delivering(self, nth: int, number: int, worker: int, samples: int, resume: Any, last: bool) -> None:
        """Register the loader at its first batch, and mark its last."""
        loader, reading = self._loader(), self._pass()
        if loader is None or reading is None:
            return
        if not self._announced:
            self._announced = True
            loader.end_of_dataloader, loader.remainder = False, self._remainder
            self._gradient_state._add_dataloader(loader)
        if last or nth == reading.steps:  # it has counted its steps by now
            loader.end_of_dataloader = True

    def ended(self, finished: bool) -> None:
        """Remove the loader from the register; Accelerate itself drops a loader that is deleted."""
        loader = self._loader()
        if loader is not None and self._announced:
            self._announced = False
            self._gradient_state._remove_dataloader(loader)

    def to_device(self, batch: Any) -> Any:
        """Put a batch on Accelerate's device, unless placement is turned off."""
        settings = self._settings
        return self._send(batch, self._device, settings.non_blocking) if settings.on_device else batch


class Skipped:
    """A loader's epoch without its first batches, as `Accelerator.skip_first_batches` returns it.

    Args:
        loader: The loader, whose attributes are also this one's.
        batches: The number of this rank's batches to leave out.
    """

    def __init__(self, loader: Any, batches: int) -> None:
        self._loader = loader
        self._batches = whole_number("num_batches", batches, fix="Count the batches of one rank.")

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._batches)

    def __iter__(self) -> Iterator[Any]:
        if self._loader._schedule.skip(self._batches):
            return iter(self._loader)
        return islice(iter(self._loader), self._batches, None)


def wrap_accelerator() -> bool:
    """Wrap the methods of `Accelerator` that take a loader, if Accelerate is imported; return whether this call did.

    `prepare_data_loader` then tells the loader first, and `skip_first_batches` lets the loader skip.
    """
    kind = getattr(sys.modules.get("accelerate"), "Accelerator", None)
    if kind is None or hasattr(kind.prepare_data_loader, "tells_headrace"):
        return False
    prepare, skip = kind.prepare_data_loader, kind.skip_first_batches

    @wraps(prepare)
    def prepare_data_loader(
        self: Any, data_loader: Any, device_placement: Any = None, *others: Any, **named: Any
    ) -> Any:
        if isinstance(data_loader, Prepared):
            data_loader._prepared_by(self, device_placement)
        return prepare(self, data_loader, device_placement, *others, **named)

    @wraps(skip)
    def skip_first_batches(self: Any, dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, Prepared) and dataloader._accelerated is not None:
            return Skipped(dataloader, num_batches)
        return skip(self, dataloader, num_batches)

    prepare_data_loader.tells_headrace = True  # type: ignore[attr-defined]
    kind.prepare_data_loader, kind.skip_first_batches = prepare_data_loader, skip_first_batches
    return True


def in_use() -> bool:
    """Tell whether this process has an Accelerate state."""
    accelerate = sys.modules.get("accelerate")
    return accelerate is not None and accelerate.state.PartialState._shared_state != {}


class Prepared:
    """The part of a loader that Accelerate reads, under Accelerate's names.

    Attributes:
        end_of_dataloader: Whether the batch handed out last is the last of the pass.
        remainder: Samples of the last global batch that are no pads; 0 for all, -1 for unknown.
        use_stateful_dataloader: Whether `save_state` and `load_state` have the loader's state with them.
    """

    _accelerated: Settings | None = None
    end_of_dataloader = False
    remainder = -1
    use_stateful_dataloader = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        wrap_accelerator()
        super().__init__(*arguments, **named)

    @property
    def _is_accelerate_prepared(self: Any) -> bool:
        """Whether `Accelerator.prepare` returns the loader unchanged: the loader splits the data by itself."""
        if self._source.order is None and not (self._source.kind is Kind.STREAM and self._source.splits_stream()):
            return False
        if in_use() and wrap_accelerator():  # too late for the call that is running
            self._is_accelerate_prepared = True
            warnings.warn(
                "a loader that was made before accelerate was imported does not see its DataLoaderConfiguration: "
                "import accelerate first.",
                stacklevel=4,
            )
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self: Any, prepared: bool) -> None:
        self._accelerated = (self._accelerated or Settings()) if prepared else None
        self._source.in_runs = prepared

    @property
    def total_batch_size(self: Any) -> int:
        """Samples per step over all ranks, or batches of an order of its own, under the name that Accelerate uses."""
        size: int = self._source.batch_size * self._source.world().size
        return size

    @property
    def total_dataset_length(self: Any) -> int:
        """Samples in the dataset, under the name that Accelerate uses."""
        return len(self.dataset)

    def _prepared_by(self: Any, accelerator: Any, device_placement: bool | None) -> None:
        """Take over the settings of an `Accelerator`, before it asks whether the loader is prepared.

        Raises:
            ValueError: The batch size cannot be split, or ranks must share their batches.
        """
        if not self._is_accelerate_prepared:
            self._warn_replaced()
            return
        source, asked = self._source, accelerator.dataloader_config
        size = source.world().size
        parallel = accelerator.parallelism_config
        together = 1 if parallel is None else parallel.tp_size * parallel.cp_size
        if together > 1 and (self.distributed is None or self.distributed is True):
            allowed = f"a World or a DeviceMesh, since {together} processes at a time must read the same batches"
            fix = "Count its rank and size in such groups, e.g. World(process_index // group, num_processes // group)."
            bad_value("distributed", self.distributed, allowed, fix)
        if asked.split_batches and (source.order is None or source.order.per_rank is None):
            if not self.batch_size or self.batch_size % size:
                allowed = f"a round multiple of the number of processes ({size}) with split_batches=True"
                bad_value("batch_size", self.batch_size, allowed, "It is then that of all processes together.")
            source.batch_size = self.batch_sampler.batch_size = self.batch_size // size
        if asked.dispatch_batches:
            warnings.warn(
                "dispatch_batches=True is ignored: each process reads its own share of every batch, and none waits for "
                "the first one to send it. Where only the first can reach the data, use torch's DataLoader.",
                stacklevel=6,
            )
        shuffles = getattr(source.order, "random", False)
        if asked.use_seedable_sampler and asked.data_seed is not None and self.seed is None and shuffles:
            source.default_seed = whole_number("data_seed", asked.data_seed, high=MAX_SEED)
            source.kind = Kind.PLAN
        tail = "drop" if self.drop_last else self.tail or "pad"
        source.tail = "exact" if tail == "pad" and not asked.even_batches else tail
        if self.batch_sampler is not None:  # `join_uneven_inputs` changes it for a time
            self.batch_sampler.even_batches = source.tail != "exact"
            source.batch_sampler = None if source.order is None else self.batch_sampler
        self.use_stateful_dataloader = bool(accelerator.use_stateful_dataloader)
        if self.use_stateful_dataloader and size > 1 and (source.order is None or not self.in_order):
            warnings.warn(
                "save_state has all processes write one file, but the state of an iterable dataset, or with "
                "in_order=False, belongs to one rank: it cannot be loaded. Save what loader.state_dict() returns in a "
                "file for each rank.",
                stacklevel=6,
            )
        if device_placement is None:
            device_placement = accelerator.device_placement
        rng_types = tuple(one for one in accelerator.rng_types if str(getattr(one, "value", one)) != "generator")
        self._iterator = None  # persistent workers have the plan without runs
        self._accelerated = Settings(device_placement, asked.non_blocking, rng_types)
        self._is_accelerate_prepared = True

    def _warn_replaced(self: Any) -> None:
        """Warn about options that are lost, since Accelerate replaces this loader by one of torch's."""
        streams = self._source.kind is Kind.STREAM
        plain = {"executor": None, "fetch_threads": 1} | ({"seed": None} if streams else {})
        lost = [name for name, value in plain.items() if getattr(self, name) != value]
        if lost:
            fix = "Pass distributed=True" if streams else "Leave out the sampler or batch_sampler"
            warnings.warn(
                f"Accelerate puts a DataLoader of torch's in the place of this one, and {', '.join(lost)} is ignored. "
                f"{fix} to let headrace split the data.",
                stacklevel=7,
            )

    def _link(self, reading: Pass, remainder: int | StreamShare | None) -> AccelerateLink | None:
        """Return the observer that reports a pass to Accelerate; None if no `Accelerator` prepared the loader."""
        if self._accelerated is None:
            return None
        self._tell_dataset()
        if not isinstance(remainder, int):
            remainder = self._stream_remainder(remainder)
        return AccelerateLink(self, self._accelerated, reading, remainder)

    def _tell_dataset(self: Any) -> None:
        """Tell the dataset the epoch, as Accelerate's own loaders do. Under a plan each worker tells its own copy."""
        if not self._source.planned():
            tell_epoch(self.dataset, self.epoch)

    def _stream_remainder(self: Any, share: StreamShare | None) -> int:
        if share is None or share.tail != "pad" or share.world.size == 1:
            return 0
        try:
            return -1 if self.num_workers > 1 else len(self.dataset) % self.total_batch_size  # each worker has pads
        except TypeError:
            return -1
