"""Asks another host's doctor who it is. Server and client of a small protocol of JSON lines.

A server listens while its doctor runs. It answers only requests that have the token of this run,
which hosts learn from the store, so it is of no use to strangers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

OK = "ok"
REFUSED = "refused"
SILENT = "no answer"
UNREACHABLE = "unreachable"
STRANGER = "another program"
OTHER = "another host"

LINK, STORE, ELSEWHERE, IN_RANGE = "link", "store", "elsewhere", "in range"

_MAX_LINE = 1 << 20  # far more than a report of flow.MAX_SECONDS
_IP_BIND_ADDRESS_NO_PORT = 24  # linux/in.h; Python has no name for it before 3.12
_PAUSE_S = 0.05
_HELLO_LIMIT_S = 5.0
_PINGS = 5

Handler = Callable[[socket.socket, Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """How one host reached one address of another."""

    source: int
    """Index of the host that asked."""
    target: int
    purpose: str = LINK
    """LINK: as the engine connects, to where it listens and from the address that it chose; STORE:
    the store's port; ELSEWHERE: another address of the target, or the same from any address;
    IN_RANGE: as LINK, to another port of the target's range."""
    address: str = ""
    port: int = 0
    outcome: str = OK
    detail: str = ""
    """The kernel's name of the error."""
    seen: str = ""
    """From which address the target saw the question come."""
    answered_by: str = ""
    rtt_ms: float = 0.0

    @property
    def ok(self) -> bool:
        return self.outcome == OK


class Server:
    """Listens on all interfaces until it is closed, one thread per connection."""

    def __init__(
        self, token: str, process: str, ports: Iterable[int], handlers: Mapping[str, Handler]
    ) -> None:
        """Listens on the first of ``ports`` that is free; 0 is any."""
        self._token = token
        self._process = process
        self._handlers = {"hello": self._hello, **handlers}
        self._sockets: list[socket.socket] = []
        self.port = self._listen(ports)

    def also_listen(self, port: int) -> str:
        """Listens at this port, too; why not, if it cannot."""
        try:
            self._listen([port])
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def listen_in(self, ports: Sequence[int], count: int) -> list[int]:
        """Listens at ``count`` of the ports, the first that are free, and at the last free one.

        Returns:
            Those at which it listens now and did not before.
        """
        taken: list[int] = []
        for order, limit in ((ports, count), (reversed(ports), count + 1)):
            for port in order:
                if len(taken) == limit or port in taken:
                    break
                if not self.also_listen(port):
                    taken.append(port)
        return taken

    def close(self) -> None:
        """Ends the threads that accept; those that serve end with their connections."""
        for listener in self._sockets:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _listen(self, ports: Iterable[int]) -> int:
        refused: OSError | None = None
        for port in ports:
            try:
                listener = _listener(port)
            except OSError as error:
                refused = error
                continue
            self._sockets.append(listener)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            return int(listener.getsockname()[1])
        raise refused or OSError(errno.EADDRINUSE, "no port is free")

    def _accept(self, listener: socket.socket) -> None:
        while listener.fileno() >= 0:
            try:
                connection, _ = listener.accept()
            except OSError:
                # It is closed; or out of descriptors, or the peer has left, which both pass.
                time.sleep(_PAUSE_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, KeyError):
            connection.settimeout(_HELLO_LIMIT_S)
            request = read_line(connection)
            if request.get("token") == self._token:
                self._handlers[str(request["op"])](connection, request)

    def _hello(self, connection: socket.socket, request: Mapping[str, Any]) -> None:
        seen = plain(connection.getpeername()[0])
        write_line(connection, {"process": self._process, "seen": seen})
        for _ in range(_PINGS):
            connection.sendall(connection.recv(1))


def ask(question: Probe, token: str, timeout_s: float, local: str = "") -> Probe:
    """Connects to the address of the question; returns it with the outcome. Never raises.

    Args:
        question: Where to.
        token: Of this run.
        timeout_s: For each step.
        local: The address of this host to connect from; "": as the routing table has it.
    """
    try:
        with connect(question.address, question.port, timeout_s, local=local) as connection:
            connection.settimeout(timeout_s)
            write_line(connection, {"token": token, "op": "hello"})
            answer = read_line(connection)
            rtt_ms = 1000 * min(_ping(connection) for _ in range(_PINGS))
    except (TimeoutError, ConnectionError, OSError, ValueError) as error:
        return _failed(question, error)
    return dataclasses.replace(
        question,
        seen=str(answer.get("seen", "")),
        answered_by=str(answer.get("process", "")),
        rtt_ms=rtt_ms,
    )


def knock(question: Probe, timeout_s: float) -> Probe:
    """Connects and leaves; returns the question with the outcome. Never raises."""
    try:
        connect(question.address, question.port, timeout_s).close()
    except OSError as error:
        return _failed(question, error)
    return question


def connect(
    address: str, port: int, timeout_s: float, max_segment: int = 0, *, local: str = ""
) -> socket.socket:
    """A TCP connection, as the engine makes it (csrc/transport/net/socket_connect.cc).

    Args:
        address: Of the other host. The zone of a link-local address is that of ``local``: another
            host's interface names mean nothing here.
        port: Of the other host.
        timeout_s: For each step.
        max_segment: Bounds the bytes of a packet, in both directions; 0: as the MTU allows.
        local: The address of this host to connect from; "": as the routing table has it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        if max_segment:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, max_segment)
        if local and (":" in local) == (":" in address):
            with contextlib.suppress(OSError):  # a kernel without it takes a port right away
                connection.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            connection.bind(_numeric(local, 0, family))
        connection.connect(_numeric(with_zone(address, local), port, family))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection


def with_zone(address: str, local: str) -> str:
    """A link-local address with the interface of ``local``: "fe80::2%eth0"."""
    zone = local.partition("%")[2]
    if not zone or not address.startswith("fe80:"):
        return address
    return f"{address.partition('%')[0]}%{zone}"


def _numeric(address: str, port: int, family: int) -> Any:
    flags = socket.AI_NUMERICHOST
    return socket.getaddrinfo(address, port, family, socket.SOCK_STREAM, flags=flags)[0][4]


def write_line(connection: socket.socket, content: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(content).encode() + b"\n")


def read_line(connection: socket.socket) -> dict[str, Any]:
    """One JSON object. Reads byte by byte: what follows the line is another's."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionResetError(errno.ECONNRESET, "closed before it answered")
        line += byte
        if len(line) > _MAX_LINE:
            raise ValueError("the line is too long")
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError("no JSON object")
    return content


def plain(address: str) -> str:
    """ "::ffff:10.0.0.1" → "10.0.0.1"."""
    return address.removeprefix("::ffff:")


def _ping(connection: socket.socket) -> float:
    begin = time.perf_counter()
    connection.sendall(b"p")
    if not connection.recv(1):
        raise ConnectionResetError(errno.ECONNRESET, "closed while it answered")
    return time.perf_counter() - begin


def _failed(question: Probe, error: Exception) -> Probe:
    """A refusal and silence have different causes, so they are different outcomes."""
    number = getattr(error, "errno", None) or 0
    outcome, detail = STRANGER, errno.errorcode.get(number, str(error))
    if number == errno.ECONNREFUSED:
        outcome = REFUSED
    elif isinstance(error, TimeoutError):
        outcome, detail = SILENT, "ETIMEDOUT"
    elif number in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EACCES):
        outcome = UNREACHABLE
    return dataclasses.replace(question, outcome=outcome, detail=detail)


def _listener(port: int) -> socket.socket:
    """On all interfaces, IPv6 and IPv4, so that a probe shows which address works."""
    try:
        listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:  # a host without IPv6
        return _bound(socket.socket(socket.AF_INET, socket.SOCK_STREAM), "0.0.0.0", port)
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return _bound(listener, "::", port)


def _bound(listener: socket.socket, address: str, port: int) -> socket.socket:
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener
