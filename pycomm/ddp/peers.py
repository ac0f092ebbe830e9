"""Where processes that join an elastic training find its members: a file, or a port of hosts."""

from __future__ import annotations

import os
from typing import NamedTuple

from pycomm import options

PREFIX = "pycomm://"
_LAST_PORT = 65535
_MOST_HOSTS = 256
_ALLOWED = (
    "pycomm://HOST,HOST,...:PORT, as 'pycomm://alpha,beta:29600' or 'pycomm://[fd77::10]:29600': "
    f"at most {_MOST_HOSTS} hosts, and one port for all of them"
)


class PeersPort(NamedTuple):
    """``pycomm://alpha,beta:29600``."""

    hosts: tuple[str, ...]
    """Names or addresses, in the order in which they are asked."""
    port: int


def peers_port(peers: str) -> PeersPort | None:
    """None: ``peers`` is the name of a file.

    Raises:
        ValueError: It begins as an address, and is none.
    """
    if not peers.startswith(PREFIX):
        return None
    listed, _, port = peers.removeprefix(PREFIX).rpartition(":")
    hosts = [host.strip() for host in listed.split(",")]
    names = [host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host for host in hosts]
    if (
        not (port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT)
        or len(hosts) > _MOST_HOSTS
        or any(not name or set(name) & set("/[]@ ") for name in names)
        or any(":" in name and name == host for name, host in zip(names, hosts, strict=True))
    ):
        raise ValueError(f"Elastic.peers={peers!r} is not allowed: use {_ALLOWED}")
    return PeersPort(tuple(names), int(port))


def peers_in_force(peers: str | os.PathLike[str] | None) -> str | None:
    """Of ``Elastic(peers=...)``: itself, else the variable's. A file by its absolute name: it is
    written at each change of members, when the program may be in another folder.

    Raises:
        ValueError: As ``peers_port()``.
    """
    found = os.fspath(peers) if peers is not None else options.peers()
    if found and peers_port(found) is None and not os.path.isabs(found):
        return os.path.join(os.getcwd(), found)  # not abspath(): ".." behind a link is elsewhere
    return found or None
