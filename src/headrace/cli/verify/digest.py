"""Digests of samples, part by part: the same for equal samples, whatever the batches and the process."""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

_SIZE = 12
"""The size of a digest, in bytes."""

_PARTS = 64
"""The most parts of a sample that get a digest each; beyond it only the parts at the top do."""

_DEEPEST = 100
"""How many containers inside each other are followed."""

Leaf = tuple[tuple[str, ...], bytes]
"""A part's path, one step an element, and its content."""


class SampleDigest(NamedTuple):
    """The digests of a sample.

    Attributes:
        whole: The digest of the whole sample.
        parts: The digest of each part, by its path: `["image"]`, `[0]`, `.label`.
    """

    whole: bytes
    parts: dict[str, bytes]


@dataclass(frozen=True)
class DigestingCollate:
    """A collate_fn for verification: returns the digests of the samples instead of a batch.

    The user's own collate_fn runs as well, once per batch, so that its errors are seen.

    Attributes:
        collate_fn: The user's own.
        batched: Whether it gets a list of samples.
    """

    collate_fn: Callable[[Any], Any]
    batched: bool

    def __call__(self, samples: Any) -> list[SampleDigest]:
        """Digest the samples, before the user's collate_fn may change them."""
        digests = [digest(sample) for sample in (samples if self.batched else [samples])]
        self.collate_fn(samples)
        return digests


def digest(sample: Any) -> SampleDigest:
    """Return the digest of a sample.

    Raises:
        TypeError: A part of it has no content to digest, such as a lock or a generator.
    """
    whole = blake2b(digest_size=_SIZE)
    by_path: dict[tuple[str, ...], Any] = {}
    for path, content in _leaves(sample, (), ()):
        leaf = blake2b(content, digest_size=_SIZE).digest()
        whole.update("\0".join(path).encode("utf-8", "surrogatepass") + b"\1" + leaf)
        by_path.setdefault(path, blake2b(digest_size=_SIZE)).update(leaf)
    if len(by_path) > _PARTS:
        top: dict[tuple[str, ...], Any] = {}
        for path, part in by_path.items():
            top.setdefault(path[:1], blake2b(digest_size=_SIZE)).update(part.digest())
        by_path = top if len(top) <= _PARTS else {}
    return SampleDigest(whole.digest(), {"".join(path): part.digest() for path, part in by_path.items()})


def differing(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> list[str]:
    """Return the paths of the parts that differ between two samples, or that only one of them has."""
    return [path for path in {**one, **other} if one.get(path) != other.get(path)]


@dataclass
class Fold:
    """Combines the digests of samples, added in order, into one."""

    _digest: Any = field(default_factory=lambda: blake2b(digest_size=_SIZE))

    def add(self, epoch: int, position: int, whole: bytes) -> None:
        """Add the next sample."""
        self._digest.update(struct.pack("<qq", epoch, position) + whole)

    def hex(self) -> str:
        """Return the digest so far."""
        return str(self._digest.hexdigest()[:12])


def _leaves(value: Any, path: tuple[str, ...], above: tuple[int, ...]) -> Iterator[Leaf]:
    """Yield the parts of a value in order, each with its path; containers too, with their type and length."""
    kind = type(value)
    head = f"{kind.__module__}.{kind.__qualname__}".encode()
    plain = _plain(value)
    if plain is not None:
        yield path, head + b"\0" + plain
        return
    if id(value) in above or len(above) > _DEEPEST:
        yield path, b"above"
        return
    above = (*above, id(value))
    steps = _inside(value)
    yield path, head + b"\0" + str(len(steps)).encode()
    if isinstance(value, set | frozenset):
        # Sorted by digest: the order of a set of strings differs from process to process.
        contents = sorted(digest(element).whole for element in value)
        yield path, b"".join(contents)
        return
    for step, inner in steps:
        yield from _leaves(inner, (*path, step), above)


def _plain(value: Any) -> bytes | None:
    """Return the content of a value without parts; None of other values."""
    if value is None or isinstance(value, bool | int | type(...)):
        return repr(value).encode() if type(value) in (bool, int) else str(value).encode()
    if isinstance(value, float | complex):
        return struct.pack("<dd", complex(value).real, complex(value).imag)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return f"{value.dtype}{tuple(value.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return f"{value.dtype.str}{value.dtype.names}{value.shape}".encode() + value.tobytes()
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}".encode()
    if isinstance(value, ModuleType | torch.dtype | torch.device | torch.layout):
        return str(value).encode()
    if type(value).__module__.startswith("PIL.") and hasattr(value, "tobytes"):
        palette = value.getpalette() if value.mode == "P" else None
        return f"{value.mode}{value.size}{palette}".encode() + bytes(value.tobytes())
    return None


def _inside(value: Any) -> Sequence[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]" if type(key) is not str else f'["{key}"]', inner) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{place}]", inner) for place, inner in enumerate(value)]
    if isinstance(value, np.ndarray):
        return [("", value.tolist())]
    if is_dataclass(value):
        return [(f".{one.name}", getattr(value, one.name)) for one in fields(value)]
    return [] if isinstance(value, set | frozenset) else _reduced(value)


def _reduced(value: Any) -> list[tuple[str, Any]]:
    """Return what pickle would store of an object, part by part: pickle's bytes may differ for equal objects."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception as error:
        kind = type(value)
        error.add_note(f"headrace: a {kind.__module__}.{kind.__qualname__} in a sample cannot be compared")
        raise
    if isinstance(reduced, str):
        return [("", reduced)]
    made_by, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    steps: list[tuple[str, Any]] = [("", made_by), ("", list(arguments))]
    if isinstance(state, dict):
        steps += [(f".{name}", inner) for name, inner in state.items()]
    elif state is not None:
        steps.append(("", state))
    steps += [("", list(rest)) for rest in (items, pairs) if rest is not None]
    return steps
