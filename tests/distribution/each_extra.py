"""Uses what each extra is for, without it and with it: `python -S each_extra.py REQUEST`, a file of JSON.

The request has `path`, where the package and what it needs are; `extras`, for each extra the folder that has what it
needs; and `script`, the code of a script that needs no extra. Prints JSON: what came of each, in a forked process.
"""

import contextlib
import importlib
import io
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REQUEST = json.loads(Path(sys.argv[1]).read_text())
sys.path += REQUEST["path"]

import numpy as np  # noqa: E402
import torch  # noqa: E402

import headrace  # noqa: E402
from headrace.cli import main  # noqa: E402
from headrace.shards.decoding import ImageDecoder  # noqa: E402


def printed(function: Callable[[], object]) -> str:
    """Return what a function prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        function()
    return said.getvalue()


def script() -> str:
    names: dict[str, Any] = {"__name__": "__main__"}
    return printed(lambda: exec(REQUEST["script"], names))


def cli() -> str:
    sys.argv = ["headrace", "plan", "--size", "11"]
    return printed(main)


def demo() -> str:
    sys.argv = ["headrace", "demo"]
    return printed(main)


def plot() -> str:
    return str(importlib.import_module("headrace.cli.tune.report").figure_class().__name__)


def images() -> str:
    with headrace.ShardWriter("images-%d.tar") as writer:
        writer.write({"__key__": "0", "jpg": np.zeros((4, 5, 3), np.uint8)})
    return str(headrace.TarDataset("images-0.tar", "jpg", "rgb8")[0][0].shape)


def jpeg() -> str:
    return ", ".join(sorted(ImageDecoder("rgb8")._versions))


def zstd() -> str:
    return str(list(headrace.TarStream(REQUEST["compressed"], "cls", {})))


def ray() -> str:
    return str(headrace.DataLoader(torch.arange(3), num_workers=1, executor="ray").executor)


def ray_client() -> str:
    executor = headrace.RayExecutor(address="ray://127.0.0.1:1")
    return str(headrace.DataLoader(torch.arange(3), num_workers=1, executor=executor).executor == executor)


def result(function: Callable[[], str], path: list[str]) -> str:
    """Return what a function returns or raises, in a process of its own with a longer path."""

    def child() -> None:
        sys.path += path
        try:
            to_parent.send(function())
        except Exception as error:
            to_parent.send(f"{type(error).__name__}: {error}")

    from_child, to_parent = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    told = str(from_child.recv())
    process.join()
    return told


if __name__ == "__main__":
    uses = {"cli": cli, "images": images, "jpeg": jpeg, "zstd": zstd, "ray": ray, "ray-client": ray_client}
    results = {
        "package": headrace.__file__,
        "script": result(script, []),
        "without": {extra: result(use, []) for extra, use in uses.items()},
        "with": {extra: result(use, [REQUEST["extras"][extra]]) for extra, use in uses.items()},
        "demo": result(demo, [REQUEST["extras"]["cli"]]),
        "plot": [result(plot, [REQUEST["extras"][extra] for extra in extras]) for extras in (["cli"], ["cli", "plot"])],
    }
    print(json.dumps(results))
