"""One value for many processes."""

import multiprocessing
import socket
from typing import Any

import numpy as np
import pytest
import torch

from headrace.memory.payload import Payload, receive


def through(value: Any, copies: int = 1) -> list[Any]:
    """Send a value, pickled once, and receive it `copies` times."""
    payload = Payload(value)
    received = []
    for _ in range(copies):
        with (ends := socket.socketpair())[0], ends[1]:
            payload.send(ends[0])
            received.append(receive(ends[1]))
    return received


def test_copies_are_equal_and_writes_stay_private() -> None:
    value = {"tensor": torch.arange(1000), "array": np.arange(5.0), "names": [f"name {one}" for one in range(1000)]}
    first, second = through(value, copies=2)
    first["tensor"].zero_()
    first["array"][:] = 7
    assert second["tensor"].tolist() == list(range(1000))
    assert second["array"].tolist() == [0, 1, 2, 3, 4]
    assert first["names"] == second["names"] == value["names"]


def test_many_parts() -> None:
    value = [torch.full((3,), one) for one in range(50_000)]
    assert [tensor[0].item() for tensor in through(value)[0]] == list(range(50_000))


def test_what_must_be_inherited_is_refused() -> None:
    with pytest.raises(Exception, match="can only be inherited"):
        Payload([torch.zeros(3).share_memory_()])
    with pytest.raises(RuntimeError, match="inheritance"):
        Payload(multiprocessing.Lock())
