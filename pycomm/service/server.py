"""The server of parameters: workers push gradients to it and pull parameters from it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import nn, optim
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm.service.checkpoint import CheckpointFile
from pycomm.service.endpoint import listening_socket, number_from, parse_endpoint
from pycomm.service.frames import Frame, Hello, Kind, decode_hello
from pycomm.service.schedule import PushVerdict, Schedule, StaleWorkerError
from pycomm.service.session import PREFIX, SERVER, Session
from pycomm.service.shard import Layout, Shard

logger = logging.getLogger("pycomm")
_LOOK_S = 0.05
_HELLO_S = 30.0
"""From the number that a worker takes to its hello."""
_MOST_WAITING = 1024


@dataclasses.dataclass(frozen=True)
class ServerStats:
    """Counted since the first start, over restarts from the checkpoint."""

    version: int
    """Steps of the optimizer."""
    lost_pushes: int
    """Acknowledged ones that a restart has lost."""
    live_workers: int


@dataclasses.dataclass(frozen=True)
class _Terms:
    """What all workers must agree on; it comes with the first of them, or the checkpoint."""

    server: int
    servers: int
    staleness: int | None
    sliced: bool
    digest: str

    @staticmethod
    def of(hello: Hello) -> _Terms:
        return _Terms(hello.server, hello.servers, hello.staleness, hello.sliced, hello.digest)


class ParameterServer:
    """Keeps a model's parameters, or a part of them, and steps them with what workers push.

    Servers are not ranks: they need no launcher, and ``torch.distributed`` does not count them.
    Each worker has a connection of its own, a group of two. One thread for each connection.

    Args:
        model: Its parameters are the first ones; they are changed in place. On the CPU.
        optimizer: Of the model's parameters. If parameters are cut into slices, one of
            ``torch.optim`` that treats each element by itself, such as SGD, AdamW or Adagrad.
        listen: "HOST:PORT"; port 0 lets the kernel choose. Only this address is listened on.
        workers: How many workers there are; default ``PADDLE_TRAINERS_NUM``. Nothing is applied
            with ``staleness=0`` before all of them have come.
        checkpoint: File that this server's state is written to, and read from at the start. None:
            nothing is kept.
        checkpoint_every: Seconds between two writes: a crash loses what was pushed meanwhile.
        scheduler: A learning-rate schedule of ``optimizer``, stepped after each of its steps.
        rejoin: Seconds after which the others no longer wait for a worker that is gone.
        timeout: Seconds that a worker may be silent between two calls.

    Raises:
        ValueError: An argument is wrong, or the checkpoint is of something else.
        BlockingIOError: Another server uses the checkpoint.
        OSError: The address cannot be listened on.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        *,
        listen: str,
        workers: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: float = 60.0,
        scheduler: optim.lr_scheduler.LRScheduler | None = None,
        rejoin: float = 10.0,
        timeout: float = 1800.0,
    ) -> None:
        self._workers = number_from(
            workers, "PADDLE_TRAINERS_NUM", os.environ.get("PADDLE_TRAINERS_NUM"), "workers"
        )
        if self._workers < 1:
            raise ValueError("workers is 0: a service needs one worker at least")
        host, port = parse_endpoint(listen)
        if min(checkpoint_every, rejoin, timeout) <= 0:
            raise ValueError("checkpoint_every, rejoin and timeout must be more than 0 seconds")
        # Refuses an unfit model or optimizer here, not when the first worker comes.
        Shard(Layout(model, 1, sliced=False), 0, optimizer)
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._checkpoint_every, self._rejoin, self._timeout = checkpoint_every, rejoin, timeout
        self._changed = threading.Condition()
        # All below it is guarded by it.
        self._terms: _Terms | None = None
        self._schedule: Schedule | None = None
        self._shard: Shard | None = None
        self._layout: Layout | None = None
        self._kept: dict[tuple[int, int], dict[torch.dtype, torch.Tensor]] = {}
        self._sessions: dict[int, Session] = {}
        self._gone_at: dict[int, float] = {}
        self._ended: set[int] = set()
        self._saved_version = -1
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._file = None if checkpoint is None else CheckpointFile(checkpoint)
        try:
            if self._file is not None and (state := self._file.read()) is not None:
                self._load(state)
            listener = listening_socket(host, port)
        except BaseException:
            if self._file is not None:
                self._file.close()
            raise
        bound = listener.getsockname()[1]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        """Where it listens, with the port that was chosen."""
        self._store = TCPStore(
            host,
            bound,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_HELLO_S),
            master_listen_fd=listener.detach(),
        )

    def stats(self) -> ServerStats:
        """On any thread."""
        with self._changed:
            if self._schedule is None:
                return ServerStats(0, 0, 0)
            live = sum(each.live for each in self._schedule.workers.values())
            return ServerStats(self._schedule.version, self._schedule.lost_pushes, live)

    def stop(self) -> None:
        """Lets serve() return. On any thread, or in a signal handler."""
        self._stopping.set()

    def serve(self) -> None:
        """Serves until all workers have said goodbye, or stop() is called. Then writes a checkpoint.

        Raises:
            OSError: The checkpoint could not be written.
        """
        if not self.address.startswith(("127.", "[::1]", "localhost")):
            logger.warning(
                "the parameter service listens on %s without encryption: whoever reaches it can "
                "read and change the model. Keep it on a private network",
                self.address,
            )
        write_at = time.monotonic() + self._checkpoint_every
        waiting: dict[int, float] = {}
        seen = 0
        try:
            while not self._stopping.wait(_LOOK_S) and not self._all_said_goodbye():
                seen = self._greet(waiting, seen)
                self._forget_the_absent()
                if time.monotonic() >= write_at:
                    self.write_checkpoint()
                    write_at = time.monotonic() + self._checkpoint_every
        finally:
            self._close()

    def write_checkpoint(self) -> None:
        """Writes the state, if it has changed since. On the thread of serve(), or before it."""
        if self._file is None:
            return
        with self._changed:
            if self._schedule is None or self._schedule.version == self._saved_version:
                return
            state = self._state()
            version = self._schedule.version
        self._file.write(state)
        self._saved_version = version

    # ---- on the thread of serve()

    def _greet(self, waiting: dict[int, float], seen: int) -> int:
        """Starts a thread for each hello that has come. ``waiting``: numbers without one."""
        taken = self._store.add(f"{PREFIX}/sessions", 0)
        now = time.monotonic()
        for number in range(seen + 1, min(taken, seen + _MOST_WAITING) + 1):
            waiting[number] = now + _HELLO_S
        for number, until in list(waiting.items()):
            if self._store.check([f"{PREFIX}/{number}/hello"]):
                del waiting[number]
                thread = threading.Thread(
                    target=self._serve_one, args=(number,), name=f"session {number}", daemon=True
                )
                self._threads = [each for each in self._threads if each.is_alive()]
                self._threads.append(thread)
                thread.start()
            elif now > until:
                del waiting[number]
        return min(taken, seen + _MOST_WAITING)

    def _forget_the_absent(self) -> None:
        now = time.monotonic()
        with self._changed:
            for worker, gone_at in list(self._gone_at.items()):
                if now - gone_at > self._rejoin and self._schedule is not None:
                    del self._gone_at[worker]
                    logger.warning(
                        "worker %d of the parameter service has not come back within %g s: the "
                        "others go on without it",
                        worker,
                        self._rejoin,
                    )
                    self._schedule.left(worker)
                    self._apply_due()

    def _all_said_goodbye(self) -> bool:
        with self._changed:
            return len(self._ended) >= self._workers and not self._sessions

    def _close(self) -> None:
        self._stopping.set()
        with self._changed:
            sessions = list(self._sessions.values())
            self._changed.notify_all()
        for session in sessions:
            session.abort()
        for thread in self._threads:
            thread.join(10.0)
        try:
            self.write_checkpoint()
        finally:
            if self._file is not None:
                self._file.close()

    # ---- on a session's thread

    def _serve_one(self, number: int) -> None:
        try:
            hello = decode_hello(self._store.get(f"{PREFIX}/{number}/hello"))
            refusal = self._agree(hello)
        except Exception as error:  # what a stranger sends must not end a thread without an answer
            refusal = str(error)
        answer = json.dumps({"refused": refusal}).encode()
        self._store.set(f"{PREFIX}/{number}/answer", answer)
        if refusal is not None:
            logger.warning("the parameter service refuses a worker: %s", refusal)
            return
        worker = hello.worker
        try:
            session = Session(
                self._store,
                number,
                SERVER,
                host=hello.host,
                timeout=self._timeout,
                name=f"service/{number}",
            )
        except Exception as error:
            logger.warning("worker %d did not connect: %s", worker, error)
            return
        with self._kept_as(worker, session):
            try:
                with self._changed:
                    clock = self._joined(hello)
                session.send(Frame(Kind.WELCOME, clock=clock))
                while self._answer(session, worker, hello.incarnation):
                    pass
            except StaleWorkerError as error:
                with contextlib.suppress(Exception):
                    session.send(Frame(Kind.REFUSED, text=str(error)))
            except Exception as error:
                if not self._stopping.is_set():
                    logger.warning("worker %d of the parameter service is gone: %s", worker, error)

    @contextlib.contextmanager
    def _kept_as(self, worker: int, session: Session) -> Iterator[None]:
        """The session is the worker's until the end, or until a newer one takes its place."""
        with self._changed:
            older = self._sessions.get(worker)
            self._sessions[worker] = session
            self._gone_at.pop(worker, None)
        if older is not None:
            older.abort()
        try:
            if self._stopping.is_set():
                session.abort()
            yield
        finally:
            with self._changed:
                if self._sessions.get(worker) is session:
                    del self._sessions[worker]
                    if worker not in self._ended:
                        self._gone_at[worker] = time.monotonic()
            session.abort()

    def _agree(self, hello: Hello) -> str | None:
        """Why the worker cannot take part; None if it can."""
        terms = _Terms.of(hello)
        with self._changed:
            if hello.worker >= self._workers:
                return f"worker {hello.worker} of a service with {self._workers} workers, from 0 on"
            if self._terms is None:
                self._begin(terms)
                return None
            for field in dataclasses.fields(_Terms):
                mine, theirs = getattr(self._terms, field.name), getattr(terms, field.name)
                if mine != theirs:
                    return (
                        f"worker {hello.worker} has {field.name}={theirs!r}, and server "
                        f"{self.address} {mine!r}: all workers and servers need the same model, "
                        "list of servers, staleness and sliced"
                    )
        return None

    def _begin(self, terms: _Terms) -> None:
        layout = Layout(self._model, terms.servers, sliced=terms.sliced)
        if layout.digest != terms.digest:
            raise ValueError(
                f"server {self.address} has another model than the worker: names, shapes or dtypes "
                "of parameters differ"
            )
        self._shard = Shard(layout, terms.server, self._optimizer)
        self._layout = layout
        self._schedule = Schedule(self._workers, terms.staleness)
        self._terms = terms

    def _joined(self, hello: Hello) -> int:
        assert self._schedule is not None
        clock = self._schedule.joined(hello.worker, hello.incarnation, hello.clock)
        for kept in [each for each in self._kept if each[0] == hello.worker]:
            if kept[1] > clock:  # of a process that another one has replaced
                del self._kept[kept]
        self._ended.discard(hello.worker)
        self._apply_due()
        return clock

    def _answer(self, session: Session, worker: int, incarnation: int) -> bool:
        """One request of the worker; False if it was the last."""
        assert self._layout is not None and self._terms is not None
        frame = session.receive()
        if frame.kind is Kind.PUSH:
            gradients = self._layout.buffers(self._terms.server)
            session.receive_tensors(gradients)
            with self._changed:
                self._check_current(worker, incarnation)
                self._take(worker, frame.clock, gradients)
            session.send(Frame(Kind.DONE, clock=frame.clock))
        elif frame.kind is Kind.PULL:
            parameters = self._layout.buffers(self._terms.server)
            reply = self._pull(worker, incarnation, frame.clock, parameters)
            session.send(reply, parameters)
        elif frame.kind is Kind.GOODBYE:
            with self._changed:
                self._check_current(worker, incarnation)
                assert self._schedule is not None
                self._ended.add(worker)
                self._schedule.left(worker)
                self._apply_due()
            session.send(Frame(Kind.DONE))
            return False
        else:
            raise ValueError(f"a worker sent a frame of kind {frame.kind.name}")
        return True

    def _check_current(self, worker: int, incarnation: int) -> None:
        assert self._schedule is not None
        if self._schedule.workers[worker].incarnation != incarnation:
            raise StaleWorkerError(f"another process has become worker {worker}")

    def _take(
        self, worker: int, clock: int, gradients: dict[torch.dtype, torch.Tensor]
    ) -> None:
        assert self._schedule is not None and self._shard is not None
        verdict = self._schedule.pushed(worker, clock)
        if verdict is PushVerdict.APPLY:
            self._step([gradients])
        elif verdict is PushVerdict.KEEP:
            self._kept[(worker, clock)] = gradients
            self._apply_due()
        self._changed.notify_all()

    def _apply_due(self) -> None:
        assert self._schedule is not None
        while (due := self._schedule.due()) is not None:
            clock, workers = due
            self._step([self._kept.pop((worker, clock)) for worker in workers])
        self._changed.notify_all()

    def _step(self, gradients: list[dict[torch.dtype, torch.Tensor]]) -> None:
        assert self._shard is not None
        if gradients:
            self._shard.step(gradients)
            if self._scheduler is not None:
                self._scheduler.step()

    def _pull(
        self, worker: int, incarnation: int, clock: int, into: dict[torch.dtype, torch.Tensor]
    ) -> Frame:
        assert self._schedule is not None and self._shard is not None
        with self._changed:
            self._schedule.skipped(worker, clock)
            self._apply_due()
            while not self._schedule.may_pull(worker):
                if self._stopping.is_set():
                    raise RuntimeError("the server is stopping")
                self._changed.wait(_LOOK_S * 10)
                self._check_current(worker, incarnation)
            self._shard.copy_to(into)
            return Frame(
                Kind.DONE,
                clock=clock,
                version=self._schedule.version,
                lost_pushes=self._schedule.lost_pushes,
            )

    # ---- the checkpoint

    def _state(self) -> dict[str, Any]:
        assert self._schedule is not None and self._shard is not None and self._terms is not None
        return {
            "terms": dataclasses.asdict(self._terms),
            "schedule": self._schedule.state_dict(),
            "shard": self._shard.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._begin(_Terms(**state["terms"]))
        assert self._schedule is not None and self._shard is not None
        self._shard.load_state_dict(state["shard"])
        self._schedule.load_state_dict(state["schedule"])
        if self._scheduler is not None and state["scheduler"] is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self._saved_version = self._schedule.version
        now = time.monotonic()
        self._gone_at = {worker: now for worker, each in self._schedule.workers.items() if each.live}
