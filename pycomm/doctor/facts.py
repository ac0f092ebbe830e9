"""What the doctor knows of one host, and what it concludes. Plain values that travel as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

STOP, SLOW, NOTE = "stop", "slow", "note"
LEVELS = (STOP, SLOW, NOTE)
"""The job would not start; it starts and is slow; good to know. In the order of the screen."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One conclusion, with what to do about it."""

    level: str
    code: str
    """For programs, as "BLOCKED"; stable."""
    host: str
    """Where to act."""
    text: str
    todo: Sequence[str] = ()
    """Lines to read or to paste; a command line begins with "$ "."""

    def as_line(self) -> str:
        """All of it as one line of a log."""
        todo = [f"`{line[2:]}`" if line.startswith("$ ") else line for line in self.todo]
        return " ".join([f"{self.text}.", *todo])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interface:
    """One address of a network interface."""

    name: str = ""
    address: str = ""
    family: str = ""
    loopback: bool = False
    mtu: int = 0
    speed_mbps: int = -1
    """As the driver reports it; of a bond, VLAN or bridge, the slowest device below. -1: unknown,
    as of virtual devices, which report any number."""
    wireless: bool = False
    network: str = ""
    """ "10.0.0.0/24": the addresses that it reaches without a router; "" if unknown."""


@dataclasses.dataclass(frozen=True)
class Firewall:
    """Which tool changes this host's firewall."""

    tool: str = ""
    """ "ufw", "firewalld", "nft", "iptables"; "" where none is in use."""
    chains: Sequence[str] = ()
    """nft only: "inet filter input", each base chain that can drop an incoming packet. A packet
    passes only if all of them accept it. Empty if the ruleset is not readable."""
    closed: Sequence[str] | None = None
    """nft only: the families, "ipv4" and "ipv6", for which a rule closes the port of the job's
    store to other hosts. None if that cannot be seen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFacts:
    """One host. Every field has a default: a host with another version may lack some."""

    name: str = ""
    ranks: Sequence[int] = (0,)
    identity: str = ""
    process: str = ""
    """Random, so that a reply shows which process answered."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problems: Sequence[str] = ()
    """Settings that are not allowed."""
    extension: str = ""
    """Why the extension does not load; "" if it does."""
    slow_names: Sequence[str] = ()
    """Names that the resolver of this host answered late, or not in time."""
    same_everywhere: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Settings that all ranks must have alike."""
    secret: str = ""
    """ "none", "cannot be used", or its public key id; "" from an older version."""
    interface_setting: str = ""
    interface_origin: str = ""
    interfaces: Sequence[Interface] = ()
    cores_online: int = 0
    cores_usable: float = 0.0
    """After CPU affinity and the quotas of control groups."""
    files_limit: int = 0
    files_open: int = 0
    memfd: str = ""
    """Why memory cannot be shared within the host; "" if it can."""
    own_addresses: Sequence[str] = ()
    """What the host's own name resolves to, here."""
    master: str = ""
    master_port: int = 0
    master_addresses: Sequence[str] = ()
    """What the store's host resolves to, here."""
    address: str = ""
    """Where the engine would listen, as it chose itself."""
    interface: str = ""
    why: str = ""
    port: int = 0
    """Where the doctor listens; of the port range if there is one."""
    further_ports: Sequence[int] = ()
    """Of the port range: where it listens as well."""
    ports_for_ranks: int = 0
    """So many of them, the first, the other ranks of the host would take. The last one is only the
    last that is free."""
    port_range: Sequence[int] = (0, 0)
    ports_free: int = 0
    listeners: Sequence[str] = ()
    """Addresses on which somebody listens at the store's port of this host."""
    firewall: Firewall = dataclasses.field(default_factory=Firewall)

    @property
    def chosen(self) -> Interface | None:
        """The interface that the engine would use."""
        found = (one for one in self.interfaces if one.address == self.address)
        return next(found, None)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HostFacts:
        """Reads what another version may have written: unknown fields are left out."""
        raw: dict[str, Any] = known(cls, json.loads(text))
        interfaces = raw.pop("interfaces", ())
        firewall = known(Firewall, raw.pop("firewall", {}))
        return cls(
            **raw,
            interfaces=tuple(Interface(**known(Interface, one)) for one in interfaces),
            firewall=Firewall(**firewall),
        )


def known(cls: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version's ``cls`` has, of what another version may have written."""
    fields = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in raw.items() if name in fields}


def unique_names(names: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """Host names for the screen: cloned hosts have one name, so their addresses are added."""
    return [
        name if names.count(name) == 1 else f"{name}({address})"
        for name, address in zip(names, addresses, strict=True)
    ]


def listed(names: Sequence[str], limit: int = 6) -> str:
    """ "a", "a and b", "a, b and c", "a, b and 9 more"."""
    names = list(names)
    if len(names) > limit:
        names = [*names[: limit - 1], f"{len(names) - limit + 1} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
