"""What keeps worker processes from coming up, in words: a main module without a guard, and starts that always fail."""

from multiprocessing import current_process
from signal import SIGKILL, SIGTERM

from headrace.executors.dispatch import rules
from headrace.executors.process.peer import ProcessPeer

FROM_OUTSIDE = (-SIGKILL, -SIGTERM)
"""Exit codes of processes that somebody else has ended: they say nothing about the next one."""

UNPICKLED = (
    "raised in the worker while it unpickled the dataset, collate_fn, worker_init_fn and the loader's other parts. "
    "What they need must be importable there"
)

_GUARD = 'A script must do its work below `if __name__ == "__main__":`'


def refuse_in_import_of_main() -> None:
    """End this process if it is a child that imports the main module again, and would start workers meanwhile.

    The main module lacks its guard then. The process that started this child raises the error for both; a traceback
    from each child would hide it.

    Raises:
        SystemExit: It is such a child.
    """
    if getattr(current_process(), "_inheriting", False):  # as multiprocessing finds it out
        raise SystemExit(
            "headrace: this child process imports the main module, and a DataLoader there starts workers of its own. "
            f"{_GUARD}."
        )


def why_not_up(peer: ProcessPeer, false_starts: int, start_method: str) -> str:
    """Return the likely causes of the end of processes that were not up yet.

    Args:
        peer: The last of them.
        false_starts: How many in a row have ended as workers of its number.
        start_method: The start method of the processes.
    """
    whose = f"process {peer.process.pid} ended, as worker {peer.worker},"
    if false_starts == rules.MOST_FALSE_STARTS:
        whose = f"{false_starts} processes in a row died as worker {peer.worker}"
    if peer.ready:
        return f"{whose} before it could do a task: worker_init_fn may have ended it"
    return (
        f"{whose} before it could do a task. Under the start method {start_method!r} each worker imports the main "
        f"module, and then unpickles the dataset. {_GUARD}. If it raised another error than that, its traceback is "
        "above, in the output of the worker"
    )
