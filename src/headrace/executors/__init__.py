"""Executors: one seam, many backends."""

from headrace.executors.base import Executor, Pool
from headrace.executors.future import Failure, Future
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
