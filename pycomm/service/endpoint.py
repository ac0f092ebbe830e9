"""Addresses of servers, and the variables in which Paddle's launchers hand them out."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence


def parse_endpoint(text: str) -> tuple[str, int]:
    """The host and port of "10.0.0.1:6170" or "[::1]:6170".

    Raises:
        ValueError: It is neither.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address of a server. Try: HOST:PORT, as 10.0.0.1:6170")
    return host, int(port)


def parse_endpoints(servers: str | Sequence[str] | None) -> list[tuple[str, int]]:
    """All servers in their order; None reads ``PADDLE_PSERVERS_IP_PORT_LIST``.

    Raises:
        ValueError: There is none, one is wrong, or one stands twice.
    """
    if servers is None:
        servers = os.environ.get("PADDLE_PSERVERS_IP_PORT_LIST", "")
    listed = servers.split(",") if isinstance(servers, str) else list(servers)
    found = [parse_endpoint(each) for each in listed if each.strip()]
    if not found:
        raise ValueError(
            "no servers: pass servers='10.0.0.1:6170,10.0.0.2:6170' or set "
            "PADDLE_PSERVERS_IP_PORT_LIST"
        )
    if len(set(found)) != len(found):
        raise ValueError(f"a server stands twice in {listed}")
    return found


def number_from(given: int | None, variable: str, value: str | None, what: str) -> int:
    """``given``, else the number in Paddle's variable.

    Raises:
        ValueError: There is neither, or it is negative.
    """
    if given is None:
        if value is None:
            raise ValueError(f"{what} is missing: pass it, or set {variable}")
        try:
            given = int(value)
        except ValueError:
            raise ValueError(f"{variable}={value!r} is no number") from None
    if given < 0:
        raise ValueError(f"{what} is {given}, which is negative")
    return given


def workers_from(given: int | None, what: str) -> int:
    """How many workers a service has: ``given``, else ``PADDLE_TRAINERS_NUM``.

    Raises:
        ValueError: There is neither, or it is less than 1.
    """
    number = number_from(given, "PADDLE_TRAINERS_NUM", os.environ.get("PADDLE_TRAINERS_NUM"), what)
    if number < 1:
        raise ValueError(f"{what} is 0: a service needs at least one worker")
    return number


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on exactly this address; torch's store would listen on all.

    Raises:
        OSError: The address is not this host's, or is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
