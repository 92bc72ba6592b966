"""`python -m benchmarks [NAME …] [--json FILE] [--docs PAGE]`: run the benchmarks and print a table."""

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

from benchmarks.device import device
from benchmarks.first_batch import first_batch
from benchmarks.growing import growing, ray_growing
from benchmarks.lengths import lengths
from benchmarks.local import start, transfer
from benchmarks.memory import memory
from benchmarks.packed import packed
from benchmarks.ray_first_batch import ray_first_batch
from benchmarks.ray_recovery import ray_recovery
from benchmarks.ray_scaling import ray_scaling
from benchmarks.ray_transfer import ray_second_epoch, ray_small, ray_transfer
from benchmarks.recovery import recovery
from benchmarks.resume import resume
from benchmarks.rows import Row
from benchmarks.seeds import seeds
from benchmarks.shards import shards
from benchmarks.stage_times import stage_times
from benchmarks.storage import storage
from benchmarks.tables import update
from benchmarks.tune import tune
from benchmarks.worker_cpu import worker_cpu

BENCHMARKS: dict[str, Callable[[], Iterator[Row]]] = {
    "first_batch": first_batch,
    "transfer": transfer,
    "start": start,
    "memory": memory,
    "storage": storage,
    "packed": packed,
    "lengths": lengths,
    "shards": shards,
    "device": device,
    "stage_times": stage_times,
    "seeds": seeds,
    "worker_cpu": worker_cpu,
    "resume": resume,
    "recovery": recovery,
    "tune": tune,
    "growing": growing,
    # Those on Ray come last: the others should not share the machine with it.
    "ray_first_batch": ray_first_batch,  # before this process starts a cluster
    "ray_transfer": ray_transfer,
    "ray_small": ray_small,
    "ray_second_epoch": ray_second_epoch,
    "ray_scaling": ray_scaling,
    "ray_growing": ray_growing,
    "ray_recovery": ray_recovery,
}


def machine() -> str:
    """Describe the machine and the versions that the figures were measured with."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return (
        f"{platform.system()} {platform.machine()}, {model}, {cpu_count()} CPUs, Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {np.__version__}"
    )


def ticks() -> tuple[int, int]:
    """Return the CPU time since the machine started, and how much a hypervisor gave to other machines; 0 if unknown."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0, 0
    # User, nice, system, idle, waiting, interrupts, soft interrupts, stolen; later fields are counted in the first two.
    fields = [*map(int, stat.read_text().splitlines()[0].split()[1:9])]
    return sum(fields), fields[7]


def main() -> None:
    """Run the named benchmarks, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="also replace the same rows in this page's tables")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - BENCHMARKS.keys()
    if unknown:
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}: expected one of {', '.join(BENCHMARKS)}")
    warnings.filterwarnings("ignore", "This DataLoader will create")
    print(machine())
    rows = []
    for name in arguments.names or BENCHMARKS:
        before, stolen = ticks()
        for row in BENCHMARKS[name]():
            print(row, flush=True)
            rows.append(row)
        now, stolen_now = ticks()
        share = (stolen_now - stolen) / max(1, now - before)
        print(f"{name}: meanwhile a hypervisor gave {share:.1%} of the CPUs' time to others", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=2))
    if arguments.docs:
        print(*(f"not on {arguments.docs}: {row}" for row in update(arguments.docs, rows)), sep="\n")


if __name__ == "__main__":
    main()
