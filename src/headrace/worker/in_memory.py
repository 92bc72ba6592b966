"""In-memory datasets: a batch gathered in one call per tensor, rather than sample by sample.

The batch equals default collation of the samples. Wherever that is not certain, `Unsuitable` is raised, and the caller
fetches the samples one by one.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from headrace.types import Rows

Allocate: TypeAlias = Callable[[Sequence[int], torch.dtype], Tensor | None]
"""Returns an uninitialised tensor of a shape and dtype for a batch, or None where torch is to allocate it."""

_STRIDED = torch.strided

_DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}

Gatherer: TypeAlias = Callable[[Any, Rows, Allocate], Any]
"""Returns the batch of some rows of a dataset, at least one, in memory of its own. Raises `Unsuitable` where samples
must be fetched one by one, which includes every index that is out of range."""


class Unsuitable(Exception):
    """This dataset, or these rows of it, must be fetched sample by sample."""


def no_memory(shape: Sequence[int], dtype: torch.dtype) -> None:
    """Leave the memory to torch."""


def gatherer(dataset: Any) -> Gatherer | None:
    """Return how batches of an in-memory dataset are gathered; None for any other dataset.

    A subclass that overrides nothing is treated as its base is.
    """
    kind = type(dataset)
    if kind in _RULES:
        return _RULES[kind]
    for base in (TensorDataset, Subset, ConcatDataset, StackDataset):
        if issubclass(kind, base) and all(
            getattr(kind, name, None) is getattr(base, name, None)
            for name in ("__getitem__", "__getitems__", "read_many", "decode")
        ):
            return _RULES[base]
    return None


def rows_of(index: Any) -> Rows | None:
    """Return a list of indices as rows, or None where it holds anything but plain integers."""
    return torch.tensor(index, device="cpu") if type(index) is list and set(map(type, index)) == {int} else None


def gather(dataset: Any, rows: Rows, allocate: Allocate = no_memory) -> Any:
    """Return the batch of some rows of a dataset, as a `Gatherer` does.

    Raises:
        Unsuitable: The samples must be fetched one by one.
    """
    known = gatherer(dataset)
    if known is None:
        raise Unsuitable
    return known(dataset, rows, allocate)


def _of_tensor(tensor: Tensor, rows: Rows, allocate: Allocate) -> Tensor:
    if (
        type(tensor) is not Tensor
        or tensor.dtype not in _DTYPES
        or tensor.requires_grad
        or not tensor.is_cpu
        or tensor.layout is not _STRIDED
    ):
        raise Unsuitable
    out = None if allocate is no_memory else allocate((len(rows), *tensor.shape[1:]), tensor.dtype)
    try:
        if type(rows) is not range:
            return torch.index_select(tensor, 0, rows, out=out)
        if out is None:
            return tensor.narrow_copy(0, rows.start, len(rows))
        return torch.narrow_copy(tensor, 0, rows.start, len(rows), out=out)
    except (IndexError, RuntimeError):  # no such row: the dataset's own code knows what to say
        raise Unsuitable from None


def _of_array(array: Any, rows: Rows, allocate: Allocate) -> Tensor:
    if not array.flags.writeable or array.dtype.kind not in "biuf":
        raise Unsuitable
    try:
        tensor = torch.from_numpy(np.asarray(array))
    except (TypeError, ValueError):  # a dtype, a byte order or strides that torch does not have
        raise Unsuitable from None
    return _of_tensor(tensor, rows, allocate)


def _of_tensors(dataset: Any, rows: Rows, allocate: Allocate) -> list[Tensor]:
    batch = []
    for tensor in dataset.tensors:  # a comprehension would be one more call, of which there is little else
        batch.append(_of_tensor(tensor, rows, allocate))
    return batch


def _of_subset(dataset: Any, rows: Rows, allocate: Allocate) -> Any:
    chosen = dataset.indices
    if isinstance(chosen, np.ndarray) and chosen.dtype == np.int64:
        chosen = torch.from_numpy(chosen)
    inner: Rows | None
    if type(chosen) is Tensor:
        inner = _of_tensor(chosen, rows, no_memory)
        if inner.dtype is not torch.int64 or inner.ndim != 1:
            raise Unsuitable
    else:
        try:
            inner = rows_of([chosen[one] for one in (rows if type(rows) is range else rows.tolist())])
        except IndexError:
            raise Unsuitable from None
        if inner is None:
            raise Unsuitable
    return gather(dataset.dataset, inner, allocate)


def _of_stack(dataset: Any, rows: Rows, allocate: Allocate) -> Any:
    parts = dataset.datasets
    if isinstance(parts, dict):
        return {key: gather(part, rows, allocate) for key, part in parts.items()}
    return [gather(part, rows, allocate) for part in parts]


def _of_concatenation(dataset: Any, rows: Rows, allocate: Allocate) -> Any:
    ends = dataset.cumulative_sizes
    index = torch.arange(rows.start, rows.stop, device="cpu") if type(rows) is range else rows
    if int(index.min()) < 0 or int(index.max()) >= ends[-1]:
        raise Unsuitable
    parts = torch.bucketize(index, torch.tensor(ends, device="cpu"), right=True)
    starts, batches, places = [0, *ends], [], []
    present = sorted(set(parts.tolist()))
    if len({type(dataset.datasets[part]) for part in present}) > 1:  # collation goes by the first sample's type
        raise Unsuitable
    for part in present:
        where = (parts == part).nonzero()[:, 0]
        whole = len(where) == len(index)
        batch = gather(dataset.datasets[part], index[where] - starts[part], allocate if whole else no_memory)
        if whole:
            return batch
        places.append(where)
        batches.append(batch)
    return _interleaved(batches, places, allocate)


def _interleaved(batches: list[Any], places: list[Tensor], allocate: Allocate) -> Any:
    """Merge batches of equal structure, the rows of each going to the given places of the whole."""
    first = batches[0]
    if any(type(batch) is not type(first) for batch in batches):
        raise Unsuitable
    if type(first) is Tensor:
        if any(batch.dtype is not first.dtype or batch.shape[1:] != first.shape[1:] for batch in batches):
            raise Unsuitable
        shape = (sum(map(len, places)), *first.shape[1:])
        out = allocate(shape, first.dtype)
        if out is None:
            out = torch.empty(shape, dtype=first.dtype, device="cpu")
        for batch, where in zip(batches, places, strict=True):
            out.index_copy_(0, where, batch)
        return out
    keys = list(first) if type(first) is dict else range(len(first))
    if any(len(batch) != len(first) or (type(first) is dict and list(batch) != keys) for batch in batches):
        raise Unsuitable
    merged = [_interleaved([batch[key] for batch in batches], places, allocate) for key in keys]
    return dict(zip(keys, merged, strict=True)) if type(first) is dict else merged


_RULES: dict[type, Gatherer] = {
    Tensor: _of_tensor,
    np.ndarray: _of_array,
    np.memmap: _of_array,
    TensorDataset: _of_tensors,
    Subset: _of_subset,
    ConcatDataset: _of_concatenation,
    StackDataset: _of_stack,
}
