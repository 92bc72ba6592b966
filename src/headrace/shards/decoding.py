"""Decoding the fields of samples, by the rules and with the words of webdataset."""

import gzip
import io
import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

import numpy as np
import torch

from headrace.errors import HeadraceError, MissingExtra, bad_type, bad_value, whole_number

Decode: TypeAlias = "str | Callable[[str, bytes], Any] | Mapping[str, Callable[[bytes], Any]] | ImageDecoder | None"

# fmt: off
IMAGES = frozenset((
    "apng", "blp", "bmp", "bufr", "bw", "cur", "dcx", "dds", "dib", "emf", "eps", "fit", "fits", "flc", "fli",
    "ftc", "ftu", "gbr", "gif", "grib", "h5", "hdf", "icb", "icns", "ico", "iim", "im", "j2c", "j2k", "jfif",
    "jp2", "jpc", "jpe", "jpeg", "jpf", "jpg", "jpx", "mpeg", "mpg", "msp", "pbm", "pcd", "pcx", "pgm", "png",
    "pnm", "ppm", "ps", "psd", "pxr", "ras", "rgb", "rgba", "sgi", "tga", "tif", "tiff", "vda", "vst", "webp",
    "wmf", "xbm", "xpm",
))
# fmt: on
"""The fields that are images, by the last part of their names."""


class ImageDecoder:
    """Decodes images to arrays, tensors or Pillow's images.

    JPEGs are decoded by simplejpeg where it is installed (`headrace[jpeg]`), everything else by Pillow. Pixels may
    differ between versions of these. Which ones decode is found out where this object is made; a process that unpickles
    it and has others refuses.

    Args:
        kind: As webdataset writes it: "l8", "rgb8" and "rgba8" are numpy arrays of uint8, shape (height, width) or
            (height, width, channels); without the 8, of float32 in [0, 1]. "torchrgb8" and so on are tensors, channels
            first; "torch" is "torchrgb". "pil", "pill", "pilrgb" and "pilrgba" are Pillow's images.
        min_size: Decode JPEGs at a smaller scale where both sides then still have this many pixels. Much faster for
            large photographs that are made small anyway. None decodes all pixels.

    Raises:
        MissingExtra: Pillow is not installed.
        TypeError: `min_size` is no integer.
        ValueError: There is no such kind, or `min_size` is < 1.
    """

    def __init__(self, kind: str, min_size: int | None = None) -> None:
        if not isinstance(kind, str):
            bad_type("kind", kind, "a text", "For example 'rgb8'.")
        if kind not in _KINDS:
            bad_value("kind", kind, f"one of {', '.join(_KINDS)}", "These are webdataset's words.")
        self.kind = kind
        self.min_size = None if min_size is None else whole_number("min_size", min_size, low=1)
        self._array, self._mode, self._whole_numbers = _KINDS[kind]
        self._versions = _versions()
        if "pillow" not in self._versions:
            raise MissingExtra("decode=... needs Pillow: pip install 'headrace[images]'")

    def __repr__(self) -> str:
        return f"ImageDecoder({self.kind!r}{'' if self.min_size is None else f', min_size={self.min_size}'})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        here = _versions()
        if here != self._versions:
            raise HeadraceError(
                f"images are decoded by {_named(self._versions)} on the rank, and by {_named(here)} in this process: "
                "their pixels may differ. Install the same versions."
            )

    def __call__(self, data: bytes) -> Any:
        """Return the image.

        Raises:
            Exception: What Pillow or simplejpeg raise where the data is no image.
        """
        pixels = self._jpeg(data) if data[:3] == b"\xff\xd8\xff" else None
        if self._array == "pil":
            return self._opened(data) if pixels is None else import_module("PIL.Image").fromarray(pixels)
        if pixels is None:
            pixels = np.array(self._opened(data))
        if not self._whole_numbers:
            pixels = pixels.astype(np.float32) / 255.0
        if self._array == "numpy":
            return pixels
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)) if pixels.ndim == 3 else pixels)

    def _jpeg(self, data: bytes) -> Any:
        """Return the pixels that simplejpeg decodes; None where Pillow is to do it."""
        if "simplejpeg" not in self._versions or self._mode != "RGB":
            return None
        simplejpeg = import_module("simplejpeg")
        height, width, colours, *_ = simplejpeg.decode_jpeg_header(data)
        if colours not in ("RGB", "YCbCr", "Gray"):
            return None
        _refuse_too_many(height * width)
        least = self.min_size or 0
        return simplejpeg.decode_jpeg(data, "RGB", min_height=least, min_width=least, min_factor=1)

    def _opened(self, data: bytes) -> Any:
        image = import_module("PIL.Image").open(io.BytesIO(data))
        if self.min_size is not None:
            image.draft(None, (self.min_size, self.min_size))
        return image.convert(self._mode)


def _refuse_too_many(pixels: int) -> None:
    """Do what Pillow does where an image claims more pixels than `PIL.Image.MAX_IMAGE_PIXELS`.

    Raises:
        PIL.Image.DecompressionBombError: It claims more than twice as many. Below that there is a warning.
    """
    pillow = import_module("PIL.Image")
    most = pillow.MAX_IMAGE_PIXELS
    if most is None or pixels <= most:
        return
    text = (
        f"the image claims {pixels:,} pixels; expected at most {most:,}. If it is right, set PIL.Image.MAX_IMAGE_PIXELS"
    )
    if pixels > 2 * most:
        raise pillow.DecompressionBombError(text)
    warnings.warn(text, pillow.DecompressionBombWarning, stacklevel=2)


def _kinds() -> dict[str, tuple[str, str, bool]]:
    """Return what kinds of images are called, with the kind of array, Pillow's mode, and whether numbers are whole."""
    kinds = {"torch": ("torch", "RGB", False), "pil": ("pil", "RGB", True)}
    for name, mode in {"l": "L", "rgb": "RGB", "rgba": "RGBA"}.items():
        for array, before in {"numpy": "", "torch": "torch"}.items():
            kinds |= {f"{before}{name}8": (array, mode, True), f"{before}{name}": (array, mode, False)}
        kinds[f"pil{name}"] = ("pil", mode, True)
    return kinds


_KINDS = _kinds()


def _versions() -> dict[str, str]:
    """Return the versions of the image decoders that are installed."""
    found = {}
    for package in ("pillow", "simplejpeg"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _named(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items()) or "nothing"


class Decoder:
    """Decodes fields by their names.

    What decides is the last part of a name, after its last dot, and before that the functions of the user's own. A
    field `json.gz` is decompressed and decoded as `json`. What nobody knows stays bytes: `txt`, `text` and `transcript`
    become text; `cls`, `cls2`, `index`, `inx` and `id` integers; `json` and `jsn` objects; `npy` and
    `npz` arrays; `pth` tensors; `mp` and `msg` need msgpack, `cbor` needs cbor, `ten` and `tb` need webdataset.

    Args:
        decode: How: a kind of `ImageDecoder`, or such an object, for images; a function of a field's name, with a dot
            before it, and its data, which returns None for what it leaves to others; or a mapping of names to functions
            of the data. All but None also decode the other fields above. An empty mapping decodes those alone.
        allow_pickle: Whether to decode `pkl`, `pickle` and `pyd`, and objects in `pth`.

    Attributes:
        decode: As it was given.
        leaves_all: Whether all fields stay bytes.

    Raises:
        MissingExtra: Pillow is not installed.
        TypeError: `decode` is none of these.
        ValueError: There is no such kind of images.
    """

    def __init__(self, decode: Decode, allow_pickle: bool) -> None:
        self.decode = decode
        self.leaves_all = decode is None
        self._allow_pickle = allow_pickle
        self._image: ImageDecoder | None = None
        self._own: dict[str, Callable[[bytes], Any]] = {}
        self._handler: Callable[[str, bytes], Any] | None = None
        if isinstance(decode, str | ImageDecoder):
            if isinstance(decode, str) and decode not in _KINDS:
                like = (
                    f"Did you mean {decode.lower()!r}?" if decode.lower() in _KINDS else "These are webdataset's words."
                )
                bad_value("decode", decode, f"one of {', '.join(_KINDS)}, or a function or a mapping", like)
            self._image = ImageDecoder(decode) if isinstance(decode, str) else decode
        elif isinstance(decode, Mapping):
            for name in decode:
                if not isinstance(name, str):
                    bad_type(
                        "decode", decode, "a mapping of fields' names to functions", "For example {'json': json.loads}."
                    )
            self._own = {name.lower(): function for name, function in decode.items()}
        elif callable(decode):
            self._handler = decode
        elif not self.leaves_all:
            allowed = "a kind of images, an ImageDecoder, a function, a mapping of fields to functions, or None"
            bad_type("decode", decode, allowed, "For example 'torchrgb8'.")
        for name, function in self._own.items():
            if not callable(function):
                bad_type(f"decode[{name!r}]", function, "a function of the field's bytes", "For example json.loads.")

    def __call__(self, field: str, data: bytes) -> Any:
        """Return a field's value."""
        if self.leaves_all:
            return data
        if field.endswith(".gz"):
            field, data = field[:-3], gzip.decompress(data)
        own = next((of for name, of in self._own.items() if f".{field}".endswith(f".{name}")), None)
        if own is not None:
            return own(data)
        value = None if self._handler is None else self._handler(f".{field}", data)
        if value is not None:
            return value
        kind = field.rpartition(".")[2]
        if self._image is not None and kind in IMAGES:
            return self._image(data)
        if kind in _BASIC:
            return _BASIC[kind](data)
        if kind == "pth":
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not self._allow_pickle)
        if kind in ("pkl", "pickle", "pyd") and self._allow_pickle:
            return pickle.loads(data)
        return data


def _text(data: bytes) -> str:
    return data.decode()


def _array(data: bytes) -> Any:
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _arrays(data: bytes) -> Any:
    return dict(np.load(io.BytesIO(data), allow_pickle=False))


def _by(module: str, function: str) -> Callable[[bytes], Any]:
    """Return a function of an optional package."""

    def decode(data: bytes) -> Any:
        try:
            found = import_module(module)
        except ImportError:
            raise MissingExtra(f"this field needs the package {module.partition('.')[0]}: pip install it") from None
        return getattr(found, function)(data)

    return decode


_BASIC: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("mp", "msg"), _by("msgpack", "unpackb")),
    **dict.fromkeys(("ten", "tb"), _by("webdataset.tenbin", "decode_buffer")),
    "cbor": _by("cbor", "loads"),
    "npy": _array,
    "npz": _arrays,
}
