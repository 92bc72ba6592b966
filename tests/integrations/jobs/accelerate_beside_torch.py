"""Accelerate, each case with a loader of torch's and with ours."""

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data

from headrace import DataLoader, HeadraceError, World
from launch import report

early = DataLoader(range(19), batch_size=4)  # before there is an Accelerate

from accelerate import Accelerator, skip_first_batches  # noqa: E402
from accelerate.data_loader import DataLoaderShard, prepare_data_loader  # noqa: E402
from accelerate.parallelism_config import ParallelismConfig  # noqa: E402
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin  # noqa: E402

LENGTHS = (1, 3, 8, 16, 19)


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.length))


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


class Movable:
    """A batch that notes where it is asked to go."""

    def __init__(self, samples: list[int]) -> None:
        self.asked: list[bool] = []

    def to(self, device: torch.device, non_blocking: bool = False) -> "Movable":
        self.asked.append(non_blocking)
        return self


class Joined(Accelerator):
    """One that joins uneven inputs, which Accelerate does on GPUs alone."""

    multi_device = False


def configured(kind: type[Accelerator] = Accelerator, **config: Any) -> Accelerator:
    return kind(cpu=True, dataloader_config=DataLoaderConfiguration(**config))


def gathered(accelerator: Accelerator, loader: Any) -> list[int]:
    return [index for batch in loader for index in accelerator.gather_for_metrics(batch).tolist()]


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except (ValueError, HeadraceError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def order(kind: Any) -> Any:
    accelerator = configured()
    return [
        gathered(accelerator, accelerator.prepare(kind(range(length), batch_size=4, num_workers=workers, **options)))
        for length in LENGTHS
        for workers, options in ((0, {}), (2, {"drop_last": True}))
    ]


def shuffled(kind: Any) -> Any:
    accelerator = configured()
    loader = accelerator.prepare(kind(range(19), batch_size=4, shuffle=True))
    return [sorted(gathered(accelerator, loader)) for _ in range(2)]


def remainder(kind: Any) -> Any:
    accelerator = configured()
    found = []
    for length in LENGTHS:
        for _ in accelerator.prepare(kind(range(length), batch_size=4)):
            state = accelerator.gradient_state
            found.append([state.end_of_dataloader, state.remainder])
    return found


def split(kind: Any) -> Any:
    accelerator = configured(split_batches=True)
    loaders = [accelerator.prepare(kind(range(length), batch_size=4, shuffle=False)) for length in (16, 19)]
    return [
        [gathered(accelerator, loader) for loader in loaders],
        [batches(loader) for loader in loaders],
        [len(loader) for loader in loaders],
        [loader.total_batch_size for loader in loaders],
        "round multiple of the number of processes" in refusal(lambda: accelerator.prepare(kind(range(9), 3))),
    ]


def uneven(kind: Any) -> Any:
    accelerator = configured(even_batches=False)
    return [batches(accelerator.prepare(kind(range(length), batch_size))) for length, batch_size in ((3, 1), (7, 2))]


def joined(kind: Any) -> Any:
    accelerator = configured(Joined)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), kind(range(7), 2))
    before = [len(batch) for batch in loader]
    accelerator.multi_device = True
    sizes = []
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            accelerator.backward(model(batch.float()[:, None]).sum())
            sizes.append(len(batch))
    return [sum(before) > 3, sizes, [len(batch) for batch in loader] == before]


def saved(kind: Any) -> Any:
    accelerator = configured(use_stateful_dataloader=True)
    loader, other = (accelerator.prepare(kind(range(length), batch_size=4)) for length in (43, 40))
    folder = f"{sys.argv[1]}/{kind.__module__}"
    list(other)
    for step, _ in enumerate(loader):
        if step == 2:
            accelerator.save_state(folder)
            break
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    return [gathered(accelerator, loader), gathered(accelerator, loader), gathered(accelerator, other)]


def skipped(kind: Any) -> Any:
    accelerator = configured()
    loader = accelerator.prepare(kind(range(32), batch_size=4))
    skipped = accelerator.skip_first_batches(loader, 2)
    return [len(skipped), *([gathered(accelerator, one) for one in (skipped, skipped, loader)])]


def accumulated(kind: Any) -> Any:
    found = []
    for with_loader in (True, False):
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=with_loader),
        )
        model, loader = accelerator.prepare(torch.nn.Linear(1, 1), kind(range(19), batch_size=4))
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch.float()[:, None]).sum())
                    found.append(accelerator.sync_gradients)
    return found


def moved(kind: Any) -> Any:
    found = []
    for config, placement in (({}, None), ({"non_blocking": True}, None), ({"non_blocking": True}, [False])):
        accelerator = configured(**config)
        loader = accelerator.prepare(kind(range(8), 4, collate_fn=Movable), device_placement=placement)
        found.append([batch.asked for batch in loader])
    return found


def dispatched(kind: Any) -> Any:
    accelerator = configured(dispatch_batches=True)
    return gathered(accelerator, accelerator.prepare(kind(range(19), batch_size=4)))


def seeded(kind: Any) -> Any:
    orders = []
    for seed in (7, 7, 8):
        accelerator = configured(use_seedable_sampler=True, data_seed=seed)
        orders.append(gathered(accelerator, accelerator.prepare(kind(range(19), batch_size=4, shuffle=True))))
    return [orders[0] == orders[1], orders[0] == orders[2], [sorted(one) for one in orders]]


def streamed(kind: Any) -> Any:
    ours = {"distributed": True} if kind is DataLoader else {}
    found = []
    for dataset in (Stream(16), Sized(16), Sized(19), Sized(3)):
        for options in ({}, ours):
            accelerator = configured()
            loader = accelerator.prepare(kind(dataset, batch_size=4, **options))
            found.append([gathered(accelerator, loader) for _ in range(2)])
    accelerator = configured(dispatch_batches=False)
    loader = accelerator.prepare(kind(Stream(16), batch_size=4, **ours))
    found.append([batches(loader), batches(loader)])
    accelerator = configured(dispatch_batches=False, split_batches=True)
    loader = accelerator.prepare(kind(Stream(16), batch_size=4, **ours))
    found.append([batches(loader), batches(loader)])
    return found


def synchronized(kind: Any) -> Any:
    accelerator = Accelerator(cpu=True, rng_types=["torch"])
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(kind(range(8), batch_size=4))
    next(iter(loader))
    return accelerator.gather(torch.rand(1)).unique().numel()


def alone() -> dict[str, Any]:
    """What only our loader can be asked."""
    found: dict[str, Any] = {}
    configured()  # which has warnings of its own
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        accelerator = configured(split_batches=True)
        found["early"] = batches(accelerator.prepare(early))
        accelerator = configured(dispatch_batches=True)
        accelerator.prepare(DataLoader(range(19), batch_size=4))
        accelerator = configured()
        replaced = accelerator.prepare(DataLoader(range(19), 4, sampler=range(19), fetch_threads=2))
        accelerator = configured(use_stateful_dataloader=True)
        accelerator.prepare(DataLoader(Stream(19), batch_size=4, distributed=True))
        accelerator = configured()
        plain = accelerator.prepare(DataLoader(range(32), batch_size=4))
        found["skipped by name"] = batches(skip_first_batches(plain, 2))
        list(prepare_data_loader(plain))
    found["told"] = [str(one.message) for one in told if one.category is UserWarning]
    found["replaced"] = isinstance(replaced, DataLoaderShard)
    accelerator = configured(even_batches=False)
    placed = DataLoader(range(16), batch_size=4, collate_fn=Movable, device="cpu")
    found["placed"] = [accelerator.prepare(placed) is placed, [batch.asked for batch in placed]]
    loader = accelerator.prepare(DataLoader(range(43), batch_size=4, shuffle=True, seed=1, num_workers=1))
    loader.verify()
    reader = iter(loader)
    found["begun"] = [index for _ in range(2) for index in next(reader).tolist()]
    found["state"] = loader.state_dict()
    stream = accelerator.prepare(DataLoader(Stream(19), batch_size=4, distributed=True))
    stream.verify()
    reader = iter(stream)
    found["stream"] = [next(reader).tolist()]
    unprepared = DataLoader(Stream(19), batch_size=4, distributed=True)
    unprepared.load_state_dict(stream.state_dict())
    found["in turn"] = refusal(lambda: iter(unprepared))
    stream.load_state_dict(stream.state_dict())
    found["stream"] += batches(stream)
    accelerator = configured()
    found["unknown length"] = gathered(
        accelerator, accelerator.prepare(DataLoader(Stream(19), batch_size=4, distributed=True))
    )
    unparallel, accelerator.state.parallelism_config = accelerator.parallelism_config, ParallelismConfig(cp_size=2)
    found["mesh"] = refusal(lambda: accelerator.prepare_data_loader(DataLoader(range(9))))
    together = accelerator.prepare_data_loader(DataLoader(range(9), batch_size=9, distributed=World(0, 1)))
    found["together"] = batches(together)
    accelerator.state.parallelism_config = unparallel  # the next ones' too
    return found


CASES = (order, shuffled, remainder, split, uneven, joined, saved, skipped)
CASES += (accumulated, moved, dispatched, seeded, streamed, synchronized)

outcomes = {"alone": alone()}
for name, kind in (("torch", torch.utils.data.DataLoader), ("ours", DataLoader)):
    outcomes[name] = {case.__name__: case(kind) for case in CASES}
report(sys.argv[1], Accelerator().process_index, outcomes)
Accelerator().end_training()
