"""Ray itself: joining or starting a cluster, what it has room for, and whether its head lives."""

import importlib
import importlib.util
import os
import socket
import time
import warnings
from contextlib import suppress
from typing import Any, NamedTuple

from headrace.errors import ClusterUnavailable, MissingExtra

_CONNECT_S = 3.0
"""How long a connection to a cluster's head may take."""

_PROBE_S = 0.5
"""How long the head may take to accept a connection."""

_ASK_S = 5.0
"""How often the head is looked for."""

_LOST_S = 20.0
"""After how long without an answer it is lost: Ray itself ends the process after 60 s."""


LEFT = "this process has left the Ray cluster that its workers were in: begin another epoch when it has joined one."
"""What to say where Ray was shut down."""


class Settings(NamedTuple):
    """What the pool needs to know of its executor, under the names that it has there; and Ray's options."""

    options: dict[str, Any]
    num_cpus: float
    hedge: bool
    shared_memory: bool
    start_timeout_s: float
    idle_s: float


def check_installed(address: str | None) -> None:
    """See, without importing it, whether Ray is installed, and its client if the address needs that.

    Args:
        address: As of `RayExecutor`.

    Raises:
        MissingExtra: It is not.
    """
    client = (address or os.environ.get("RAY_ADDRESS") or "").startswith("ray://")
    if any(importlib.util.find_spec(module) is None for module in ("ray", "grpc")[: 1 + client]):
        raise _missing(client)


def import_ray(client: bool = False) -> Any:
    """Return the module `ray`.

    Args:
        client: Whether a remote driver is needed as well.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        if client:
            importlib.import_module("grpc")
        return importlib.import_module("ray")
    except ImportError as error:
        raise _missing(client) from error


def _missing(client: bool) -> MissingExtra:
    what, extra = ("Ray and its client", "ray-client") if client else ("Ray", "ray")
    return MissingExtra(f'executor="ray" needs {what}: pip install "headrace[{extra}]"')


def connect(address: str | None, cpus: float) -> Any:
    """Join the cluster that is meant, or start one on this machine; return the module `ray`.

    Args:
        address: As of `RayExecutor`.
        cpus: How many CPUs the workers need, for a cluster that is started here.

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
        warnings.warn(
            f"the rank reaches {wanted} through the Ray Client, which passes every batch and every call through one "
            "server, at a tenth of the speed. Run the rank on a machine of the cluster to do without.",
            stacklevel=7,
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
                    f"the Ray cluster at {wanted!r} asks for a token: start this process with RAY_AUTH_MODE=token, and "
                    "with the token that the cluster was started with"
                ) from error
            if address or wanted != "auto":
                raise ClusterUnavailable(f"{_unavailable(wanted)} ({causes[-1]})") from error
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        warnings.warn(
            "no Ray cluster is running, so each rank starts one of its own on this machine, each with all its CPUs. "
            "Start one before the ranks (ray start --head), or pass RayExecutor(address=...).",
            stacklevel=7,
        )
    os.environ.setdefault("RAY_worker_niceness", "0")  # as local workers; Ray's own are at 15, behind everything else
    ray.init("local", **settings)
    return ray


def _causes(error: BaseException) -> list[BaseException]:
    """Return an exception and what it was raised from."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return causes


def _unavailable(address: str) -> str:
    return (
        f"there is no Ray cluster at {address!r}. Start one with `ray start --head`, pass its address as "
        'RayExecutor(address="host:port"), or leave the address and RAY_ADDRESS out to start one on this machine.'
    )


def _check_joined(ray: Any, address: str | None) -> None:
    if address in (None, "auto", "local") or address.startswith("ray://"):
        return
    joined = gcs_address(ray)
    if joined and address != joined:
        raise ValueError(
            f"address={address!r} is not allowed: this process has joined the Ray cluster at {joined!r}, and can be "
            "in one only. Leave the address out, or call ray.shutdown() before."
        )


def _check_reachable(address: str) -> None:
    """Find out in seconds that nobody listens, where Ray would try for long."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f'address={address!r} is not allowed: expected "host:port", "ray://host:port", "auto" or "local". '
            "`ray start --head` prints it."
        )
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ClusterUnavailable(_unavailable(address)) from error


def _has_ended() -> bool:
    """Tell whether the cluster that Ray finds by itself is no more.

    Its address stays in a file where its head was killed, and Ray would try to reach it for a quarter of an hour.
    """
    try:
        services = importlib.import_module("ray._private.services")
        _check_reachable(str(services.get_ray_address_from_environment("auto", None)))
    except ClusterUnavailable as error:
        return isinstance(error.__cause__, ConnectionRefusedError)  # otherwise its machine may only be slow
    except (ConnectionError, ValueError, ImportError, AttributeError, TypeError):
        return False  # there is none; or the function is gone, which is Ray's own
    return False


def gcs_address(ray: Any) -> str:
    """Return the head's address; "" where it cannot be known."""
    with suppress(Exception):  # the client knows none
        return str(ray.get_runtime_context().gcs_address or "")
    return ""


def job_of(ray: Any) -> str:
    """Return what Ray calls this process's connection to the cluster."""
    return str(ray.get_runtime_context().get_job_id())


class Head:
    """The cluster's head, looked for from time to time: without it no worker can be replaced.

    Attributes:
        address: Where it was; "" where that cannot be known.
        job: What Ray calls this process's connection to the cluster.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.address = gcs_address(ray)
        self.job = job_of(ray)
        self._by_client = bool(ray.util.client.ray.is_connected())
        self._asked_s = self._seen_s = time.monotonic()

    def lost(self) -> bool:
        """Tell whether it has not answered for so long that it will not."""
        if self.address and time.monotonic() - self._asked_s > _ASK_S:
            self.answers()
        return self._asked_s - self._seen_s > _LOST_S

    def joined(self) -> bool:
        """Tell whether this process is still in the cluster."""
        with suppress(Exception):  # it is about to leave it
            # The client would have to ask, and knows by itself when it is cut off.
            return bool(self._ray.is_initialized()) and (self._by_client or job_of(self._ray) == self.job)
        return False

    @property
    def loss_message(self) -> str:
        """What to say of its loss."""
        return (
            f"the head of the Ray cluster, {self.address}, has not answered for some time. Ray ends processes that it "
            "has left alone for 60 s: save what you need."
        )

    def answers(self) -> bool:
        """Tell whether it answers now. Where it does not, whatever Ray is asked about the cluster takes a minute."""
        before_s, self._asked_s = self._asked_s, time.monotonic()
        if self._seen_s == before_s:  # that nobody has asked since says nothing about it
            self._seen_s = max(before_s, self._asked_s - _ASK_S)
        if self.address:
            host, _, port = self.address.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
            except OSError:
                return False
        self._seen_s = self._asked_s
        return True


def room(ray: Any, head: Head, needs: dict[str, float]) -> str:
    """Say what the cluster has, and has left, of what each worker needs."""
    if not head.answers():
        return f"the cluster's head, {head.address}, does not answer"
    with suppress(Exception):  # it is for an error message; the cluster may be gone
        total, free = ray.cluster_resources(), ray.available_resources()
        has = [f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}" for name in needs]
        each = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
        return f"each needs {each}; of the cluster's resources {', '.join(has)} are free"
    return "the cluster does not say what it has room for"


def few_started(up: int, workers: int, room: str) -> str:
    """Say that not all workers have come up."""
    return (
        f"{up} of {workers} Ray workers have come up: {room}. The epoch goes on with those that are there; the others "
        "join it when there is room."
    )


def none_started(up: int, workers: int, start_timeout_s: float, room: str) -> str:
    """Say that too few workers came up, and what to do."""
    return (
        f"{up or 'none'} of {workers} Ray workers came up within {start_timeout_s:g} s: {room}. Use fewer workers or a "
        "smaller RayExecutor(num_cpus=...), or add nodes; where what is missing is taken by these workers themselves "
        "they are slow to start: raise start_timeout_s."
    )
