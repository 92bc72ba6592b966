"""Fields are decoded as webdataset decodes them; pickles only where that is allowed."""

import gzip
import io
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headrace.errors import HeadraceError
from headrace.shards import decoding
from headrace.shards.decoding import Decoder, ImageDecoder

KINDS = ["l8", "rgb8", "rgba8", "l", "rgb", "rgba", "pil", "pill", "pilrgb", "pilrgba"]
KINDS += ["torch", "torchl8", "torchrgb8", "torchrgba8", "torchl", "torchrgb", "torchrgba"]


def encoded(mode: str, form: str, size: tuple[int, int] = (31, 22)) -> bytes:
    """An image of a mode, in a format."""
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    pixels = pixels.repeat(4, 0).repeat(4, 1)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, form)
    return file.getvalue()


def saved(save: Callable[..., Any], value: Any) -> bytes:
    file = io.BytesIO()
    save(file, value)
    return file.getvalue()


def saved_tensor(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Image.Image):
        return one.mode == other.mode and same(np.asarray(one), np.asarray(other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return bool(type(one) is type(other) and one == other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("png", encoded("RGB", "PNG")),
        ("seg.png", encoded("L", "PNG")),
        ("webp", encoded("RGBA", "WEBP")),
        ("jpg", encoded("RGB", "JPEG")),
        ("jpeg", encoded("L", "JPEG")),
        ("jpg", encoded("CMYK", "JPEG")),
    ],
    ids=["rgb", "grey", "rgba", "jpeg", "grey jpeg", "cmyk jpeg"],
)
def test_images_are_webdatasets(kind: str, field: str, data: bytes) -> None:
    from webdataset.autodecode import imagehandler

    expected, found = imagehandler(kind)(f".{field}", data), Decoder(kind, allow_pickle=False)(field, data)
    assert type(expected) is type(found)
    assert same(expected, found)


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("txt", "é\n".encode()),
        ("a.text", b"x"),
        ("transcript", b""),
        ("cls", b" 07 "),
        ("count", b"1"),
        ("class", b"1"),
        ("cls2", b"1"),
        ("index", b"1"),
        ("inx", b"1"),
        ("id", b"1"),
        ("json", b'{"a": [1.5, null]}'),
        ("jsn", b"3"),
        ("json.gz", gzip.compress(b"[1]", mtime=0)),
        ("npy", saved(np.save, np.eye(3))),
        ("npz", saved(lambda file, value: np.savez(file, x=value), np.eye(3))),
        ("pth", saved_tensor({"x": torch.ones(2)})),
        ("bin", b"\0\1"),
        ("", b"x"),
        ("jpg", b"no decoder of images is given"),
    ],
)
def test_other_fields_are_webdatasets(field: str, data: bytes) -> None:
    from webdataset.autodecode import Decoder as Theirs

    expected = Theirs([]).decode({field: data})[field]
    assert same(expected, Decoder({}, allow_pickle=False)(field, data))


@pytest.mark.parametrize("field", ["pkl", "pickle", "pyd", "pth"])
def test_pickles_are_not_decoded_unless_it_is_allowed(field: str) -> None:
    data = saved_tensor({1, 2}) if field == "pth" else pickle.dumps({1, 2})
    assert Decoder({}, allow_pickle=True)(field, data) == {1, 2}
    if field == "pth":
        with pytest.raises(pickle.UnpicklingError):
            Decoder({}, allow_pickle=False)(field, saved_tensor(Decoder({}, allow_pickle=True)))
    else:
        assert Decoder({}, allow_pickle=False)(field, data) == data


def test_arrays_of_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        Decoder({}, allow_pickle=True)("npy", saved(np.save, np.array([{}], object)))


def test_functions_of_the_users_own() -> None:
    by_name = Decoder({"JPG": len, "seg.png": bytes.hex}, allow_pickle=False)
    assert [by_name("jpg", b"abc"), by_name("x.jpg", b"ab"), by_name("seg.png", b"a"), by_name("png", b"a")] == [
        3,
        2,
        "61",
        b"a",
    ]
    assert by_name("json", b"1") == 1

    def handler(field: str, data: bytes) -> Any:
        return (field, data) if field == ".a.b" else None

    assert Decoder(handler, allow_pickle=False)("a.b", b"x") == (".a.b", b"x")
    assert Decoder(handler, allow_pickle=False)("cls", b"1") == 1
    assert Decoder(None, allow_pickle=True)("cls", b"1") == b"1"
    assert Decoder(ImageDecoder("l8"), allow_pickle=False)("png", encoded("L", "PNG")).shape == (124, 88)


def test_a_smaller_scale() -> None:
    data = encoded("RGB", "JPEG", (100, 150))  # 400 x 600
    for least, low in ((100, 100), (224, 224), (1000, 400)):
        height, width, _ = ImageDecoder("rgb8", min_size=least)(data).shape
        assert low <= height <= 400
        assert (height, width) == (400, 600) if least == 1000 else height < 400 or least > 200
    assert ImageDecoder("rgb8", min_size=10)(encoded("RGB", "PNG")).shape == (124, 88, 3)


@pytest.mark.parametrize("field", ["jpg", "png"])
def test_an_image_that_claims_more_pixels_than_pillow_allows_is_refused(field: str) -> None:
    """Both decoders of JPEGs have one limit, and memory for the pixels is not asked for."""
    data = bytearray(encoded("RGB", "JPEG"))
    sizes = data.index(b"\xff\xc0") + 5
    data[sizes : sizes + 4] = struct.pack(">HH", 30_000, 30_000)
    for kind in ("rgb8", "torchrgb", "pil"):
        with pytest.raises(Image.DecompressionBombError, match="pixels"):
            Decoder(kind, allow_pickle=False)(field, bytes(data))
    with pytest.raises(Image.DecompressionBombError, match="pixels"):
        ImageDecoder("rgb8", min_size=100)(bytes(data))
    data[sizes : sizes + 4] = struct.pack(">HH", 10_000, 10_000)
    with pytest.warns(Image.DecompressionBombWarning), suppress(ValueError, OSError):
        Decoder("rgb8", allow_pickle=False)(field, bytes(data))


def test_a_process_with_another_decoder_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(Decoder("rgb8", allow_pickle=False))
    assert pickle.loads(data)("jpg", encoded("RGB", "JPEG")).shape == (124, 88, 3)
    monkeypatch.setattr(decoding, "_versions", lambda: {"pillow": "1.0"})
    with pytest.raises(HeadraceError, match=r"and by pillow 1\.0 in this process"):
        pickle.loads(data)
    monkeypatch.setattr(decoding, "_versions", dict)
    with pytest.raises(ImportError, match=r"headrace\[images\]"):
        Decoder("rgb8", allow_pickle=False)


@pytest.mark.parametrize(
    ("decode", "error", "text"),
    [
        ("rgb16", ValueError, "decode='rgb16' is not allowed: expected one of torch, pil"),
        ("RGB", ValueError, r"decode='RGB' is not allowed: .*\. Did you mean 'rgb'\?"),
        (3, TypeError, "decode=3 is not allowed"),
        ({5: str}, TypeError, r"decode=\{5: .* is not allowed: expected a mapping of fields' names"),
        ({"jpg": 3}, TypeError, r"decode\['jpg'\]=3 is not allowed"),
    ],
)
def test_what_is_refused(decode: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Decoder(decode, allow_pickle=False)
    with pytest.raises(ValueError, match="min_size=0"):
        ImageDecoder("rgb8", min_size=0)
