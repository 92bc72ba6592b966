"""Digests of samples: equal for equal samples, other for each difference, and it is said which part differs."""

import datetime
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headrace.cli.verify.digest import DigestingCollate, Fold, differing, digest


@dataclass
class Box:
    x: float
    label: Any


class Plain:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


Pair = namedtuple("Pair", "a b")

FLOATS = torch.arange(6, dtype=torch.float32).reshape(2, 3)
DISTINCT = [
    *(None, True, 1, 1.0, 1j, "1", b"1", -0.0, 0.0, float("nan"), 2**70, "\ud800", (), [], {}, set(), ...),
    *([1, 2], (1, 2), [1, [2]], [[1], 2], {"a": 1}, {"a": 2}, {"b": 1}, {1: 1}, {"1": 1}, {"a": 1, "b": 2}),
    *({1, 2}, frozenset({1, 2}), {"x", "y"}, Pair(1, 2), OrderedDict(a=1), range(3), datetime.date(2024, 1, 2)),
    *(FLOATS, FLOATS.T, FLOATS.reshape(3, 2), FLOATS.double(), FLOATS.bfloat16(), FLOATS + 1, FLOATS > 2),
    *(torch.tensor(0.0), torch.empty(0), torch.empty(0, 2), torch.zeros(2).to_sparse(), torch.ones(2).to_sparse()),
    *(
        FLOATS.numpy(),
        FLOATS.numpy().T,
        np.float32(1),
        np.float64(1),
        np.array(["a", 1], object),
        np.array(["a", 2], object),
    ),
    *(np.array([(1, 2.0)], dtype="i4,f4"), np.datetime64("2024-01-01"), np.datetime64("2024-01-02")),
    *(
        Box(1, 2),
        Box(1, 3),
        Plain(a=1),
        Plain(a=2),
        Plain(b=1),
        torch.float32,
        torch.device("cpu"),
        len,
        Box,
        bytearray(b"1"),
    ),
]


def copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def test_equal_samples_have_equal_digests_and_others_others() -> None:
    wholes = [digest(value).whole for value in DISTINCT]
    assert len(set(wholes)) == len(DISTINCT)
    assert [digest(copied(value)).whole for value in DISTINCT] == wholes


def test_how_it_lies_in_memory_does_not_matter() -> None:
    wide = torch.zeros(4, 6)[:, ::2]
    assert digest(wide).whole == digest(wide.clone()).whole
    assert digest(torch.tensor([1 + 2j]).conj()).whole == digest(torch.tensor([1 - 2j])).whole
    assert digest(wide.numpy()[::-1]).whole == digest(wide.numpy()[::-1].copy()).whole
    text = "".join(["a", "b"])
    assert digest(Plain(a=text, b=text)).whole == digest(Plain(a="ab", b="".join(["a", "b"]))).whole


def test_sets_are_the_same_in_processes_that_hash_otherwise() -> None:
    code = "from headrace.cli.verify.digest import digest; print(digest({'a', 'bc', 'def', 1, None}).whole.hex())"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, **paths()},
        ).stdout.strip()
        for seed in "123"
    }
    assert said == {digest({"a", "bc", "def", 1, None}).whole.hex()}


def paths() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path)}


def test_the_parts_that_differ_are_named() -> None:
    def parts(value: Any) -> dict[str, bytes]:
        return digest(value).parts

    one = {"image": FLOATS, "boxes": [Box(1, "a"), Box(2, "b")], 3: (1, Plain(deep=1))}
    other = {"image": FLOATS + 1, "boxes": [Box(1, "a"), Box(2, "c")], 3: (1, Plain(deep=2))}
    assert differing(parts(one), parts(one)) == []
    assert differing(parts(one), parts(other)) == ['["image"]', '["boxes"][1].label', "[3][1].deep"]
    assert differing(parts([1]), parts([1, 2])) == ["", "[1]"]
    many = list(range(60)), list(range(60))
    assert differing(parts(many), parts((many[0], [*range(59), 0]))) == ["[1]"]
    assert parts(list(range(1000))) == {}


def test_what_contains_itself() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert digest(ring).whole == digest(copied(ring)).whole


def test_what_has_no_content_is_named() -> None:
    with pytest.raises(TypeError) as raised:
        digest({"lock": threading.Lock()})
    assert raised.value.__notes__ == ["headrace: a _thread.lock in a sample cannot be compared"]


def test_images() -> None:
    red, blue = (Image.new("RGB", (2, 3), colour) for colour in ("red", "blue"))
    assert digest(red).whole == digest(red.copy()).whole != digest(blue).whole
    assert digest(red).whole != digest(Image.new("RGB", (3, 2), "red")).whole


def test_samples_are_digested_before_the_users_collation() -> None:
    def spoil(samples: list[list[int]]) -> None:
        collated.append(len(samples))
        samples[0].append(1)

    collated: list[int] = []
    assert DigestingCollate(spoil, batched=True)([[0], [1]]) == [digest([0]), digest([1])]
    assert DigestingCollate(lambda sample: collated.append(sample), batched=False)(7) == [digest(7)]
    assert collated == [2, 7]


def test_the_fold_depends_on_order_and_place() -> None:
    def folded(*places: tuple[int, int, bytes]) -> str:
        fold = Fold()
        for place in places:
            fold.add(*place)
        return fold.hex()

    first, second = (0, 0, b"a"), (0, 1, b"b")
    assert len({folded(first, second), folded(second, first), folded(first), folded((0, 0, b"a"), (1, 1, b"b"))}) == 4
    assert len(folded(first)) == 12
