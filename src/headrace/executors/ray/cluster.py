"""The Ray cluster: joining or starting it, its free resources, and whether its head answers."""

import importlib
import importlib.util
import os
import platform
import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple

from torch._utils import cpu_count

from headrace.errors import ClusterUnavailable, MissingExtra
from headrace.system.user_warnings import warn_user

_CONNECT_TIMEOUT_S = 3.0
"""Time limit for connecting to the head of a cluster to be joined, in seconds."""

_PROBE_TIMEOUT_S = 0.5
"""Time limit for an answer of the head of the joined cluster, in seconds."""

_PROBE_EVERY_S = 5.0
"""The time between two probes of the head, in seconds."""

_LOST_S = 20.0
"""The head counts as lost after this time without an answer, in seconds. Ray ends the process after 60 s."""

LEFT = "this process has left the Ray cluster that its workers were in: begin another epoch when it has joined one."
"""The error message after Ray was shut down."""


class Settings(NamedTuple):
    """The executor's attributes that the pool needs, under the same names."""

    options: dict[str, Any]
    num_cpus: float
    hedge: bool
    shared_memory: bool
    start_timeout_s: float
    idle_s: float


def check_installed(address: str | None) -> None:
    """Check that Ray is installed, and its client if the address needs it, without importing them.

    Args:
        address: See `RayExecutor`.

    Raises:
        MissingExtra: One is not installed.
    """
    client = (address or os.environ.get("RAY_ADDRESS") or "").startswith("ray://")
    if any(importlib.util.find_spec(module) is None for module in ("ray", "grpc")[: 1 + client]):
        raise _missing(client)


def import_ray(client: bool = False) -> Any:
    """Return the module `ray`.

    Args:
        client: Whether the Ray Client is needed, too.

    Raises:
        MissingExtra: One is not installed.
    """
    try:
        if client:
            importlib.import_module("grpc")
        return importlib.import_module("ray")
    except ImportError as error:
        raise _missing(client) from error


def _missing(client: bool) -> MissingExtra:
    what, extra = ("Ray and its client", "ray-client") if client else ("Ray", "ray")
    return MissingExtra(f'executor="ray" needs {what}', extra)


def connect(address: str | None, cpus: float) -> Any:
    """Join a cluster, or start one on this machine; return the module `ray`.

    Args:
        address: See `RayExecutor`.
        cpus: The number of CPUs that the workers need, if a cluster is started here.

    Raises:
        ClusterUnavailable: There is no cluster at the address.
        MissingExtra: Ray is not installed.
        ValueError: This process has joined another cluster.
    """
    ray = import_ray()
    if ray.is_initialized():
        _check_joined(ray, address)
        return ray
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    if wanted.startswith("ray://"):
        import_ray(client=True)
        warn_user(
            f"the rank reaches {wanted} through the Ray Client, which passes every batch and every call through one "
            "server, at a tenth of the speed. Run the rank on a machine of the cluster to avoid it.",
        )
    if wanted == "auto" and _has_ended():
        wanted = "local"
    elif wanted not in ("auto", "local"):
        _check_reachable(wanted)
    settings: dict[str, Any] = {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, int(-(-cpus // 1)))}
    if wanted != "local":
        try:
            ray.init(wanted, log_to_driver=True)
            return ray
        except ConnectionError as error:
            causes = _causes(error)
            if any(type(one).__name__ == "AuthenticationError" for one in causes):
                raise ClusterUnavailable(
                    f"the Ray cluster at {wanted!r} requires a token: start this process with RAY_AUTH_MODE=token, and "
                    "with the same token as the cluster"
                ) from error
            if address or wanted != "auto":
                raise ClusterUnavailable(f"{_unavailable(wanted)} ({causes[-1]})") from error
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        warn_user(
            "no Ray cluster is running, so each rank starts its own on this machine, each with all CPUs. "
            "Start one before the ranks (ray start --head), or pass RayExecutor(address=...).",
        )
    os.environ.setdefault("RAY_worker_niceness", "0")  # as local workers have; Ray's default is 15
    ray.init("local", **settings)
    return ray


def _causes(error: BaseException) -> list[BaseException]:
    """Return an exception and the chain of its causes."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return causes


def _unavailable(address: str) -> str:
    return (
        f"there is no Ray cluster at {address!r}. Start one with `ray start --head`, pass its address as "
        'RayExecutor(address="host:port"), or leave out the address and RAY_ADDRESS to start one on this machine.'
    )


def _check_joined(ray: Any, address: str | None) -> None:
    if address in (None, "auto", "local") or address.startswith("ray://"):
        return
    joined = gcs_address(ray)
    if joined and address != joined:
        raise ValueError(
            f"address={address!r} is not allowed: this process has joined the Ray cluster at {joined!r}, and can be "
            "in only one. Leave the address out, or call ray.shutdown() before."
        )


def _check_reachable(address: str) -> None:
    """Raise within seconds if nothing listens at the address; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f'address={address!r} is not allowed: expected "host:port", "ray://host:port", "auto" or "local". '
            "`ray start --head` prints it."
        )
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterUnavailable(_unavailable(address)) from error


def _has_ended() -> bool:
    """Tell whether the cluster that Ray finds by itself has ended.

    When a head is killed its address stays in a file, and Ray would try to reach it for a quarter of an hour.
    """
    try:
        services = importlib.import_module("ray._private.services")
        _check_reachable(str(services.get_ray_address_from_environment("auto", None)))
    except ClusterUnavailable as error:
        return isinstance(error.__cause__, ConnectionRefusedError)  # otherwise its machine may only be slow
    except (ConnectionError, ValueError, ImportError, AttributeError, TypeError):
        return False  # there is no cluster, or this version of Ray lacks the private function
    return False


def gcs_address(ray: Any) -> str:
    """Return the head's address; "" if Ray does not tell it."""
    with suppress(Exception):  # the Ray Client does not tell it
        return str(ray.get_runtime_context().gcs_address or "")
    return ""


def job_of(ray: Any) -> str:
    """Return Ray's id of this process's connection to the cluster."""
    return str(ray.get_runtime_context().get_job_id())


def starts_at_once(ray: Any) -> int:
    """Return the number of actors that should start at the same time: as many as the cluster has CPUs, but at least 1.

    Actors that share a CPU delay each other while they import torch, and the first batch comes with the first of them.
    What a node declares is believed, unless it is on this machine, whose CPUs can be counted.
    """
    here = elsewhere = 0.0
    for node in ray.nodes():
        cpus = node["Resources"].get("CPU", 0.0) if node["Alive"] else 0.0
        if node["NodeManagerHostname"] == platform.node():
            here += cpus
        else:
            elsewhere += cpus
    return max(1, int(elsewhere + min(here, cpu_count() or 1)))


class Head:
    """The cluster's head. It is probed from time to time, since no worker can be replaced without it.

    Attributes:
        address: Its address; "" if Ray does not tell it.
        job: Ray's id of this process's connection to the cluster.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.address = gcs_address(ray)
        self.job = job_of(ray)
        self._by_client = bool(ray.util.client.ray.is_connected())
        self._by_tls = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
        self._asked_s = self._seen_s = time.monotonic()

    def lost(self) -> bool:
        """Tell whether it has not answered for `_LOST_S`; probe it if the last probe is old."""
        if self.address and time.monotonic() - self._asked_s > _PROBE_EVERY_S:
            self.answers()
        return self._asked_s - self._seen_s > _LOST_S

    def joined(self) -> bool:
        """Tell whether this process is still in the cluster."""
        with suppress(Exception):  # Ray is being shut down
            # Through the client this would be a remote call, and `is_initialized` already tells of a lost connection.
            return bool(self._ray.is_initialized()) and (self._by_client or job_of(self._ray) == self.job)
        return False

    @property
    def loss_message(self) -> str:
        """The error message after its loss."""
        return (
            f"the head of the Ray cluster, {self.address}, has not answered for some time. Ray ends this process "
            "when the head has been away for 60 s: save what you need."
        )

    def answers(self) -> bool:
        """Tell whether it answers now. If it does not, each of Ray's calls about the cluster takes a minute."""
        before_s, self._asked_s = self._asked_s, time.monotonic()
        if self._seen_s == before_s:  # a time without probes is no time without answers
            self._seen_s = max(before_s, self._asked_s - _PROBE_EVERY_S)
        if self.address:
            host, _, port = self.address.rpartition(":")
            try:
                with socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S) as connection:
                    # The system accepts connections for a program that hangs or is just being ended, too. A gRPC
                    # server sends its settings at once; with TLS it waits for the client.
                    if not self._by_tls and not connection.recv(1):
                        return False
            except OSError:
                return False
        self._seen_s = self._asked_s
        return True


def describe_resources(ray: Any, head: Head, needs: dict[str, float]) -> str:
    """Describe what each worker needs, and how much of it the cluster has and has free."""
    if not head.answers():
        return f"the cluster's head, {head.address}, does not answer"
    with suppress(Exception):  # this is only for an error message, and the cluster may have ended
        total, free = ray.cluster_resources(), ray.available_resources()
        has = [f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}" for name in needs]
        each = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
        return f"each needs {each}; of the cluster's resources {', '.join(has)} are free"
    return "the cluster does not tell what resources it has"


def workers_that_fit(ray: Any, head: Head, needs: dict[str, float]) -> int | None:
    """Return for how many more workers the cluster has free resources; None if it does not tell, or they need none.

    Args:
        ray: The module, connected.
        head: The cluster's head.
        needs: What each worker reserves.
    """
    if not head.answers():
        return 0
    with suppress(Exception):  # the cluster may have ended
        free = ray.available_resources()
        return min((int(free.get(name, 0.0) / amount) for name, amount in needs.items() if amount > 0), default=None)
    return None


def few_started(up: int, workers: int, resources: str) -> str:
    """Return the warning that not all workers have come up."""
    return (
        f"{up} of {workers} Ray workers have come up: {resources}. The epoch goes on with these; the others join it "
        "when there is room."
    )


def none_started(up: int, workers: int, start_timeout_s: float, resources: str) -> str:
    """Return the error message that too few workers came up, with the remedies."""
    return (
        f"{up or 'none'} of {workers} Ray workers came up within {start_timeout_s:g} s: {resources}. Use fewer workers "
        "or a smaller RayExecutor(num_cpus=...), or add nodes. If these workers themselves have taken the missing "
        "resources they are slow to start: raise start_timeout_s."
    )
