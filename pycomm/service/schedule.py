"""When a push is applied, and when a pull may be answered: the rules, without tensors and network.

The clock of a worker is the number of its steps. ``staleness`` is how many steps a worker may be
ahead of the slowest: 0 is lock-step, where the pushes of one clock make one step of the optimizer;
with 1 or more, or None for no bound, each push is a step of its own at the moment it arrives
(stale synchronous parallel, Ho et al. 2013).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

MOST_STEPS = 2**62
"""No clock and no count goes above it: they travel as 64-bit numbers."""


class PushVerdict(enum.Enum):
    """What becomes of a push."""

    APPLY = enum.auto()
    """Now, as a step of its own."""
    KEEP = enum.auto()
    """Until all live workers have reached its clock."""
    REPEATED = enum.auto()
    """It came before: acknowledge it, and do not apply it."""
    LATE = enum.auto()
    """The others had gone on without the worker: acknowledge it, count it as lost."""


@dataclasses.dataclass
class Worker:
    """What a server knows of a worker."""

    incarnation: int
    """Drawn anew by each process that is this worker."""
    clock: int = 0
    """Of its last push that came or that it says was acknowledged."""
    applied: int = 0
    """Up to this clock its pushes are in the parameters, or counted as lost."""
    live: bool = True
    offset: int = 0
    """The server adds this to the process's own clock: steps that the others made without it."""
    behind: bool = False
    """It has not pulled since the others went on without it: its gradients are too old."""
    kept: list[int] = dataclasses.field(default_factory=list)
    """Clocks of its pushes that wait for those of the others."""


class StaleWorkerError(Exception):
    """Another process has become this worker."""


class Schedule:
    """The state of all workers on one server. Not thread-safe: the server's lock is around it."""

    def __init__(self, workers: int, staleness: int | None, servers: int = 1) -> None:
        self.staleness = staleness
        self.version = 0
        """How new the parameters are: with ``staleness=0`` the clock whose pushes were applied
        last, or after a restart of a server that is alone the largest that a worker came back
        with, if that is larger; otherwise the number of steps."""
        self.steps = 0
        """Of the optimizer. Clocks go on after a restart, so ``version`` may be larger."""
        self.lost_pushes = 0
        """Acknowledged ones that a restart of the server has forgotten, or that were LATE."""
        self._expected = workers
        self._servers = servers
        self._workers: dict[int, Worker] = {}
        self._replaced: set[int] = set()

    @property
    def expected(self) -> int:
        return self._expected

    @property
    def workers(self) -> Mapping[int, Worker]:
        return self._workers

    def joined(self, worker: int, incarnation: int, clock: int, begun: int | None = None) -> int:
        """A process says that it is ``worker``.

        Args:
            worker: Its number.
            incarnation: Drawn by the process.
            clock: Its last step that this server has acknowledged.
            begun: The clock that this server gave it first; None if it is new.

        Returns:
            Its own clock, or for a new process the one with which it begins: the version with
            ``staleness=0``, otherwise that of the slowest live worker.

        Raises:
            StaleWorkerError: It was replaced by a newer process.
        """
        if incarnation in self._replaced:
            raise StaleWorkerError(
                f"another process has become worker {worker} since this one was connected last. "
                "Try: give each worker its own number"
            )
        known = self._workers.get(worker)
        if known is not None and known.incarnation == incarnation:
            if (lost := clock + known.offset - known.clock) > 0:  # restarted from an older state
                self._lose(lost)
                known.clock = known.applied = clock + known.offset
                self._go_on_from(known.clock)
            if not known.live:
                self._catch_up(known)
            known.live = True
            return known.clock - known.offset
        live = known is None or known.live
        if known is not None:
            self._replaced.add(known.incarnation)
        if begun is not None:  # the server was restarted from a state without this process
            self._lose(max(0, clock - begun))
            begin = clock
        else:
            begin = self.version if self.staleness == 0 else self._slowest(but=worker)
        known = self._workers[worker] = Worker(incarnation, clock=begin, applied=begin, live=live)
        if begun is not None:
            self._go_on_from(begin)
        if not live:
            self._catch_up(known)
        known.live = True
        return begin

    def _go_on_from(self, clock: int) -> None:
        """In lock-step, all go on from the largest clock that a worker has after a restart: the
        steps from the state to it are lost. A worker whose push waits is lifted now, others in
        their next call, which says how far they are. Not with several servers: of a push that was
        under way some have the acknowledgement, so that they would lift a worker by different
        numbers, and workers could wait for each other."""
        if self.staleness != 0 or clock <= self.version or self._servers > 1:
            return
        self.version = clock
        for each in self._workers.values():
            if each.kept:
                self._catch_up(each)

    def _catch_up(self, known: Worker) -> None:
        """To where the others are, if they went on without it: else its pushes would be steps of
        their own, or the others would wait until it has made all steps that it missed."""
        at = known.kept[0] - 1 if known.kept else known.clock
        reached = at
        if self.staleness == 0:
            reached = self.version
        elif self.staleness is not None and not known.live:
            live = [each.clock for each in self._workers.values() if each.live]
            reached = min(live, default=known.clock)
        # With a push that waits, or live in lock-step, it has missed no step: _go_on_from() alone
        # has raised the version. One step less than another worker is no gap, but a push that had
        # not come yet.
        without = not known.live and not known.kept
        if (steps := reached - at) > (0 if without else 1):
            known.behind = known.behind or without
            known.offset += steps
            known.clock += steps
            known.applied += steps
            known.kept = [clock + steps for clock in known.kept]

    def left(self, worker: int) -> None:
        """It has ended, or has been away for too long: nobody waits for it any more."""
        self._workers[worker].live = False

    def _slowest(self, but: int) -> int:
        others = [each for number, each in self._workers.items() if number != but]
        live = [each.clock for each in others if each.live]
        return min(live, default=max((each.clock for each in others), default=0))

    def pushed(self, worker: int, clock: int) -> PushVerdict:
        """A push has come whole. Clocks that were left out count as lost.

        Raises:
            ValueError: The clock is not a number of a step.
        """
        known = self._workers[worker]
        if clock < 1:
            raise ValueError(f"a push has clock {clock}; they are counted from 1")
        if clock + known.offset <= known.clock:
            return PushVerdict.REPEATED
        self._lose(clock + known.offset - known.clock - 1)
        known.clock = clock + known.offset - 1
        self._catch_up(known)
        known.clock += 1
        clock = known.clock
        if known.behind:
            known.applied = clock
            self._lose(1)
            return PushVerdict.LATE
        if self.staleness == 0:
            known.kept.append(clock)
            return PushVerdict.KEEP
        known.applied = clock
        self.version += 1
        self.steps += 1
        return PushVerdict.APPLY

    def _lose(self, pushes: int) -> None:
        self.lost_pushes = min(self.lost_pushes + pushes, MOST_STEPS)

    def due(self) -> tuple[int, list[int]] | None:
        """The oldest clock whose pushes can be applied, with its workers in order; None if none.

        The caller applies them as one step and then calls due() again.
        """
        oldest = {number: each.kept[0] for number, each in self._workers.items() if each.kept}
        if not oldest or len(self._workers) < self._expected:
            return None
        clock = min(oldest.values())
        if any(each.live and each.clock < clock for each in self._workers.values()):
            return None
        workers = sorted(number for number, kept in oldest.items() if kept == clock)
        for worker in workers:
            self._workers[worker].applied = self._workers[worker].kept.pop(0)
        self.version = max(self.version, clock)
        self.steps += 1
        return clock, workers

    def asks(self, worker: int, clock: int) -> None:
        """It pulls, at ``clock``: also without a push to this server, if it began at another
        server's clock."""
        known = self._workers[worker]
        known.clock = max(known.clock, clock + known.offset)
        self._catch_up(known)
        known.behind = False

    def may_pull(self, worker: int) -> bool:
        """Whether what is applied is new enough for the worker's clock."""
        if self.staleness is None:
            return True
        if len(self._workers) < self._expected and self._workers[worker].clock > self.staleness:
            return False  # some have never come
        bound = self._workers[worker].clock - self.staleness
        if any(clock <= bound for each in self._workers.values() for clock in each.kept[:1]):
            return False
        return all(each.clock >= bound for each in self._workers.values() if each.live)

    def state_dict(self) -> dict[str, Any]:
        """Of what is applied; a push that is kept is not."""
        return {
            "staleness": self.staleness,
            "version": self.version,
            "steps": self.steps,
            "lost_pushes": self.lost_pushes,
            "replaced": sorted(self._replaced),
            "workers": {
                number: [each.incarnation, each.applied, each.offset]
                for number, each in self._workers.items()
            },
            "left": [number for number, each in self._workers.items() if not each.live],
            "behind": [number for number, each in self._workers.items() if each.behind],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Only into a schedule that nobody has joined. Workers beyond its number are left out."""
        self.version = int(state["version"])
        self.steps = int(state.get("steps", self.version))
        self.lost_pushes = int(state["lost_pushes"])
        self._replaced = {int(each) for each in state["replaced"]}
        left, behind = set(state.get("left", ())), set(state.get("behind", ()))
        for number, (incarnation, applied, *offset) in state["workers"].items():
            if int(number) >= self._expected:
                continue
            self._workers[int(number)] = Worker(
                int(incarnation),
                clock=int(applied),
                applied=int(applied),
                live=number not in left,
                offset=int(offset[0]) if offset else 0,
                behind=number in behind,
            )
