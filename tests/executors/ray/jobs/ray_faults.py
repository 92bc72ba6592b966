"""What happens to clusters, each in a process of its own: `python ray_faults.py NAME`, one line of JSON at the end."""

import hashlib
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any

import psutil
import ray
import torch
from ray.cluster_utils import Cluster
from torch.utils.data import Dataset

from headrace import ClusterUnavailable, DataLoader, RayExecutor
from headrace.executors.ray import cluster as ray_cluster
from waiting import wait_until

STEPS, BATCH = 60, 4


class Noise(Dataset[torch.Tensor]):
    """Samples that take a few milliseconds and draw."""

    def __init__(self, side: int = 60) -> None:
        self.side = side

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(150, 150)
        for _ in range(20):
            noise = (noise @ noise).clamp(0, 1)
        return noise.new_full((self.side, self.side), index) + torch.rand(self.side, self.side)


def digest(batches: Any, at: dict[int, Callable[[], Any]] | None = None) -> str:
    """Digest the batches in their order; do something before some of them."""
    whole = hashlib.sha256()
    for step, batch in enumerate(batches):
        whole.update(batch.numpy().tobytes())
        if at and step in at:
            at[step]()
    return whole.hexdigest()


def undisturbed(steps: int = STEPS, **options: Any) -> str:
    loader = DataLoader(Noise(**options), batch_size=BATCH, shuffle=True, seed=5, executor="inline")
    return digest(islice(loader, steps))


def a_loader(workers: int, side: int = 60, persistent: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        Noise(side),
        batch_size=BATCH,
        shuffle=True,
        seed=5,
        num_workers=workers,
        persistent_workers=persistent,
        executor=RayExecutor(**options),
    )


def a_cluster(cpus: int = 2, **settings: Any) -> Cluster:
    """Start one of a single node, and join it."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False, **settings})
    ray.init(cluster.address, logging_level="ERROR", log_to_driver=False)
    return cluster


def node_lost(shared_memory: bool, stopped: bool) -> dict[str, Any]:
    """Kill a node of two in the middle of an epoch; or stop all its processes, as if its network was cut."""
    cluster = a_cluster(cpus=1)
    node = cluster.add_node(num_cpus=1)
    loader = a_loader(2, shared_memory=shared_memory)
    reader = iter(loader)
    first = [next(reader)]
    pool = reader._pool
    while not all(peer.up for peer in pool._peers):  # which takes longer than the epoch, otherwise
        pool.wait([first_undone(reader)], 0.05)
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    family = [*raylet.children(recursive=True), raylet]
    times: list[float] = []

    def lose() -> None:
        times.append(time.monotonic())
        if not stopped:
            cluster.remove_node(node, allow_graceful=False)
        for process in family if stopped else []:
            process.send_signal(signal.SIGSTOP)

    def rest() -> Any:
        yield first.pop()
        for batch in reader:
            times.append(time.monotonic())
            yield batch

    seen = digest(rest(), {STEPS // 3: lose})
    gaps = [after - before for before, after in pairwise(times)]
    for process in family if stopped else []:
        process.kill()
    return {"seen": seen, "expected": undisturbed(), "longest_gap_s": max(gaps), "restarts": loader.stats().restarts}


def first_undone(reader: Any) -> Any:
    return next((one for one in reader._window if not one.done()), reader._window[-1])


def node_added() -> dict[str, Any]:
    """Give a pool that has room for one worker a second node."""
    cluster = a_cluster(cpus=1)
    loader = a_loader(2, persistent=True)
    ups = []

    def grow() -> None:
        ups.append(sum(peer.up for peer in loader._iterator._peers))
        cluster.add_node(num_cpus=1)

    seen = [digest(loader, {STEPS // 3: grow})]
    loader.set_epoch(0)
    deadline = time.monotonic() + 60
    while sum(peer.up for peer in loader._iterator._peers) < 2 and time.monotonic() < deadline:
        seen.append(digest(loader))
        loader.set_epoch(0)
    ups.append(sum(peer.up for peer in loader._iterator._peers))
    return {"seen": sorted(set(seen)), "expected": [undisturbed()], "up": ups}


def head_lost(worker: bool) -> dict[str, Any]:
    """Kill the head, and perhaps a worker along with it; nothing can be replaced any more."""
    ray_cluster._ASK_S, ray_cluster._LOST_S = 0.5, 2.0
    cluster = a_cluster()
    loader = a_loader(2, persistent=True)
    list(loader)
    os.kill(cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
    if worker:
        os.kill(loader._iterator._peers[0].begun.pid, signal.SIGKILL)
    began_s = time.monotonic()
    try:
        while time.monotonic() - began_s < 30:
            list(loader)
    except ClusterUnavailable as error:
        print(json.dumps({"error": str(error), "after_s": time.monotonic() - began_s}), flush=True)
    os._exit(0)  # Ray's own end would wait for the head


def store_full() -> dict[str, Any]:
    """Send batches through a store that holds a few of them."""
    a_cluster(object_store_memory=80 * 2**20)
    loader = a_loader(2, side=1000, shared_memory=False)
    kept = list(islice(loader, STEPS // 3))
    return {"seen": digest(kept), "expected": undisturbed(STEPS // 3, side=1000)}


def listens(port: int) -> bool:
    """Tell whether somebody on this machine accepts connections at a port."""
    with socket.socket() as end:
        return end.connect_ex(("127.0.0.1", port)) == 0


def client() -> dict[str, Any]:
    """Reach the cluster through the Ray Client."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "ray_client_server_port": int(sys.argv[2])},
    )
    wait_until(lambda: listens(int(sys.argv[2])), 60)  # the server starts after the cluster
    found = {}
    for shared_memory in (True, False):
        loader = a_loader(2, address=f"ray://127.0.0.1:{sys.argv[2]}", shared_memory=shared_memory)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for tries_left in (2, 1, 0):
                try:
                    found[str(shared_memory)] = digest(loader)
                    break
                except RuntimeError as error:
                    # Ray gives its own server 30 s to start, too little where much runs; and it forks it from a process
                    # with threads, which now and then ends it.
                    failed = ("Starting Ray client server failed", "ZombieProcess")
                    if not any(one in str(error) for one in failed) or not tries_left:
                        raise
        found["told"] = found.get("told", "") + " ".join(str(one.message) for one in told)
    ray.shutdown()
    cluster.shutdown()
    return {"seen": found, "expected": undisturbed()}


def rank() -> dict[str, Any]:
    """Be a rank that is killed in the middle of an epoch; say who its actors are."""
    reader = iter(a_loader(2, num_cpus=0.5))
    next(reader)
    while not all(peer.up for peer in reader._pool._peers):
        reader._pool.wait([first_undone(reader)], 0.05)
    pids = [peer.begun.pid for peer in reader._pool._peers]
    print(json.dumps(pids), flush=True)
    signal.pause()
    return {}


class Batch:
    """A class that only the script has."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows


class Refused(Exception):
    """An exception that only the script has."""


class Script(Dataset[int]):
    """A dataset of the script's own."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise Refused("no")
        return index


def script() -> dict[str, Any]:
    """Hand workers what only the script has, and get it back."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    found: dict[str, Any] = {}
    for shared_memory in (True, False):
        executor = RayExecutor(num_cpus=0.5, shared_memory=shared_memory)
        reader = iter(DataLoader(Script(), batch_size=3, num_workers=1, collate_fn=Batch, executor=executor))
        batch = next(reader)
        try:
            next(reader)
        except Refused as error:
            found[str(shared_memory)] = [isinstance(batch, Batch), batch.rows, "no" in str(error)]
    return found


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "node-killed-slots": lambda: node_lost(True, stopped=False),
    "node-killed-store": lambda: node_lost(False, stopped=False),
    "node-cut-store": lambda: node_lost(False, stopped=True),
    "node-added": node_added,
    "head-lost": lambda: head_lost(worker=False),
    "head-and-worker-lost": lambda: head_lost(worker=True),
    "store-full": store_full,
    "client": client,
    "rank": rank,
    "script": script,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(JOBS[sys.argv[1]]()))
    ray.shutdown()
