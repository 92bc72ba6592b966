"""Where work runs: one seam, many backends."""

from headrace.executors.base import Executor, Failure, Future, Pool
from headrace.executors.inline import InlineExecutor
from headrace.executors.process import ProcessExecutor
from headrace.executors.ray import RayExecutor
from headrace.executors.thread import ThreadExecutor

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
