"""`python -m benchmarks [NAME …] [--json FILE]`: run the benchmarks and print a table."""

import argparse
import json
import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch._utils import cpu_count

from benchmarks.first_batch import first_batch
from benchmarks.local import start, transfer
from benchmarks.memory import memory
from benchmarks.packed import packed
from benchmarks.recovery import recovery
from benchmarks.resume import resume
from benchmarks.rows import Row
from benchmarks.storage import storage

BENCHMARKS: dict[str, Callable[[], Iterator[Row]]] = {
    "first_batch": first_batch,
    "transfer": transfer,
    "start": start,
    "memory": memory,
    "storage": storage,
    "packed": packed,
    "resume": resume,
    "recovery": recovery,
}


def machine() -> str:
    """Describe what the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return (
        f"{platform.system()} {platform.machine()}, {model}, {cpu_count()} CPUs, Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {np.__version__}"
    )


def main() -> None:
    """Run the benchmarks that were named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - BENCHMARKS.keys()
    if unknown:
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}: expected one of {', '.join(BENCHMARKS)}")
    warnings.filterwarnings("ignore", "This DataLoader will create")
    print(machine())
    rows = []
    for name in arguments.names or BENCHMARKS:
        for row in BENCHMARKS[name]():
            print(row)
            rows.append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
