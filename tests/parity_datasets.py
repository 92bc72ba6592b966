"""Datasets, samplers and collate functions of the parity tests; at module level, so that spawned workers find them."""

import multiprocessing
import os
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

LENGTH = 20


def draws() -> tuple[torch.Tensor, float, float]:
    """Draw from each of the three global generators."""
    return torch.rand(2), random.random(), float(np.random.rand())


class Drawing(Dataset[Any]):
    """Samples with random augmentation."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.offset = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        return int(index) + self.offset, *draws()

    def __repr__(self) -> str:
        return type(self).__name__


class Plain(Drawing):
    """Samples without random draws."""

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        return int(index), torch.full((2,), float(index))


class Bulk(Drawing):
    """Fetches in bulk, and draws once per batch."""

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        noise = draws()
        return [(int(index) + self.offset, len(indices), *noise) for index in indices]


class NotBulk(Drawing):
    """Has a `__getitems__` that is switched off."""

    __getitems__ = None


class Mixed(Drawing):
    """Samples of many types that torch's default collation knows."""

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        number = int(index)
        return (
            number,
            torch.tensor([True, number % 2 == 0]),
            torch.tensor([number, -0.0, float("nan")], dtype=torch.bfloat16),
            torch.tensor([complex(number, 1)], dtype=torch.complex64),
            torch.tensor(number, dtype=torch.uint8),
            torch.empty((0, 3)),
            torch.arange(6.0).reshape(2, 3).t() + number,
            np.full((2, 2), number, dtype=np.float64),
            np.int16(number),
            {"text": f"sample {number}", "nested": [number, {"half": number / 2}]},
        )


class Exotic(Drawing):
    """Tensors that not every transport keeps."""

    def __getitem__(self, index: Any) -> Any:
        number = float(int(index))
        grid = torch.arange(24.0).reshape(2, 3, 4) + number
        exotic = [
            grid.clone().requires_grad_(),
            torch.nn.Parameter(torch.full((2,), number)),
            torch.eye(3).mul(number + 1).to_sparse(),
            torch.eye(3).mul(number + 1).to_sparse_csr(),
            grid[:, 1:, ::2],
            grid.t() if grid.dim() < 3 else grid.permute(2, 0, 1),
            torch.tensor([number]).expand(3, 4),
            torch.full((1, 2, 3, 3), number).to(memory_format=torch.channels_last),
            torch.tensor(number, dtype=torch.float64),
            torch.empty((0,), dtype=torch.int16),
            torch.empty((2, 0, 3)),
            torch.tensor([float("nan"), -0.0, float("inf")]),
        ]
        dtypes = (
            torch.bool,
            torch.bfloat16,
            torch.float16,
            torch.complex64,
            torch.complex128,
            torch.uint16,
            torch.int8,
        )
        exotic += [torch.tensor([1, 0, 1]).to(dtype) for dtype in dtypes]
        return (
            int(index),
            exotic,
            {"size": grid.size(), "dtype": torch.int8, "none": None, "bytes": b"\0\1"},
        )


class Growing(Drawing):
    """Longer in each epoch: the user appends to it."""

    def grow(self) -> None:
        self.length += 3


class Stream(IterableDataset[Any]):
    """Yields everything in every worker: duplicates."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def numbers(self) -> range:
        return range(self.length)

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers():
            yield number, *draws()

    def __repr__(self) -> str:
        return type(self).__name__


class Sharded(Stream):
    """Deals itself to the workers, very unevenly: worker 0 has a quarter of what is left to the last."""

    def numbers(self) -> range:
        info = get_worker_info()
        if info is None or info.num_workers == 1:
            return range(self.length)
        cut = self.length // 4
        return range(cut) if info.id == 0 else range(cut + info.id - 1, self.length, info.num_workers - 1)


class Sized(Sharded):
    """Knows its length."""

    def __len__(self) -> int:
        return self.length


class SizedWrongly(Stream):
    """Says less than it yields."""

    def __len__(self) -> int:
        return self.length // 2


class ByInit(Stream):
    """Left to `worker_init_fn` to be cut, as torch's documentation shows."""

    start, step = 0, 1

    def numbers(self) -> range:
        return range(self.start, self.length, self.step)


class Lazy(Sampler[int]):
    """Draws each index when it is asked for."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            yield int(torch.randint(self.length, ()))


class Eager(Lazy):
    """Draws as soon as its iterator is asked for."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(self.length).tolist())


class Tensors(Lazy):
    """Yields tensors rather than integers, and has no length."""

    __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(self.length))


class UnevenBatches(Lazy):
    """Draws the size of each batch."""

    def __iter__(self) -> Iterator[Any]:
        left = list(range(self.length))
        while left:
            size = int(torch.randint(1, 5, ()))
            yield left[:size]
            left = left[size:]


class Batch(NamedTuple):
    index: torch.Tensor
    samples: list[Any]


class Pinnable:
    """A user's batch class."""

    def __init__(self, samples: list[Any]) -> None:
        self.index = numbers_of(samples)
        self.pinned = False

    def pin_memory(self) -> "Pinnable":
        self.pinned = True
        return self


def as_samples(batch: Any) -> list[Any]:
    return batch if isinstance(batch, list) else [batch]


def numbers_of(batch: Any) -> torch.Tensor:
    return torch.tensor([int(sample[0]) for sample in as_samples(batch)])


def to_dict(batch: Any) -> Any:
    return {
        "index": numbers_of(batch),
        "samples": as_samples(batch),
        "nested": {"count": len(batch), "nan": float("nan")},
    }


def to_tensors(batch: Any) -> Any:
    index = numbers_of(batch)
    return [index, index.float().requires_grad_(), torch.outer(index, index).t(), index.bool(), index[0]]


def to_namedtuple(batch: Any) -> Any:
    return Batch(numbers_of(batch), as_samples(batch))


def to_strings(batch: Any) -> Any:
    return [f"sample {number}" for number in numbers_of(batch).tolist()]


def to_bytes(batch: Any) -> Any:
    return bytes(numbers_of(batch).tolist())


def to_arrays(batch: Any) -> Any:
    index = numbers_of(batch).numpy()
    wide = np.arange(40_000.0).reshape(200, 200) + index[0]  # more than a pipe holds
    return index.astype(np.int16), np.asfortranarray(wide), wide[::7, ::3], np.array([index[0], "text"], dtype=object)


def to_pinnable(batch: Any) -> Any:
    return Pinnable(batch)


def to_drawn(batch: Any) -> Any:
    return as_samples(batch), draws()


def to_number(batch: Any) -> Any:
    return numbers_of(batch).sum().item()


def keep(batch: Any) -> Any:
    return batch


def reseed_and_mutate(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    torch.manual_seed(info.seed % 1000)
    random.seed(worker_id)
    np.random.seed(worker_id + 3)
    if not isinstance(info.dataset, list):
        info.dataset.offset = 100 * (worker_id + 1)


def cut_stream(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.start, info.dataset.step = worker_id, info.num_workers


def tensor_dataset() -> TensorDataset:
    return TensorDataset(torch.arange(LENGTH), torch.rand(LENGTH, 3), torch.arange(LENGTH) % 3 == 0)


class Telling(Plain):
    """Notes what `facts` then tells."""

    def __init__(self) -> None:
        super().__init__()
        self.parent = os.getpid()

    def __getitem__(self, index: Any) -> Any:
        self.noted = id(self)
        return index


def facts(batch: Any) -> Any:
    """Tell what a worker knows of itself, in place of a batch."""
    info, process = get_worker_info(), multiprocessing.current_process()
    if info is None:
        return "not in a worker", torch.get_num_threads()
    try:
        info.id = 7
        frozen: Any = False
    except AttributeError as error:
        frozen = str(error)
    return {
        "info": (info.id, info.num_workers, info.seed, info.rng, info.worker_method),
        "names": [name for name in dir(info) if not name.startswith("_")],
        "frozen": frozen,
        "same dataset": info.dataset.noted == id(info.dataset),
        "seed": torch.initial_seed(),
        "states": (
            random.getstate()[1][:3],
            torch.get_rng_state()[:16].tolist(),
            np.random.get_state()[1][:3].tolist(),
        ),
        "threads": torch.get_num_threads(),
        "daemon": process.daemon,
        "is a child": os.getppid() == info.dataset.parent,
    }


MAP_STYLE = {
    "drawing": Drawing,
    "tensors": tensor_dataset,
    "subset": lambda: Subset(Drawing(LENGTH * 2), range(LENGTH * 2 - 1, 0, -2)),
    "subset of bulk": lambda: Subset(Bulk(LENGTH * 2), list(range(0, LENGTH * 2, 2))),
    "concatenated": lambda: ConcatDataset([Drawing(7), Plain(2), Bulk(11)]),
    "stacked": lambda: StackDataset(torch.arange(LENGTH), Drawing()),
    "bulk": Bulk,
    "not bulk": NotBulk,
    "mixed": Mixed,
    "list": lambda: [(number, f"{number}", [number / 3]) for number in range(LENGTH)],
}
ITERABLE = {
    "duplicated": Stream,
    "sharded": Sharded,
    "sized": Sized,
    "sized wrongly": SizedWrongly,
    "chained": lambda: ChainDataset([Sharded(9), Stream(3), Sized(6)]),
    "empty": lambda: Stream(0),
    "cut by init": ByInit,
}
COLLATE = {
    "default": None,
    "dict": to_dict,
    "tensors": to_tensors,
    "namedtuple": to_namedtuple,
    "strings": to_strings,
    "bytes": to_bytes,
    "arrays": to_arrays,
    "custom": to_pinnable,
    "drawn": to_drawn,
}
