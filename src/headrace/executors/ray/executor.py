"""The executor whose workers are Ray actors, on this machine and on others."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from headrace.errors import bad_type, bad_value, check_flag, whole_number
from headrace.executors.base import Executor, Pool
from headrace.executors.ray.cluster import Settings, check_installed, connect
from headrace.executors.ray.idle import IDLE_ACTORS
from headrace.executors.ray.pool import RayPool
from headrace.system.interrupts import InterruptsHeld
from headrace.worker.work import Work

_OWN_OPTIONS = ("CPU", "GPU", "memory", "object_store_memory")
"""Names of resources that Ray has options of their own for, and refuses among the others."""


@dataclass(frozen=True)
class RayExecutor(Executor):
    """Run work in Ray actors, `num_workers` of them for each rank, under a plan unless the user's sampler decides.

    A process that has joined a cluster uses it. Otherwise it joins the cluster at `address`, at RAY_ADDRESS, or on this
    machine. If there is none, it starts one on this machine. The epoch begins with the first actor that comes up;
    others join it as they come up. If an actor or its node dies, it is replaced, and its tasks are computed again.

    The dataset is pickled and sent once for all workers; a large one should be a `headrace.Deferred`. With
    `persistent_workers=True` the actors stay from epoch to epoch. Otherwise each epoch begins with new copies of the
    dataset, in the actor processes of the epoch before if it ended less than `idle_s` ago.

    Args:
        address: The cluster's head, "host:port"; or "auto", "local" or "ray://host:port". Default: as described above.
        num_cpus: CPUs that each worker reserves, >= 0. Torch gets as many threads there, but at least one. With
            more than one, the last bits of large sums, products and transforms may differ from all other executors.
        resources: Custom resources that each worker reserves, by name.
        scheduling_strategy: Ray's option of this name. Default: "DEFAULT", any node with free resources, also outside
            of the rank's placement group.
        label_selector: Labels that a worker's node must have; Ray's option of this name.
        runtime_env: The environment of the workers; Ray's option of this name.
        hedge: Whether a second worker also computes a batch that the reader waits for and that is overdue.
        shared_memory: Whether workers on the rank's own machine send batches in shared memory. Where they cannot, as
            from another container, batches come through Ray's object store in any case.
        start_timeout_s: Time limit for the first worker to come up, in seconds.
        idle_s: How long an actor that no pool needs is kept for the next pool, in seconds.

    Raises:
        TypeError: An option is of the wrong type.
        ValueError: An option lies outside its range.
    """

    by_number = True
    local = False
    resizes = True
    ignores = ("multiprocessing_context",)

    address: str | None = None
    num_cpus: float = 1.0
    resources: Mapping[str, float] | None = None
    scheduling_strategy: Any = None
    label_selector: Mapping[str, str] | None = None
    runtime_env: Mapping[str, Any] | None = None
    hedge: bool = True
    shared_memory: bool = True
    start_timeout_s: float = 60.0
    idle_s: float = 5.0

    def __post_init__(self) -> None:
        if self.address is not None and not isinstance(self.address, str):
            bad_type("address", self.address, 'a string such as "host:port"', "Leave it out to find the cluster.")
        for name in ("num_cpus", "start_timeout_s", "idle_s"):
            number = _checked_number(name, getattr(self, name), positive=name == "start_timeout_s")
            object.__setattr__(self, name, number)
        for name in ("resources", "label_selector", "runtime_env"):
            _check_names(name, getattr(self, name))
        for name, amount in (self.resources or {}).items():
            _checked_number(f"resources[{name!r}]", amount)
            if name in _OWN_OPTIONS:
                fix = "Pass num_cpus= for CPUs. GPUs are for training, and memory is not reserved."
                bad_value("resources", self.resources, "custom resources of the cluster alone", fix)
        labels: Mapping[str, object] = self.label_selector or {}
        for name, value in labels.items():
            if not isinstance(value, str):
                fix = 'As in {"region": "eu"}, or {"region": "!us"}.'
                bad_type(f"label_selector[{name!r}]", value, "a string", fix)
        for name in ("hedge", "shared_memory"):
            check_flag(name, getattr(self, name), default=True)

    def check_installed(self) -> None:
        """Check that Ray is installed, and its client if the address needs it.

        Raises:
            MissingExtra: One is not installed.
        """
        check_installed(self.address)

    @property
    def options(self) -> dict[str, Any]:
        """Ray's options of each actor. Ray restarts and retries nothing, since the pool does."""
        given = {
            "num_cpus": self.num_cpus,
            "resources": {name: _checked_number(name, one) for name, one in (self.resources or {}).items()} or None,
            "scheduling_strategy": self.scheduling_strategy or "DEFAULT",
            "label_selector": dict(self.label_selector) if self.label_selector else None,
            "runtime_env": dict(self.runtime_env) if self.runtime_env else None,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        return {name: value for name, value in given.items() if value is not None}

    def prestart(self, num_workers: int, keep_s: float = 60.0) -> None:
        """Start the actors of a loader that begins to read later, so that its first batch comes at once.

        An actor takes seconds to start, since it imports torch. In a script, call this before the model is built. The
        process joins or starts the cluster as a loader does. The actors serve the next loader whose executor has the
        same options; a loader that needs fewer leaves some, and one that needs more starts the others. Meanwhile they
        hold the resources that they reserve.

        Args:
            num_workers: The number of actors. Those that are idle already count.
            keep_s: How long they wait for a loader before they end, in seconds.

        Raises:
            ClusterUnavailable: There is no cluster at the address.
            MissingExtra: Ray is not installed.
            TypeError: An argument is of the wrong type.
            ValueError: An argument lies outside its range.
        """
        num_workers = whole_number("num_workers", num_workers, fix="Pass that of the loader.")
        keep_s = _checked_number("keep_s", keep_s)
        ray = connect(self.address, num_workers * self.num_cpus)
        _check_environment(ray, self.runtime_env)
        with InterruptsHeld():
            IDLE_ACTORS.start(ray, self.options, num_workers, keep_s)

    def start(self, work: Work, workers: int, context: Any = None) -> Pool:
        """Join or start the cluster, and start the actors; `context` is not used.

        Raises:
            ClusterUnavailable: There is no cluster at the address.
            MissingExtra: Ray is not installed.
            ValueError: `runtime_env` has a key that Ray does not know.
            Exception: Whatever pickle raises for a dataset that cannot be pickled.
        """
        ray = connect(self.address, workers * self.num_cpus)
        _check_environment(ray, self.runtime_env)
        with InterruptsHeld():
            mine = {name: getattr(self, name) for name in Settings._fields}
            return RayPool(ray, work, workers, Settings(**mine))


def _checked_number(name: str, value: Any, positive: bool = False) -> float:
    """Return a number as Python's own: an int if it is whole, as it was given, else a float."""
    low = "a finite number, more than 0" if positive else "a finite number, 0 or more"
    if isinstance(value, bool) or not isinstance(value, Real):  # numpy's scalars are such numbers, too
        bad_type(name, value, low, "Leave it out for the default.")
    number = int(value) if isinstance(value, Integral) else float(value)
    if not (number > 0 if positive else number >= 0) or not math.isfinite(number):
        bad_value(name, value, low, "Leave it out for the default.")
    return number


def _check_names(option: str, value: Any) -> None:
    if not isinstance(value, Mapping | None):
        bad_type(option, value, "None or a dictionary", "It is passed on to Ray.")
    for name in value or ():
        if not isinstance(name, str):
            bad_type(f"a key of {option}", name, "a string", "It is passed on to Ray.")


def _check_environment(ray: Any, runtime_env: Mapping[str, Any] | None) -> None:
    """Refuse keys that Ray does not know: it would leave them out, or fail when an actor starts."""
    known = ray.runtime_env.RuntimeEnv.known_fields
    if unknown := [name for name in runtime_env or () if name not in known]:
        public = sorted(name for name in known if not name.startswith("_"))
        bad_value(
            "runtime_env", runtime_env, f"keys of {public}", f"Ray {ray.__version__} does not know {unknown[0]!r}."
        )
