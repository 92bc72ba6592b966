"""Which device is meant, and which exist; on a machine that is said to have two GPUs."""

from typing import Any

import pytest
import torch

from headrace.delivery.device.backends import OneStreamBackend, TorchBackend, backend_of, with_index
from headrace.delivery.device.choice import checked_device, other_local_rank


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("is_available", True),
        ("current_accelerator", torch.device("cuda")),
        ("device_count", 2),
        ("current_device_index", 1),
    ):
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)


@pytest.mark.usefixtures("two_gpus")
def test_devices_that_exist() -> None:
    for device in ("cuda", "cuda:1", torch.device("cuda", 0), "cpu"):
        assert checked_device(device) == torch.device(device)
    assert with_index(torch.device("cuda")) == torch.device("cuda", 1), "the current one"
    assert with_index(torch.device("cuda", 0)) == torch.device("cuda", 0)
    assert with_index(torch.device("cpu")) == torch.device("cpu")
    assert isinstance(backend_of(torch.device("cuda", 1)), TorchBackend)
    assert isinstance(backend_of(torch.device("mps", 0)), OneStreamBackend)
    assert backend_of(torch.device("cpu")) is None


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("device", ["cuda:2", "xpu", "quatsch", "meta"])
def test_devices_that_do_not(device: Any) -> None:
    with pytest.raises(ValueError, match=f'device={device!r} is not allowed: expected "cpu", "cuda", or "cuda:0" to'):
        checked_device(device)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("local", "device", "warns"),
    [("0", "cuda:1", True), ("1", "cuda:1", False), ("", "cuda:1", False), ("7", "cuda:1", False), ("0", "cpu", False)],
)
def test_another_local_rank(local: str, device: str, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", local)
    text = other_local_rank(torch.device(device))
    assert bool(text) == warns
    assert not warns or "LOCAL_RANK=0 and the current device is cuda:1" in text
