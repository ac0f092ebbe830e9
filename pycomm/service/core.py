"""One server's parameters and what it knows of its workers, behind one lock; no network."""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn, optim

from pycomm.service.frames import Hello
from pycomm.service.notices import Attendance, log_lost
from pycomm.service.placement import first_difference, in_words
from pycomm.service.schedule import PushVerdict, Schedule, StaleWorkerError
from pycomm.service.shard import Layout, Shard
from pycomm.service.terms import Terms, UnfitWorkerError, disagreement

logger = logging.getLogger("pycomm")
_LOOK_S = 0.5

Buffers = Mapping[torch.dtype, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class ServerStats:
    """Counted since the first start, over restarts from the checkpoint.

    Example::

        stats = server.stats()
        print(f"{stats.steps} steps, {stats.live_workers} workers, {stats.lost_pushes} pushes lost")
    """

    version: int
    """How new the parameters are: with ``staleness=0`` the clock that was applied last, otherwise
    the number of steps. A restart loses steps, but workers go on with their clocks: the largest of
    them is the version then, if there is one server."""
    lost_pushes: int
    """Acknowledged ones that are not in the parameters: a restart has lost them, or the others had
    gone on without their worker."""
    live_workers: int
    steps: int
    """Of the optimizer: those that are in the parameters."""


@dataclasses.dataclass
class _Begun:
    """What exists once the terms are known."""

    terms: Terms
    layout: Layout
    shard: Shard
    schedule: Schedule
    kept: dict[int, collections.deque[Buffers]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.deque)
    )
    """By worker, its gradients that wait for those of the others, oldest first."""


class ServerCore:
    """Applies pushes and answers pulls. On any thread; each worker's calls come one at a time.

    Args:
        model: The first parameters; changed in place.
        optimizer: Of the model's parameters.
        scheduler: Stepped after each step of the optimizer.
        workers: How many there are.

    Raises:
        ValueError: The model, the optimizer or the schedule is not fit for a server.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        scheduler: optim.lr_scheduler.LRScheduler | None,
        workers: int,
    ) -> None:
        # Refuses an unfit model or optimizer here, not when the first worker comes.
        Shard(Layout(model, 1, sliced=False), 0, optimizer)
        if isinstance(scheduler, optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("a server has no metric for ReduceLROnPlateau: use another schedule")
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._workers = workers
        self._changed = threading.Condition()
        # All below is guarded by it.
        self._begun: _Begun | None = None
        self._gone_at: dict[int, float] = {}
        self._session_of: dict[int, int] = {}  # the newest of each worker
        self._changes = 0  # of what a checkpoint holds
        self._ended: set[int] = set()
        self._stopped = False
        self._failure: Exception | None = None

    # ---- one worker's calls

    def join(self, hello: Hello, session: int) -> int:
        """The worker is here. Returns the clock with which it goes on.

        The first worker's terms become those of all others. So call this only after the worker has
        repeated its hello within its session: anybody can copy a hello into the store.

        Args:
            hello: What the worker said.
            session: Its number, which the server has given it: a later one has a larger one.

        Raises:
            UnfitWorkerError: The worker has other terms or another model.
            StaleWorkerError: Another process has become this worker.
            ConnectionAbortedError: The worker has given this connection up, and has a later one.
        """
        with self._changed:
            begun = self._agreed(hello)
            if session < self._session_of.get(hello.worker, 0):
                raise ConnectionAbortedError("the worker has a later connection")
            lost_before = begun.schedule.lost_pushes
            before = begun.schedule.workers.get(hello.worker)
            clock = begun.schedule.joined(hello.worker, hello.incarnation, hello.clock, hello.begun)
            self._changes += 1
            self._session_of[hello.worker] = session
            log_lost(hello.worker, begun.schedule.lost_pushes - lost_before)
            known = begun.schedule.workers[hello.worker]
            if known.behind:
                logger.warning(
                    "worker %d is back: it goes on from the parameters of now, and a gradient of "
                    "older ones is dropped",
                    hello.worker,
                )
            if known is not before:  # another process
                begun.kept.pop(hello.worker, None)
            self._ended.discard(hello.worker)
            self._gone_at.pop(hello.worker, None)
            self._apply_due(begun)
            self._check_steps()
            return clock

    def buffers(self) -> dict[torch.dtype, torch.Tensor]:
        """Uninitialized, for gradients that come or parameters that go."""
        begun = self._now()
        return begun.layout.buffers(begun.terms.server)

    def push(self, worker: int, incarnation: int, clock: int, gradients: Buffers) -> None:
        """Applies the gradients, keeps them for the others, or drops them if they came before.

        Raises:
            StaleWorkerError: Another process has become this worker.
            ValueError: The clock is not a number of a step.
            RuntimeError: A step has failed.
        """
        with self._changed:
            begun = self._now()
            self._check_steps()
            _check_current(begun, worker, incarnation)
            lost_before = begun.schedule.lost_pushes
            verdict = begun.schedule.pushed(worker, clock)
            self._changes += 1
            if verdict is not PushVerdict.LATE:  # join() has said that it will be dropped
                log_lost(worker, begun.schedule.lost_pushes - lost_before)
            if verdict is PushVerdict.APPLY:
                self._step(begun, [gradients])
            elif verdict is PushVerdict.KEEP:
                begun.kept[worker].append(gradients)
            self._apply_due(begun)
            self._check_steps()

    def pull(
        self, worker: int, incarnation: int, clock: int, into: Buffers, session: int | None = None
    ) -> tuple[int, int]:
        """Waits until the parameters are new enough for the worker, and copies them.

        Returns:
            The version and the count of lost pushes.

        Raises:
            StaleWorkerError: Another process has become this worker.
            ConnectionAbortedError: The worker has a later connection than ``session``.
            RuntimeError: The server is stopping, or a step has failed.
        """
        with self._changed:
            begun = self._now()
            self._check_steps()
            _check_current(begun, worker, incarnation)
            begun.schedule.asks(worker, clock)
            self._apply_due(begun)
            while not begun.schedule.may_pull(worker):
                if self._stopped:
                    raise RuntimeError("the server is stopping")
                self._changed.wait(_LOOK_S)
                _check_current(begun, worker, incarnation)
                if session is not None and session < self._session_of.get(worker, 0):
                    raise ConnectionAbortedError("the worker has a later connection")
            self._check_steps()  # the version is counted before the step
            begun.shard.copy_to(into)
            return begun.schedule.version, begun.schedule.lost_pushes

    def goodbye(self, worker: int, incarnation: int) -> None:
        """The worker has ended: nobody waits for it any more."""
        with self._changed:
            begun = self._now()
            _check_current(begun, worker, incarnation)
            self._ended.add(worker)
            self._changes += 1
            begun.schedule.left(worker)
            self._apply_due(begun)
            self._check_steps()

    def lost_sight(self, worker: int, session: int) -> None:
        """The session has ended. If the worker has no newer one, the others wait until
        forget_absent() says that they need not."""
        with self._changed:
            if worker not in self._ended and self._session_of.get(worker) == session:
                self._gone_at[worker] = time.monotonic()

    # ---- the server's calls

    def forget_absent(self, rejoin: float) -> None:
        """The others no longer wait for workers that have been away for ``rejoin`` seconds."""
        now = time.monotonic()
        with self._changed:
            for worker, gone_at in list(self._gone_at.items()):
                begun = self._begun
                if now - gone_at <= rejoin or begun is None or worker not in begun.schedule.workers:
                    continue
                del self._gone_at[worker]
                logger.warning(
                    "worker %d of the parameter service has not come back within %g s: the others "
                    "go on without it",
                    worker,
                    rejoin,
                )
                self._changes += 1
                begun.schedule.left(worker)
                self._apply_due(begun)

    def all_ended(self) -> bool:
        """Whether each worker has said goodbye."""
        with self._changed:
            return len(self._ended) >= self._workers

    def attendance(self) -> Attendance:
        """Which workers have come, are live, and have ended."""
        with self._changed:
            workers = {} if self._begun is None else self._begun.schedule.workers
            live = frozenset(number for number, each in workers.items() if each.live)
            return Attendance(self._workers, frozenset(workers), live, frozenset(self._ended))

    def stop(self) -> None:
        """Pulls that wait raise."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def failure(self) -> Exception | None:
        """Why a step failed. The parameters may be half stepped: no checkpoint of them is made."""
        with self._changed:
            return self._failure

    def stats(self) -> ServerStats:
        with self._changed:
            if self._begun is None:
                return ServerStats(0, 0, 0, 0)
            schedule = self._begun.schedule
            live = sum(each.live for each in schedule.workers.values())
            return ServerStats(schedule.version, schedule.lost_pushes, live, schedule.steps)

    def state_dict(self, unless: int) -> tuple[int, dict[str, Any]] | None:
        """A count of changes, and a copy of all.

        None if nothing has changed since that count was ``unless``, or before the first step: then
        there is nothing to keep, and a first worker's wrong settings are not kept either.
        """
        with self._changed:
            begun = self._begun
            if self._failure is not None or begun is None or begun.schedule.steps == 0:
                return None
            if self._changes == unless:
                return None
            return self._changes, {
                "terms": dataclasses.asdict(begun.terms),
                "workers": self._workers,
                "ended": sorted(self._ended),
                "parameters": begun.layout.described,
                "schedule": begun.schedule.state_dict(),
                "shard": begun.shard.state_dict(),
                "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Before anybody has joined. Returns the count of changes.

        Raises:
            ValueError: It is of another model, optimizer or number of servers.
        """
        with self._changed:
            terms = Terms(**state["terms"])
            layout = Layout(self._model, terms.servers, sliced=terms.sliced)
            # Not the digest: other versions have had another one for the same model.
            known = state.get("parameters")
            if known is None:
                raise ValueError("it does not have the shapes of its parameters")
            if layout.described != known:
                difference = first_difference(in_words(layout.described), in_words(known))
                raise ValueError(
                    f"it holds another model than this server: first difference {difference}"
                )
            begun = self._begin(dataclasses.replace(terms, digest=layout.digest), layout)
            begun.shard.load_state_dict({**state["shard"], "digest": layout.digest})
            workers_then = state.get("workers", self._workers)
            ended = {int(worker) for worker in state.get("ended", ())}
            if len(ended) >= workers_then or ended.issuperset(range(self._workers)):
                # The job is over. Its file begins another one, for which all workers must come.
                begun.schedule.load_state_dict({**state["schedule"], "workers": {}})
            else:
                begun.schedule.load_state_dict(state["schedule"])
                self._ended = ended.intersection(range(self._workers))
                for worker in self._ended:
                    begun.schedule.left(worker)
            if self._scheduler is not None and state["scheduler"] is not None:
                self._scheduler.load_state_dict(state["scheduler"])
            if workers_then != self._workers:
                text = "the checkpoint is of a parameter service with %d workers, this one has %d"
                logger.warning(text, workers_then, self._workers)
            now = time.monotonic()
            workers = begun.schedule.workers
            self._gone_at = {number: now for number, each in workers.items() if each.live}
            return self._changes

    # ---- with the lock held

    def _agreed(self, hello: Hello) -> _Begun:
        """The state with this worker's terms. The first worker's terms begin it.

        Raises:
            UnfitWorkerError: The worker cannot take part.
        """
        terms, begun = Terms.of(hello), self._begun
        if hello.worker >= self._workers:
            raise UnfitWorkerError(
                f"worker={hello.worker} is too large: the service has {self._workers} "
                f"workers, numbered from 0 to {self._workers - 1}"
            )
        if begun is not None:
            if (text := disagreement(hello.worker, begun.terms, terms)) is not None:
                raise UnfitWorkerError(text)
            layout = begun.layout
        else:
            layout = Layout(self._model, terms.servers, sliced=terms.sliced)
        if layout.digest != terms.digest:
            raise UnfitWorkerError(
                f"the server has another model than worker {hello.worker}: names, shapes or "
                "dtypes of parameters differ",
                in_words(layout.described),
            )
        try:
            return begun or self._begin(terms, layout)
        except ValueError as error:  # such as of an optimizer that cannot step slices
            raise UnfitWorkerError(str(error)) from error

    def _now(self) -> _Begun:
        assert self._begun is not None, "a call before the first join()"
        return self._begun

    def _check_steps(self) -> None:
        """After a step that failed, nothing is acknowledged: no checkpoint will have it."""
        if self._failure is not None:
            raise RuntimeError(f"a step of the optimizer has failed: {self._failure}")

    def _begin(self, terms: Terms, layout: Layout) -> _Begun:
        shard = Shard(layout, terms.server, self._optimizer)
        schedule = Schedule(self._workers, terms.staleness, terms.servers)
        self._begun = _Begun(terms, layout, shard, schedule)
        plain = type(self._optimizer) is optim.SGD and not any(
            group["momentum"] for group in self._optimizer.param_groups
        )
        if terms.staleness != 0 and not plain:
            logger.warning(
                "staleness=%s with %s: old gradients and an optimizer with a memory of them often "
                "diverge together. Try: torch.optim.SGD without momentum",
                terms.staleness,
                type(self._optimizer).__name__,
            )
        return self._begun

    def _apply_due(self, begun: _Begun) -> None:
        """Raises nothing: a step that fails is the ``failure``."""
        while (due := begun.schedule.due()) is not None:
            _, workers = due
            self._step(begun, [begun.kept[worker].popleft() for worker in workers])
        self._changed.notify_all()

    def _step(self, begun: _Begun, gradients: list[Buffers]) -> None:
        if self._failure is not None:
            return
        try:
            begun.shard.step(gradients)
            if self._scheduler is not None:
                # The shard's optimizer stepped, not the user's: torch would warn of a wrong order.
                self._optimizer._opt_called = True  # type: ignore[attr-defined]
                self._scheduler.step()
        except Exception as error:
            self._failure = error
            self._stopped = True


def _check_current(begun: _Begun, worker: int, incarnation: int) -> None:
    if begun.schedule.workers[worker].incarnation != incarnation:
        raise StaleWorkerError(
            f"another process has become worker {worker}. Try: give each worker its own number"
        )
