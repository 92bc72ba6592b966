"""Encoding the fields of samples, so that `Decoder` and webdataset read them back."""

import gzip
import io
import json
import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch

from headrace.errors import MissingExtra

_QUALITY = 95
"""Of JPEGs: the highest at which Pillow still rounds as the standard proposes."""

_UNFIT = (TypeError, ValueError, AttributeError, OverflowError, RecursionError, OSError, KeyError, pickle.PicklingError)
"""What encoders raise for values that they cannot encode. They write into memory, so Pillow's OSError is no disk's."""


def encoded(field: str, value: Any) -> bytes:
    """Return the bytes of a field.

    Bytes stay as they are, and text becomes UTF-8. Other values are encoded by the last part of the field's name, after
    its last dot. A field `json.gz` is encoded as `json` and compressed.

    Raises:
        MissingExtra: An image is to be encoded, and Pillow is not installed.
        TypeError: The value does not fit the field, or the field's name does not say how to encode it.
    """
    if field.endswith(".gz"):
        return gzip.compress(encoded(field[:-3], value), mtime=0)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return _converted(field, str.encode, value)
    kind = field.rpartition(".")[2]
    if kind not in _ENCODERS:
        raise TypeError(
            f"field {field!r} with a {type(value).__name__} is not allowed: expected bytes, text, or a name that ends "
            f"in one of {', '.join(_ENCODERS)}."
        )
    return _converted(field, _ENCODERS[kind], value)


def _converted(field: str, encode: Callable[[Any], bytes], value: Any) -> bytes:
    try:
        return encode(value)
    except _UNFIT as error:
        raise TypeError(f"field {field!r} cannot hold a {type(value).__name__}: {error}") from error


def _number(value: Any) -> bytes:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("expected an integer")
    return b"%d" % value


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _array(value: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(value), allow_pickle=False)
    return file.getvalue()


def _arrays(value: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **value)
    return file.getvalue()


def _tensors(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _image(form: str, **options: Any) -> Callable[[Any], bytes]:
    """Return a function that encodes an image of uint8.

    It may be one of Pillow's, an array of shape (height, width[, channels]), or a tensor with channels first.
    """

    def encode(value: Any) -> bytes:
        try:
            pillow = import_module("PIL.Image")
        except ImportError:
            raise MissingExtra("writing images needs Pillow: pip install 'headrace[images]'") from None
        if isinstance(value, torch.Tensor):
            value = value.cpu().numpy()
            value = value.transpose(1, 2, 0) if value.ndim == 3 else value
        if not isinstance(value, pillow.Image):
            pixels = np.asarray(value)
            if pixels.dtype != np.uint8:
                raise TypeError(f"expected pixels of uint8, got {pixels.dtype}")
            value = pillow.fromarray(pixels.squeeze(-1) if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
        file = io.BytesIO()
        value.save(file, form, **options)
        return file.getvalue()

    return encode


_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), _number),
    **dict.fromkeys(("json", "jsn"), _json),
    **dict.fromkeys(("pkl", "pickle", "pyd"), pickle.dumps),
    **dict.fromkeys(("jpg", "jpeg"), _image("JPEG", quality=_QUALITY)),
    "png": _image("PNG"),
    "npy": _array,
    "npz": _arrays,
    "pth": _tensors,
}
