"""A pool in virtual time: the real dispatcher and the real waiting, with workers and links that a seed decides on."""

import heapq
import operator
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import default_collate

from headrace.errors import DeliveryTimeout, WorkerDied
from headrace.executors.dispatch import rules
from headrace.executors.dispatch.dispatcher import live_holders
from headrace.executors.dispatch.peer import Dispatched, Peer
from headrace.executors.dispatch.pool import DispatchedPool
from headrace.executors.future import Future
from headrace.plan import Plan, Sequential
from headrace.types import PlanTask, Task
from headrace.worker.work import Work

WORK = Work([], default_collate, batched=True, plan=Plan(Sequential(), 10**6))

FOREVER_S, ALWAYS = 1e9, 99

HUNG_S = 60.0
"""When a task hangs in simulations, in seconds. Five minutes would be 6,000 looks of the waiting rank."""


class TooLateError(Exception):
    """The simulation has not come to its end in its time."""


@dataclass
class Schedule:
    """What happens in one simulation.

    Attributes:
        workers: The number of workers.
        ahead: Tasks that are outstanding for each worker.
        deals_all: Whether workers get all tasks at once, and before they are up.
        durations: The time of each task, in seconds.
        start_s: The time in which a worker starts, in seconds.
        latency_s: The time of a message, in seconds.
        steps_s: The time between two batches in which the rank does something else, in seconds.
        dies: How many attempts at a task end their worker.
        hangs: How many attempts at a task never end.
        lates: Seconds by which the first attempt at a task is late.
        small: Whether batches fit into a message with others.
        kills: After which batches a worker is killed, and which.
        resizes: After which batches there is another number of workers.
        false_starts: How many starts fail, at the beginning.
    """

    workers: int
    ahead: int
    deals_all: bool
    durations: list[float]
    start_s: float = 0.01
    latency_s: float = 0.0001
    steps_s: list[float] = field(default_factory=list)
    dies: dict[int, int] = field(default_factory=dict)
    hangs: dict[int, int] = field(default_factory=dict)
    lates: dict[int, float] = field(default_factory=dict)
    small: bool = False
    kills: dict[int, int] = field(default_factory=dict)
    resizes: dict[int, int] = field(default_factory=dict)
    false_starts: int = 0

    @classmethod
    def of(cls, seed: int) -> "Schedule":
        """Draw a schedule."""
        draw = random.Random(seed)
        tasks, workers = draw.randint(5, 40), draw.randint(1, 5)
        each_s = 10 ** draw.uniform(-4.5, 0)
        spread = draw.choice((0.0, 0.2, 1.0))
        durations = [each_s * draw.lognormvariate(0, spread) for _ in range(tasks)]
        one = cls(workers, draw.randint(1, 4), draw.random() < 0.5, durations, 10 ** draw.uniform(-2, 0.5))
        one.steps_s = [draw.choice((0.0, 0.0, each_s, 5 * each_s)) for _ in range(tasks)]
        one.small = draw.random() < 0.5
        calm = draw.random() < 0.2

        def some(most: int) -> list[int]:
            return draw.sample(range(tasks), 0 if calm else draw.randint(0, most))

        one.dies = {task: draw.choice((1, 1, 2, ALWAYS)) for task in some(2)}
        one.hangs = {task: draw.choice((1, 1, 1, ALWAYS)) for task in some(2) if task not in one.dies}
        # Not among the first, which would be taken for what a task takes.
        one.lates = {task: draw.uniform(0, 40) for task in some(1) if task > 12 and task not in one.hangs}
        one.kills = {task: draw.randrange(workers) for task in some(2)}
        one.resizes = {task: draw.randint(1, 6) for task in some(2)}
        one.false_starts = draw.choice((0, 0, 0, 1, 3))
        return one

    @property
    def expected(self) -> list[Any]:
        """What the reader gets: a task's number, or the error in its place."""

        def outcome(task: int) -> Any:
            if self.dies.get(task) == ALWAYS:
                return WorkerDied
            return DeliveryTimeout if self.hangs.get(task) == ALWAYS else task

        return [outcome(task) for task in range(len(self.durations))]

    @property
    def limit_s(self) -> float:
        """Twice the ideal time, and the time in which faults are found."""
        fewest = min([self.workers, *self.resizes.values()])
        median = sorted(self.durations)[len(self.durations) // 2]
        longest = max(self.durations)
        deaths = [min(count, 2 * rules.MOST_DEATHS) for count in self.dies.values()]
        again = sum(map(operator.mul, map(self.durations.__getitem__, self.dies), deaths))
        ideal_s = (sum(self.durations) + again) / fewest + longest + sum(self.steps_s) + self.start_s
        found_s = rules.OVERDUE_S + 2 * max(median, longest) + 3 * rules.PATIENCE_S + 2 + 2 * longest + self.start_s
        first_s = 31.0 if self.hangs or self.lates else 0.0  # before an answer nobody knows what is late
        if self.hangs.get(0) == ALWAYS:
            first_s *= 50  # nor what hangs
        faults = sum(deaths) + 2 * len(self.hangs) + len(self.lates) + len(self.kills) + len(self.resizes)
        each_hang_s = max(HUNG_S, 50 * longest) + 2
        hung_s = sum(count == ALWAYS for count in self.hangs.values()) * each_hang_s
        return (
            2 * ideal_s
            + first_s
            + faults * found_s
            + hung_s
            + sum(self.lates.values())
            + self.false_starts * self.start_s
        )


class SimulatedPeer(Peer[Dispatched]):
    """The rank's record of a simulated worker, and the worker itself."""

    def __init__(self, worker: int, false_starts: int, patience_s: float | None) -> None:
        super().__init__(worker, false_starts, patience_s)
        self.inbox: deque[list[Dispatched]] = deque()
        self.alive = True
        self.busy = True  # it starts


class SimulatedPool(DispatchedPool[SimulatedPeer]):
    """Workers in virtual time.

    Attributes:
        broken_rules: What was seen that must not be.
        now_s: The time.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.now_s, self.limit_s = 0.0, schedule.limit_s
        super().__init__(WORK, schedule.workers, schedule.deals_all, clock=lambda: self.now_s)
        self.schedule = schedule
        self.broken_rules: list[str] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._arrived: deque[Callable[[], None]] = deque()
        self._made = 0
        self._attempts: dict[int, int] = {}
        self._deaths: dict[int, int] = {}
        self._false_starts = schedule.false_starts
        deal, assign = self._dispatcher.deal, self._dispatcher.assign

        def checked_assign(future: Dispatched, peer: Any) -> None:
            assign(future, peer)
            copies = sum(one.alive for one in live_holders(future, self.now_s))
            if copies > 2:
                self.broken_rules.append(f"{copies} copies of {future.number}")
            if peer.leaving:
                self.broken_rules.append(f"worker {peer.worker} leaves and gets a task")
            if self._dealing and len(peer.unanswered) > max(peer.credit, self._share):
                self.broken_rules.append(f"worker {peer.worker} has {len(peer.unanswered)} tasks")

        def checked_deal(peers: Any, workers: int) -> None:
            total = len(self._dispatcher.queue) + sum(len(one.unanswered) for one in self._everyone())
            self._most = max(self._most, total)
            self._share, self._dealing = -(-self._most // workers) if schedule.deals_all else 0, True
            deal(peers, workers)
            self._dealing = False

        self._most = self._share = 0
        self._dealing = False
        self._dispatcher.assign = checked_assign  # type: ignore[method-assign]
        self._dispatcher.deal = checked_deal  # type: ignore[method-assign]
        for worker in range(schedule.workers):
            self._peers.append(self._start(worker, 0, None))

    # The worlds's side.

    def _at(self, delay_s: float, what: Callable[[], None]) -> None:
        self._made += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._made, what))

    def _arrive(self, what: Callable[[], None]) -> None:
        self._at(self.schedule.latency_s, lambda: self._arrived.append(what))

    def run_until(self, until_s: float) -> None:
        """Let workers work, also while the rank does something else."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self._events)
            what()
        self.now_s = until_s

    def _pump(self, timeout_s: float) -> bool:
        if self.now_s > self.limit_s:
            raise TooLateError
        until_s = self.now_s + timeout_s
        while not self._arrived and self._events and self._events[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self._events)
            what()
        if not self._arrived:
            self.now_s = until_s
            return False
        while self._arrived:
            self._arrived.popleft()()
        if self._dispatcher.ready:
            self._deal()
        return True

    def _start(self, worker: int, false_starts: int, patience_s: float | None) -> SimulatedPeer:
        peer = SimulatedPeer(worker, false_starts, patience_s)
        peer.takes = self.schedule.deals_all
        if self._false_starts:
            self._false_starts -= 1
            self._at(self.schedule.start_s, lambda: self.kill(peer))
        else:
            self._at(self.schedule.start_s, lambda: self._comes_up(peer))
        return peer

    def _comes_up(self, peer: SimulatedPeer) -> None:
        if peer.alive:
            self._arrive(lambda: None if peer.lost else self._dispatcher.set_up(peer))
            peer.busy = False
            self._next_message(peer)

    def kill(self, peer: SimulatedPeer) -> None:
        """Kill a worker; the rank hears of it later."""
        if peer.alive:
            peer.alive = False
            self._arrive(lambda: self._lose(peer))

    def _end(self, peer: SimulatedPeer) -> None:
        peer.alive = False

    def _death(self, peer: SimulatedPeer, false_starts: int, cause: BaseException | None) -> BaseException:
        return WorkerDied(f"worker {peer.worker}, {false_starts}")

    def _new_future(self, task: Task, number: int, worker: int | None) -> Dispatched:
        return Dispatched(task, number)

    def _transmit(self, peer: SimulatedPeer, futures: Sequence[Dispatched]) -> None:
        peer.inbox.append([*futures])
        self._at(self.schedule.latency_s, lambda: self._next_message(peer))

    # The worker's side.

    def _next_message(self, peer: SimulatedPeer) -> None:
        if peer.alive and not peer.busy and peer.inbox:
            peer.busy = True
            self._compute(peer, peer.inbox.popleft(), [])

    def _compute(self, peer: SimulatedPeer, left: list[Dispatched], done: list[tuple[Dispatched, float]]) -> None:
        if not left:
            self._arrive(lambda: self._answered(peer, done))
            peer.busy = False
            self._next_message(peer)
            return
        future, number = left[0], left[0].number
        attempt = self._attempts[number] = self._attempts.get(number, 0) + 1
        took_s = self.schedule.durations[number]
        if attempt <= self.schedule.hangs.get(number, 0):
            took_s = FOREVER_S
        elif attempt == 1:
            took_s += self.schedule.lates.get(number, 0.0)

        def computed() -> None:
            if not peer.alive:
                return
            if attempt <= self.schedule.dies.get(number, 0):
                self._note_death(future)
                self.kill(peer)
                return
            self._compute(peer, left[1:], [*done, (future, took_s)])

        self._at(took_s, computed)

    def _note_death(self, future: Dispatched) -> None:
        """Count the workers that a task ends: the task is to blame for each, and given up at `MOST_DEATHS`."""
        deaths = self._deaths[future.number] = self._deaths.get(future.number, 0) + 1
        # A second copy may end one more. Tasks that are answered together may be blamed for each other.
        if deaths > rules.MOST_DEATHS + 1 + rules.DOUBTFUL * self.schedule.small:
            self.broken_rules.append(f"task {future.number} has ended {deaths} workers")

    def _answered(self, peer: SimulatedPeer, done: Sequence[tuple[Dispatched, float]]) -> None:
        if peer.lost:
            return  # an answer that comes too late; its socket is closed
        for future, took_s in done:
            if peer.unanswered[0] is not future:
                self.broken_rules.append(f"worker {peer.worker} answers {future.number} out of turn")
            peer.note_speed(took_s, rules.MOST_BUNDLE if self.schedule.small else 1)
            was_done = future.done()
            if not was_done:
                future.resolve(future.number)
            self._dispatcher.answered(future, peer, was_done)

    def close(self) -> None:
        for peer in self._forget_all():
            peer.drop_tasks()


def simulate(schedule: Schedule) -> list[str]:
    """Read all batches; return what went wrong."""
    pool = SimulatedPool(schedule)
    window: deque[Future] = deque()
    tasks = iter(range(len(schedule.durations)))
    got: list[Any] = []

    def ask() -> None:
        while len(window) < schedule.ahead * pool.workers and (number := next(tasks, None)) is not None:
            window.append(pool.submit(PlanTask(0, number, 0)))

    ask()
    while window:
        try:
            pool.wait([window[0]])
        except TooLateError:
            return [*pool.broken_rules, f"no batch {len(got)} after {pool.now_s:.1f} s, the limit"]
        try:
            got.append(window.popleft().result())
        except (WorkerDied, DeliveryTimeout) as error:
            got.append(type(error))
        place = len(got) - 1
        if place in schedule.kills:
            pool.kill(pool._peers[schedule.kills[place] % pool.workers])
        if place in schedule.resizes:
            pool.resize(schedule.resizes[place])
        ask()
        pool.run_until(pool.now_s + schedule.steps_s[place])
    wrong = pool.broken_rules
    if got != schedule.expected:
        wrong.append(f"got {got}, expected {schedule.expected}")
    if pool.now_s > pool.limit_s:
        wrong.append(f"took {pool.now_s:.1f} s, where {pool.limit_s:.1f} s are the limit")
    # What was given twice is answered twice, or its worker is replaced.
    pool.limit_s = pool.now_s + 200
    while pool.owed and pool.now_s < pool.limit_s - 1:
        pool._pump(0.5)
        pool._look([], None)
    for peer in pool._everyone():
        if peer.unanswered and (peer.unanswered[0].done() or not schedule.hangs):
            wrong.append(f"worker {peer.worker} never answers and is not replaced")
    if any(not peer.unanswered for peer in pool._leaving):
        wrong.append("a worker that has finished does not leave")
    if len(pool._peers) != pool.workers:
        wrong.append(f"{len(pool._peers)} workers instead of {pool.workers}")
    pool.close()
    return wrong
