"""A worker's end of the parameter service."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm._group.creation import set_up_without_a_group
from pycomm._group.secrets import opened, sealed
from pycomm.errors import CollectiveTimeoutError, ConfigMismatchError, InvalidArgumentError
from pycomm.service.endpoint import number_from, parse_endpoints
from pycomm.service.frames import FRAME_NBYTES, Frame, Hello, Kind, as_received, printable
from pycomm.service.notices import cause_of
from pycomm.service.placement import first_difference, in_words
from pycomm.service.policy import check_policy
from pycomm.service.session import MOST_NUMBERS, PREFIX, SESSIONS, WORKER, Session
from pycomm.service.shard import Layout

logger = logging.getLogger("pycomm")
T = TypeVar("T")
_AGAIN_S = 0.2
_GOODBYE_S = 5.0


class _Server:
    """One server, as the worker sees it: the connection, and what it has acknowledged."""

    def __init__(self, host: str, port: int, number: int) -> None:
        self.host, self.port, self.number = host, port, number
        self.acknowledged = 0
        self.begun: int | None = None  # the clock that the server gave this process first
        self.reached = False  # once at least
        self.session: Session | None = None
        self.store: TCPStore | None = None  # the group of two asks it when it fails

    @property
    def name(self) -> str:
        return f"server {self.number} at {self.host}:{self.port}"

    def drop(self) -> None:
        if self.session is not None:
            with contextlib.suppress(Exception):
                self.session.abort()
        self.session = None


class RefusedError(RuntimeError):
    """A server (docs/parameter-service.md) does not take this worker: it has another model, list of
    servers, ``staleness``, ``sliced`` or secret. The text has the server's name and the first
    difference.

    Try: pass the same arguments and secret to servers and workers.
    """


class _DoubtfulRefusalError(Exception):
    """Stands in the open store, so that it may not be the server's."""


class ParameterClient:
    """Pushes a model's gradients to servers and pulls the parameters. Not thread-safe.

    Example::

        client = ParameterClient(model, servers="10.0.0.1:6170", worker=0)
        for batch in batches:
            loss(model, batch).backward()
            client.push()
            client.pull()
            model.zero_grad()

    After it is made the model has the servers' parameters. The worker needs no optimizer. Buffers,
    such as BatchNorm's running statistics, stay the worker's own. A server that goes away is
    tried again for ``reconnect`` seconds; a push that it had not acknowledged is sent again, and
    applied once. An exception inside ``with`` ends the connection without a goodbye, as a crash
    does: the servers wait for the worker to be started again.

    Args:
        model: With the same parameters as the servers' model: names, shapes, dtypes. On the CPU.
        servers: All servers in the same order on all workers, as "10.0.0.1:6170,10.0.0.2:6170" or
            a list; default ``PADDLE_PSERVERS_IP_PORT_LIST``.
        worker: This worker's number, from 0; default ``PADDLE_TRAINER_ID``.
        staleness: 0: all workers step together, with the mean of their gradients. k: each push is a
            step of its own, and a worker may be k steps ahead of the slowest. None: no bound.
        sliced: Cut large parameters into slices for several servers.
        timeout: Seconds that a call may wait for other workers.
        reconnect: Seconds for which a server that is gone is tried again.

    Raises:
        ValueError: An argument or a setting is wrong, or ``PYCOMM_SECURITY`` forbids it, as
            ``require`` without a secret does.
        RefusedError: A server has other settings or another model.
        ConnectionError: A server cannot be reached.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        servers: str | Sequence[str] | None = None,
        worker: int | None = None,
        staleness: int | None = 0,
        sliced: bool = True,
        timeout: float = 1800.0,
        reconnect: float = 60.0,
    ) -> None:
        endpoints = parse_endpoints(servers)
        check_policy(host for host, _ in endpoints)
        self._worker = number_from(
            worker, "PADDLE_TRAINER_ID", os.environ.get("PADDLE_TRAINER_ID"), "worker"
        )
        if staleness is not None and staleness < 0:
            raise ValueError(f"staleness is {staleness}; use 0, a number of steps, or None")
        if min(timeout, reconnect) <= 0:
            raise ValueError("timeout and reconnect must be more than 0 seconds")
        set_up_without_a_group()
        self._staleness, self._sliced = staleness, sliced
        self._timeout, self._reconnect = timeout, reconnect
        self._layout = Layout(model, len(endpoints), sliced=sliced)
        self._incarnation = secrets.randbits(62)
        self._servers = [_Server(*each, number) for number, each in enumerate(endpoints)]
        self._clock = 0
        self._closed = False
        try:
            for server in self._servers:
                self._retrying(server, lambda _: None)
            self._clock = max(server.acknowledged for server in self._servers)
            self.pull()
        except BaseException:
            self._drop_all()
            raise

    @property
    def clock(self) -> int:
        """Steps of this worker."""
        return self._clock

    def push(self) -> None:
        """Sends all gradients, and returns when all servers have them. None counts as zeros.

        Raises:
            ValueError: A gradient is sparse. Nothing was sent.
            ConnectionError: A server is gone for longer than ``reconnect``. The push is not taken
                back: where it arrived, it counts.
            TimeoutError: A server has not answered within ``timeout``. As above.
        """
        self._check_open()
        for name, parameter in self._layout.parameters.items():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise ValueError(
                    f"the gradient of {name!r} is sparse; the parameter service takes dense ones"
                )
        self._clock += 1  # nothing below fails because of the gradients
        clock = self._clock
        for server in self._servers:
            buffers = self._layout.buffers(server.number)
            for each, view in self._layout.views(server.number, buffers):
                gradient = self._layout.parameters[each.name].grad
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(self._layout.flat(each, gradient.contiguous()))

            def send(session: Session) -> None:
                session.send(Frame(Kind.PUSH, clock=clock), buffers)  # noqa: B023
                _done(session, clock)

            self._retrying(server, send)
            server.acknowledged = clock

    def pull(self) -> int:
        """Gets the parameters, as new as ``staleness`` demands; waits for that.

        Returns:
            The servers' version, the smallest one of theirs.

        Raises:
            ConnectionError: A server is gone for longer than ``reconnect``.
            TimeoutError: Other workers are late for longer than ``timeout``.
        """
        self._check_open()
        versions = []
        pulled = []
        for server in self._servers:
            buffers = self._layout.buffers(server.number)

            def receive(session: Session) -> int:
                session.send(Frame(Kind.PULL, clock=self._clock))
                version = _done(session, self._clock).version
                session.receive_tensors(buffers)  # noqa: B023
                return version

            versions.append(self._retrying(server, receive))
            pulled.append(buffers)
        with torch.no_grad():  # all have come: the model is never half new
            for server, buffers in zip(self._servers, pulled, strict=True):
                for each, view in self._layout.views(server.number, buffers):
                    self._layout.flat(each, self._layout.parameters[each.name]).copy_(view)
        return min(versions)

    def close(self) -> None:
        """Says goodbye: the others no longer wait for this worker. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for server in self._servers:
            if server.reached:
                # Again on a new connection if this one breaks: the server would wait for this
                # worker. One that is gone waits for nobody.
                with contextlib.suppress(Exception):
                    self._retrying(server, _say_goodbye, min(self._reconnect, _GOODBYE_S))
            server.drop()

    def __enter__(self) -> ParameterClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        self._drop_all()

    def _drop_all(self) -> None:
        """Without a goodbye: the worker has not finished."""
        self._closed = True
        for server in self._servers:
            server.drop()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this client is closed")

    def _retrying(
        self, server: _Server, call: Callable[[Session], T], seconds: float | None = None
    ) -> T:
        """``call`` with a connection that works; tried again while the server is away, for so many
        seconds (default ``reconnect``)."""
        seconds = self._reconnect if seconds is None else seconds
        until: float | None = None  # from the first failure on: a pull may wait for long before
        while True:
            left = seconds if until is None else until - time.monotonic()
            asked_s = math.inf
            try:
                if server.session is None:
                    server.session = self._connect(server, left)
                asked_s = time.monotonic()
                return call(server.session)
            except RefusedError:
                server.drop()
                raise
            except Exception as error:
                server.drop()
                waited_s = time.monotonic() - asked_s
                # One that came earlier is the server's: this worker was silent for too long.
                if isinstance(error, CollectiveTimeoutError) and waited_s > self._timeout - 0.01:
                    raise TimeoutError(self._why_late(server)) from error
                if isinstance(error, InvalidArgumentError) and not server.reached:
                    raise  # of a setting
                first = until is None
                if until is None:
                    until = time.monotonic() + seconds
                final = isinstance(error, (ValueError, TypeError))
                if final or time.monotonic() > until:
                    if isinstance(error, _DoubtfulRefusalError):
                        raise RefusedError(f"{server.name}: {error}") from None
                    tried_s = time.monotonic() - (until - seconds)
                    retried = "" if first else f", and retried for {tried_s:.0f} s"
                    raise ConnectionError(self._why_lost(server, error, retried)) from error
                if first:
                    logger.warning(
                        "worker %d %s %s, and retries for %g s: %s",
                        self._worker,
                        "has lost" if server.reached else "cannot reach",
                        server.name,
                        seconds,
                        cause_of(error),
                    )
                time.sleep(_AGAIN_S)

    def _why_late(self, server: _Server) -> str:
        return (
            f"worker {self._worker} has waited {self._timeout:g} s for an answer of {server.name} "
            "of the parameter service, whose process lives: it waits for other workers, or is "
            "slow. Try: look for workers that are late or never came; or a longer timeout"
        )

    def _why_lost(self, server: _Server, error: Exception, retried: str) -> str:
        cause = cause_of(error)
        if not server.reached:
            return (
                f"worker {self._worker} cannot reach {server.name} of the parameter "
                f"service{retried}: {cause}. Try: check that `python -m pycomm serve` runs there "
                "and prints this address; if it does, open that port and PYCOMM_PORT_RANGE in the "
                "firewalls of both hosts"
            )
        return (
            f"worker {self._worker} has lost {server.name} of the parameter service{retried}: "
            f"{cause}. Try: look at the server's output; a worker made after its restart goes on "
            "from its checkpoint"
        )

    def _connect(self, server: _Server, seconds: float) -> Session:
        # TCPStore retries for longer than its timeout, and prints a C++ trace.
        probed = (server.host, server.port)
        socket.create_connection(probed, timeout=max(0.1, min(seconds, 5.0))).close()
        store = TCPStore(
            server.host,
            server.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(1.0, min(seconds, 30.0))),
        )
        number = store.add(SESSIONS, 1)
        if not 0 < number < MOST_NUMBERS:
            raise ConnectionError("another process has written where its store counts connections")
        hello = Hello(
            worker=self._worker,
            incarnation=self._incarnation,
            clock=server.acknowledged,
            begun=server.begun,
            server=server.number,
            servers=len(self._servers),
            staleness=self._staleness,
            digest=self._layout.digest,
            sliced=self._sliced,
            host=server.host,
            connection=secrets.randbits(62),
        )
        key = f"{PREFIX}/{number}/answer"
        store.delete_key(key)  # somebody may have written it in advance
        said = f"{PREFIX}/{number}/hello"
        store.set(said, sealed(said, hello.encode().decode()))
        _check_answer(store.get(key), key, hello)
        session = Session(store, number, WORKER, hello)
        session.set_timeout(self._timeout)
        try:
            welcome = self._introduced(server, session, hello)
        except BaseException:
            session.abort()
            raise
        if server.begun is None:
            server.begun = server.acknowledged = welcome.clock
        server.store = store
        server.reached = True
        return session

    def _introduced(self, server: _Server, session: Session, hello: Hello) -> Frame:
        """Repeats the hello within the session, and returns the server's WELCOME."""
        session.send(hello.frame())
        parameters = []
        while (frame := session.receive()).kind is Kind.PARAMETER:
            parameters.append(frame.text)
        if frame.kind is Kind.WELCOME:
            return frame
        text = frame.text or "not welcome"
        if parameters:
            mine = [as_received(each) for each in in_words(self._layout.described)]
            text += f"; first difference: {first_difference(mine, parameters)}"
        raise RefusedError(f"{server.name}: {text}")


def _check_answer(value: bytes, key: str, hello: Hello) -> None:
    """Raises an error that is tried again, unless the server has read exactly this hello.

    Any process can write into the store, also a sealed answer of an earlier run. So nothing in it
    ends a worker.
    """
    try:
        answer = json.loads(opened(key, value.decode()))
        refused, fingerprint = answer.get("refused"), answer.get("hello")
    except ConfigMismatchError as error:  # the secrets differ, or one has none
        raise _DoubtfulRefusalError(str(error)) from None
    except Exception as error:
        raise ConnectionError(f"the answer in its store is not valid: {error}") from error
    if isinstance(refused, str):
        raise _DoubtfulRefusalError(printable(refused[:FRAME_NBYTES]))
    if fingerprint != hello.fingerprint:
        raise ConnectionError("the answer in its store is one to another hello")


def _say_goodbye(session: Session) -> None:
    session.send(Frame(Kind.GOODBYE))
    _done(session, 0)


def _done(session: Session, clock: int) -> Frame:
    """The answer to the request of this clock."""
    frame = session.receive()
    if frame.kind is Kind.REFUSED:
        raise RefusedError(frame.text)
    if frame.kind is not Kind.DONE or frame.clock != clock:
        raise ValueError(
            f"a server answered with {frame.kind.name} of clock {frame.clock}, not with DONE of "
            f"clock {clock}"
        )
    return frame
