"""What limits a loader, from the times of its stages: a rule over figures of one visit.

The figures, per step: `s` seconds, of which the trainer waits `wait`; `w` seconds of a worker's work on a batch, `c`
CPU seconds of that, `e` seconds of it for writing the batch where the rank can read it; `t` seconds in which the rank
receives a batch, `r` CPU seconds of the trainer's thread inside `next()`. The blocked share is (w - c - q) / w, where
`q` is the time in which it could run and had no CPU. Where such a visit is known, it is that of a batch that is loaded
alone, in the trainer's thread: beside others it waits for the GIL, too. The first line that holds is the answer:

1. trainer: there is a training step, and wait <= 3 % of s.
2. transport: t or r is half of s or more, where workers are elsewhere than in the trainer's thread; or e is half of w
   or more.
3. cpu: c / s, the CPUs that all workers use, is 70 % of the CPUs or more.
4. gil: several threads of one process load, the machine has more than one CPU, and they use no more than 1.25 times as
   much CPU as one thread can have: c / (c + q) of the batch that is loaded alone. If its blocked share is half or more,
   they must use 0.6 to 1.25 CPUs together.
5. uneven: there is a training step, and the workers work less than 80 % of the time: a few slow batches are waited for.
6. storage: the blocked share is half or more.
7. handover: the trainer's thread loads by itself, and takes less time for a step than with workers.
8. cpu: otherwise.
"""

from dataclasses import dataclass
from enum import Enum

from headrace.tuning.race import TOLERANCE, Visit
from headrace.tuning.settings import INLINE, Setting

_HALF = 0.5
_BUSY = 0.7
_ONE_THREAD = (0.6, 1.25)
_IDLE = 0.8
_CROWDED = 0.2

_QUICK_S = 1e-3
"""Work on a batch that takes less is not worth a handover, however many CPUs are free: that takes 0.1 ms and more."""


class Limit(Enum):
    """What limits a loader."""

    TRAINER = "trainer"
    TRANSPORT = "transport"
    CPU = "cpu"
    GIL = "gil"
    UNEVEN = "uneven"
    STORAGE = "storage"
    HANDOVER = "handover"


_ADVICE = {
    Limit.TRAINER: "The loader keeps the trainer fed. Only a faster training step would help.",
    Limit.TRANSPORT: "Threads copy nothing between processes. Or make batches smaller: uint8 instead of float32, "
    "crops instead of whole pictures.",
    Limit.CPU: "Do less for each sample, in code that is compiled; prepare samples once and store them; or add CPUs, "
    'of other machines with executor="ray".',
    Limit.GIL: 'Python code runs in one thread at a time: executor="process" has a GIL for each worker.',
    Limit.UNEVEN: "Some batches take much longer than others. A larger prefetch_factor bridges longer ones; batches of "
    "similar work need fewer.",
    Limit.STORAGE: "Workers wait for what they read: more at a time with fetch_threads, larger reads (tar shards, "
    "read_many), or a nearer store.",
    Limit.HANDOVER: "More workers do not help. Do less for each sample, or make a batch in fewer calls: tensors in "
    "memory, __getitems__ or read_many.",
}


@dataclass(frozen=True)
class Machine:
    """What a diagnosis needs to know besides the visit.

    Attributes:
        cpus: CPUs that this process may use.
        step_s: Seconds of a training step; 0 without one.
    """

    cpus: float
    step_s: float = 0.0


@dataclass(frozen=True)
class Diagnosis:
    """What limits a loader.

    Attributes:
        limit: The answer.
        why: The figures that gave it, in words.
        advice: What would help.
    """

    limit: Limit
    why: str
    advice: str


def work_s(visit: Visit) -> float:
    """Return the seconds that a worker spent on a batch, without those in which it waited for a CPU."""
    stages = visit.stages
    return max(0.0, stages.read_s + stages.decode_s + stages.collate_s + stages.encode_s - visit.queue_s)


def cpu_s(visit: Visit) -> float:
    """Return the CPU seconds that a worker spent on a batch."""
    stages = visit.stages
    return stages.read_cpu_s + stages.decode_cpu_s + stages.collate_cpu_s + stages.encode_cpu_s


def blocked_share(visit: Visit) -> float:
    """Return the share of a worker's time in which it used no CPU."""
    work = work_s(visit)
    return max(0.0, work - cpu_s(visit)) / work if work else 0.0


def diagnose(
    setting: Setting, visit: Visit, machine: Machine, alone: Visit | None = None, with_workers_s: float = 0.0
) -> Diagnosis:
    """Return what limits a loader, by the rule of this module.

    Args:
        setting: The setting.
        visit: What was measured of it.
        machine: The machine, and the training step.
        alone: A visit with one worker or none that fetches one sample at a time.
        with_workers_s: Seconds per step of the fastest setting with workers; 0 if none was measured.
    """
    limit, why = _limit(setting, visit, machine, alone)
    crowded = 0.0 if alone is None else alone.queue_s / (work_s(alone) + alone.queue_s or 1.0)
    inline, slower = setting.executor == INLINE, with_workers_s / visit.seconds
    # Longer work may be slower with workers because there are no free CPUs for them.
    free = machine.cpus > 1 and crowded < _CROWDED
    if limit is Limit.CPU and inline and slower > 1 + TOLERANCE and (free or work_s(visit) < _QUICK_S):
        why = f"handing a batch over takes longer than making it: with workers a step takes {slower:.2f} times as long"
        return Diagnosis(Limit.HANDOVER, why, _ADVICE[Limit.HANDOVER])
    if limit is not Limit.TRAINER:
        why += "; nothing is loaded ahead" * inline
        if crowded >= _CROWDED:
            why += f"; other processes use the CPUs, too: a batch alone waited {crowded:.0%} of its time for one"
    return Diagnosis(limit, why, _ADVICE[limit])


def _limit(setting: Setting, visit: Visit, machine: Machine, alone: Visit | None) -> tuple[Limit, str]:
    step_s, work, used = visit.seconds, work_s(visit), cpu_s(visit) / visit.seconds
    inline = setting.executor == INLINE
    if machine.step_s and visit.wait_s <= TOLERANCE * step_s:
        return Limit.TRAINER, f"the trainer waits {visit.wait_s / step_s:.1%} of the time"
    receiving = max(visit.transport_s, visit.rank_cpu_s)
    if not inline and receiving >= _HALF * step_s:
        return (
            Limit.TRANSPORT,
            f"the trainer's process spends {receiving / step_s:.0%} of the time on receiving batches",
        )
    if work and visit.stages.encode_s >= _HALF * work:
        share = visit.stages.encode_s / work
        return Limit.TRANSPORT, f"workers spend {share:.0%} of their time on writing batches to shared memory"
    if used >= _BUSY * machine.cpus:
        return Limit.CPU, f"loading uses {used:.1f} of {machine.cpus:g} CPUs"
    blocked = blocked_share(visit if alone is None else alone)
    processes = setting.workers if setting.executor in ("process", "ray") else 1
    threads = max(1, setting.workers) * setting.fetch_threads // processes
    low, high = _ONE_THREAD
    if blocked < _HALF and alone is not None and cpu_s(alone):
        low, high = 0.0, high * cpu_s(alone) / (cpu_s(alone) + alone.queue_s)
    if threads > 1 and machine.cpus > 1 and low <= used / processes <= high:
        return Limit.GIL, f"{threads} threads of a process use {used / processes:.2g} CPUs together, as one alone would"
    busy = work / (max(1, setting.workers) * step_s)
    if machine.step_s and not inline and busy <= _IDLE:
        return Limit.UNEVEN, f"workers work {busy:.0%} of the time, and the trainer waits all the same"
    if blocked >= _HALF:
        return Limit.STORAGE, f"a worker's time is {blocked:.0%} waiting, without the CPU"
    return Limit.CPU, f"a worker's time is {1 - blocked:.0%} computing; all together use {used:.1f} CPUs"
