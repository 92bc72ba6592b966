"""What happens to one cluster, fault after fault; a line of JSON for each.

They share it, and what actors they can, since to start either takes seconds. With the argument `rank` the script is
a rank of another cluster instead.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from itertools import islice
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


def node_lost(cluster: Cluster, shared_memory: bool, stopped: bool = False) -> dict[str, Any]:
    """Kill a worker's node in the middle of an epoch; or stop all its processes, as if its network was cut."""
    if not stopped:
        cluster.add_node(num_cpus=1)  # for the worker that the next fault needs: Ray finds the loss after 14 s
    reader = iter(a_loader(2, shared_memory=shared_memory))
    first = [next(reader)]
    wait_for_workers(reader)
    pids = {peer.setup_result.pid for peer in reader._pool._peers}
    families = {node: family_of(node) for node in cluster.worker_nodes}
    ((node, family),) = ((node, some) for node, some in families.items() if pids & {one.pid for one in some})

    def lose() -> None:
        if stopped:
            for process in family:
                process.send_signal(signal.SIGSTOP)
        else:
            cluster.remove_node(node, allow_graceful=False)

    def rest() -> Any:
        yield first.pop()
        yield from reader

    seen = digest(rest(), {STEPS // 3: lose})
    if stopped:
        for process in family:
            process.kill()
        cluster.remove_node(node, allow_graceful=False)
    return {"seen": seen, "expected": undisturbed()}


def family_of(node: Any) -> list[psutil.Process]:
    """Return the processes of a node that Ray started: workers, agents, and the one that started them."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [*raylet.children(recursive=True), raylet]


def wait_for_workers(reader: Any) -> None:
    """Wait until all have come up, which takes longer than an epoch."""
    while sum(peer.up for peer in reader._pool._peers) < reader._pool.workers:
        reader._pool.wait([first_undone(reader)], 0.05)


def first_undone(reader: Any) -> Any:
    return next((one for one in reader._window._futures if not one.done()), reader._window._futures[-1])


def node_added(cluster: Cluster) -> dict[str, Any]:
    """Give a pool that has room for one worker a second node."""
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


def head_lost(cluster: Cluster) -> dict[str, Any]:
    """Kill the head, and along with it a worker of one of two pools; nothing can be replaced any more."""
    ray_cluster._PROBE_EVERY_S, ray_cluster._LOST_S = 0.5, 2.0
    loaders = {kind: a_loader(2, persistent=True, num_cpus=0.25) for kind in ("alone", "with a worker")}
    for loader in loaders.values():
        reader = iter(loader)
        next(reader)
        wait_for_workers(reader)
        list(reader)
    worker = loaders["with a worker"]._iterator._peers[0].setup_result.pid
    os.kill(cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    began_s = time.monotonic()
    found = dict.fromkeys(loaders, "")
    while not all(found.values()) and time.monotonic() - began_s < 30:
        for kind in [kind for kind in loaders if not found[kind]]:
            try:
                list(loaders[kind])
            except ClusterUnavailable as error:
                found[kind] = str(error)
    return found


def store_full() -> dict[str, Any]:
    """Send batches through a store that holds a few of them."""
    loader = a_loader(2, side=1000, shared_memory=False, num_cpus=0.25)
    kept = list(islice(loader, STEPS // 3))
    return {"seen": digest(kept), "expected": undisturbed(STEPS // 3, side=1000)}


def listens(port: int) -> bool:
    """Tell whether somebody on this machine accepts connections at a port."""
    with socket.socket() as end:
        return end.connect_ex(("127.0.0.1", port)) == 0


def client(port: int) -> dict[str, Any]:
    """Reach the cluster through the Ray Client."""
    wait_until(lambda: listens(port), 60)  # the server starts after the cluster
    found = {}
    for shared_memory in (True, False):
        loader = a_loader(2, address=f"ray://127.0.0.1:{port}", shared_memory=shared_memory, num_cpus=0.25)
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
    return {"seen": found, "expected": undisturbed()}


def rank() -> None:
    """Be a rank that is killed in the middle of an epoch; say who its actors are."""
    reader = iter(a_loader(2, num_cpus=0.5))
    next(reader)
    wait_for_workers(reader)
    print(json.dumps([peer.setup_result.pid for peer in reader._pool._peers]), flush=True)
    signal.pause()


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
    found: dict[str, Any] = {}
    for shared_memory in (True, False):
        executor = RayExecutor(num_cpus=0.25, shared_memory=shared_memory)
        reader = iter(DataLoader(Script(), batch_size=3, num_workers=1, collate_fn=Batch, executor=executor))
        batch = next(reader)
        try:
            next(reader)
        except Refused as error:
            found[str(shared_memory)] = [isinstance(batch, Batch), batch.rows, "no" in str(error)]
    return found


def faults() -> None:
    """Do one thing after another to a cluster, and tell after each what was found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The store is as small as Ray allows, nearly: it is to be full.
    settings = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=settings | {"ray_client_server_port": port})
    tell("client", client(port))
    ray.init(cluster.address, logging_level="ERROR", log_to_driver=False)
    tell("node-added", node_added(cluster))
    tell("node-killed-slots", node_lost(cluster, shared_memory=True))
    tell("node-killed-store", node_lost(cluster, shared_memory=False))
    tell("node-cut-store", node_lost(cluster, shared_memory=False, stopped=True))
    tell("store-full", store_full())
    tell("script", script())
    tell("head-lost", head_lost(cluster))
    os._exit(0)  # Ray's own end would wait for the head


def tell(name: str, found: dict[str, Any]) -> None:
    """Print what was found of one fault."""
    print(json.dumps({"fault": name, **found}), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["rank"]:
        rank()
    else:
        faults()
