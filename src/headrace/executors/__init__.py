"""Where work runs: one seam, many backends."""

from headrace.executors.base import Executor, Failure, Future, Pool
from headrace.executors.inline import InlineExecutor
from headrace.executors.process.pool import ProcessExecutor
from headrace.executors.ray.executor import RayExecutor
from headrace.executors.thread.pool import ThreadExecutor

__all__ = [
    "Executor",
    "Failure",
    "Future",
    "InlineExecutor",
    "Pool",
    "ProcessExecutor",
    "RayExecutor",
    "ThreadExecutor",
]
