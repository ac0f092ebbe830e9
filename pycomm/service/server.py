"""The server of parameters: workers push gradients to it and pull parameters from it."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch import nn, optim
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm._group.creation import set_up_without_a_group
from pycomm._group.secrets import opened, sealed
from pycomm.service.checkpoint import CheckpointFile
from pycomm.service.core import ServerCore, ServerStats
from pycomm.service.door import Door, value_now
from pycomm.service.endpoint import listening_socket, parse_endpoint, workers_from
from pycomm.service.frames import Frame, Hello, Kind, decode_hello
from pycomm.service.notices import RareWarnings, WaitNotices, cause_of, gone
from pycomm.service.policy import check_policy
from pycomm.service.schedule import StaleWorkerError
from pycomm.service.session import MEETING_S, PREFIX, SERVER, Session
from pycomm.service.terms import UnfitWorkerError

logger = logging.getLogger("pycomm")
_LOOK_S = 0.05
_KEY_S = 5.0
"""For a key of the store that is known to exist."""
_END_S = 10.0
"""For all threads to end; one that waits for a worker to meet it cannot be interrupted."""


class ParameterServer:
    """Keeps a model's parameters, or a part of them, and steps them with what workers push.

    Servers are not ranks: they need no launcher, and ``torch.distributed`` does not count them.
    Each worker has a connection of its own, a group of two. One thread for each connection.

    Example::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        server = pycomm.ParameterServer(model, optimizer, listen="10.0.0.1:6170", workers=4)
        server.serve()  # until all workers have said goodbye

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
        ValueError: An argument or a setting is wrong, the checkpoint is of something else, or
            ``PYCOMM_SECURITY`` forbids it, as ``require`` without a secret does.
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
        rejoin: float = 60.0,
        timeout: float = 1800.0,
    ) -> None:
        set_up_without_a_group()
        self._workers = workers_from(workers, "workers")
        host, port = parse_endpoint(listen)
        self._is_open = check_policy([host])
        if min(checkpoint_every, rejoin, timeout) <= 0:
            raise ValueError("checkpoint_every, rejoin and timeout must be more than 0 seconds")
        self._core = ServerCore(model, optimizer, scheduler, self._workers)
        self._checkpoint_every, self._rejoin, self._timeout = checkpoint_every, rejoin, timeout
        self._saved_changes = -1
        self._lock = threading.Lock()
        self._sessions: dict[int, tuple[int, Session]] = {}  # by worker; guarded by _lock
        self._threads: list[threading.Thread] = []
        self._stop_asked = False
        self._stopping = threading.Event()
        self._file = None if checkpoint is None else CheckpointFile(checkpoint)
        try:
            if self._file is not None and (state := self._file.read()) is not None:
                self._load(self._file, state)
            listener = listening_socket(host, port)
        except BaseException:
            if self._file is not None:
                self._file.close()
            raise
        bound = listener.getsockname()[1]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        """Where it listens, with the port that was chosen."""
        self._warnings = RareWarnings()
        self._door = Door(self.address, self._warnings)
        self._order = itertools.count(1)
        self._store = TCPStore(
            host,
            bound,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEETING_S),
            master_listen_fd=listener.detach(),
        )

    def stats(self) -> ServerStats:
        """On any thread."""
        return self._core.stats()

    def stop(self) -> None:
        """Lets serve() return. On any thread, or in a signal handler."""
        # No Event: a handler may run inside its wait(), which holds the lock that set() needs.
        self._stop_asked = True

    def serve(self) -> None:
        """Serves until all workers have said goodbye, or stop(); then writes a checkpoint.

        Raises:
            OSError: The checkpoint could not be written.
            RuntimeError: The optimizer or its schedule failed in a step. The last checkpoint stays.
        """
        if self._is_open:
            logger.warning(
                "the parameter service listens on %s without encryption: anybody who reaches it "
                "can read and change the model. See python -m pycomm secret --help",
                self.address,
            )
        write_at = time.monotonic() + self._checkpoint_every
        notices = WaitNotices()
        try:
            while not self._stop_asked and self._core.failure is None:
                time.sleep(_LOOK_S)
                if self._core.all_ended() and not self._sessions:
                    break
                self._greet()
                self._warnings.flush()
                self._core.forget_absent(self._rejoin)
                notices.log(self._core.attendance(), time.monotonic())
                if time.monotonic() >= write_at:
                    try:
                        self.write_checkpoint()
                    except OSError as error:  # such as a full disk: what is served is not lost
                        logger.warning(
                            "the checkpoint could not be written, and is tried again in %g s: %s",
                            self._checkpoint_every,
                            error,
                        )
                    write_at = time.monotonic() + self._checkpoint_every
        finally:
            self._close()
        if (failure := self._core.failure) is not None:
            raise RuntimeError(
                f"a step of the optimizer failed on the server at {self.address}: {failure}"
            ) from failure

    def write_checkpoint(self) -> None:
        """Writes the state, if it has changed since. On the thread of serve(), or before it."""
        if self._file is None:
            return
        found = self._core.state_dict(unless=self._saved_changes)
        if found is not None:
            changes, state = found
            self._file.write(state)
            self._saved_changes = changes

    def _load(self, file: CheckpointFile, state: dict[str, Any]) -> None:
        try:
            self._saved_changes = self._core.load_state_dict(state)
        except ValueError as error:
            raise ValueError(
                f"the checkpoint {file.path} does not fit: {error}. Try: another --checkpoint, or "
                "move the file away, which begins a new run"
            ) from error

    # ---- on the thread of serve()

    def _greet(self) -> None:
        """Starts a thread for each hello that has come."""
        for number in self._door.arrived(self._store):
            thread = threading.Thread(
                target=self._serve_one,
                args=(number, next(self._order)),
                name=f"session {number}",
                daemon=True,
            )
            self._threads = [each for each in self._threads if each.is_alive()]
            try:
                thread.start()
            except RuntimeError as error:  # such as of too many: the worker tries again
                self._door.greeted(number)
                self._warnings.add("a worker cannot connect: %s", error)
            else:
                self._threads.append(thread)

    def _close(self) -> None:
        self._stopping.set()
        self._core.stop()
        with self._lock:
            sessions = [session for _, session in self._sessions.values()]
        for session in sessions:
            session.abort()
        until = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        try:
            self.write_checkpoint()
        finally:
            if self._file is not None:
                self._file.close()
            del self._store  # closes the port

    # ---- on a session's thread

    def _serve_one(self, number: int, order: int) -> None:
        """One connection. ``number``: of its keys in the store, which a worker has taken, so that
        another process may have chosen it. ``order``: larger than those of earlier ones."""
        try:
            try:
                joined = self._let_in(number, order)
            finally:
                self._door.greeted(number)
            if joined is not None:
                self._serve_session(*joined, order)
        except Exception as error:  # such as of a store that is closed
            if not self._stopping.is_set():
                self._warnings.add(
                    "connection %d to the parameter service at %s has failed: %s",
                    number,
                    self.address,
                    cause_of(error),
                )

    def _let_in(self, number: int, order: int) -> tuple[Session, Hello, int] | None:
        """The session of a worker that has joined, and the worker's clock; None: sent away."""
        # Until the hello is read no connection of its own to the store, which strangers could
        # use up descriptors with. So nothing here may wait for a key: it would hold up all others.
        # self._store each time: a thread that kept it would keep the port open after serve().
        key = f"{PREFIX}/{number}/hello"
        try:
            text = value_now(self._store, key)
            if text is None:
                raise ValueError("the store no longer has its hello")
            hello = decode_hello(opened(key, text.decode()).encode())
        except Exception as error:  # what a stranger sends must not end a thread without an answer
            self._warnings.add("the parameter service refuses a worker: %s", error)
            self._reply(number, {"refused": str(error)})
            return None
        worker = hello.worker
        try:
            session = self._meet(hello, number)
        except Exception as error:  # a refusal would end the worker: without an answer it retries
            self._warnings.add(
                "worker %d (connection %d) did not connect: %s", worker, number, error
            )
            return None
        try:
            for name in ("hello", "answer"):
                self._store.delete_key(f"{PREFIX}/{number}/{name}")
        except Exception as error:
            self._warnings.add(
                "worker %d (connection %d): its hello stays in the store: %s", worker, number, error
            )
        try:
            if session.receive() != hello.frame():
                raise ValueError("it says another hello than the store holds for it")
            session.set_timeout(self._timeout)
            # Here and not earlier: the session proves that the worker has the secret, and that the
            # hello is its own. It also encrypts the reason why a worker is refused.
            return session, hello, self._core.join(hello, order)
        except Exception as error:
            self._warnings.add("a worker that the store calls %d is sent away: %s", worker, error)
            # Without a REFUSED the worker tries again.
            if isinstance(error, UnfitWorkerError | StaleWorkerError):
                session.refuse(str(error), getattr(error, "parameters", ()))
            session.abort()
            return None

    def _serve_session(self, session: Session, hello: Hello, clock: int, order: int) -> None:
        with self._kept_as(hello.worker, session, order):
            try:
                session.send(Frame(Kind.WELCOME, clock=clock))
                while self._answer(session, hello.worker, hello.incarnation, order):
                    pass
            except StaleWorkerError as error:
                session.refuse(str(error))
            except Exception as error:
                if not self._stopping.is_set():
                    logger.warning("%s", gone(hello.worker, error))

    def _meet(self, hello: Hello, number: int) -> Session:
        # Keys that somebody deletes are waited for in vain, on this connection alone.
        store = self._store.clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=_KEY_S))
        self._reply(number, {"refused": None, "hello": hello.fingerprint})
        return Session(store, number, SERVER, hello)

    def _reply(self, number: int, answer: Mapping[str, Any]) -> None:
        key = f"{PREFIX}/{number}/answer"
        self._store.set(key, sealed(key, json.dumps(answer)))

    @contextlib.contextmanager
    def _kept_as(self, worker: int, session: Session, order: int) -> Iterator[None]:
        """The session is the worker's until the end, or until a newer one takes its place."""
        with self._lock:
            newest, other = self._sessions.get(worker, (0, None))
            if newest < order:
                self._sessions[worker] = (order, session)
        if other is not None:
            (other if newest < order else session).abort()
        if self._stopping.is_set():
            session.abort()
        try:
            yield
        finally:
            with self._lock:
                if self._sessions.get(worker) == (order, session):
                    del self._sessions[worker]
            self._core.lost_sight(worker, order)
            session.abort()

    def _answer(self, session: Session, worker: int, incarnation: int, order: int) -> bool:
        """One request of the worker; False if it was the last."""
        frame = session.receive()
        if frame.kind is Kind.PUSH:
            gradients = self._core.buffers()
            session.receive_tensors(gradients)
            self._core.push(worker, incarnation, frame.clock, gradients)
            session.send(Frame(Kind.DONE, clock=frame.clock))
        elif frame.kind is Kind.PULL:
            parameters = self._core.buffers()
            version, lost = self._core.pull(worker, incarnation, frame.clock, parameters, order)
            session.send(Frame(Kind.DONE, frame.clock, version, lost), parameters)
        elif frame.kind is Kind.GOODBYE:
            self._core.goodbye(worker, incarnation)
            session.send(Frame(Kind.DONE))
            session.wait_for_the_peers_end()
            return False
        else:
            raise ValueError(f"a worker sent a frame of kind {frame.kind.name}")
        return True
