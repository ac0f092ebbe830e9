"""Stage 0: what is wrong on each host, and what does not fit between hosts. No network."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address, ip_network

from pycomm._torch_range import torch_minor
from pycomm.doctor.facts import NOTE, STOP, Finding, HostFacts, Interface, listed
from pycomm.doctor.firewall import lines_to_close
from pycomm.doctor.rules import FAMILIES
from pycomm.doctor.system import is_loopback

_ANY = ("0.0.0.0", "::")
_VIRTUAL = re.compile(
    r"(docker|br-|virbr|veth|cni|flannel|cali|kube-|lxc|lxd|podman|nerdctl|vmnet|vboxnet|dummy|tunl)"
)
_GIGABIT = 1000
"""Mbit/s of a wire that is faster than Wi-Fi mostly is, and steadier."""
_LOCAL_BRIDGE = "a local bridge that other hosts cannot reach"


def judge(hosts: Sequence[HostFacts]) -> list[Finding]:
    """All findings of stage 0; ``hosts`` in rank order, the store's host first."""
    return [finding for check in _CHECKS for finding in check(hosts)]


def files_needed(host: HostFacts, ranks: int) -> int:
    """Descriptors that one process takes: what Python has open, and a group of so many ranks."""
    return host.files_open + 3 * (ranks - 1) + 8


def _settings(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        for problem in host.problems:
            yield Finding(STOP, "SETTING", host.name, f"{host.name}: {problem}")


def _extensions(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        if host.extension:
            yield Finding(STOP, "EXTENSION", host.name, f"{host.name}: {host.extension}")


def _slow_resolver(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        if host.slow_names:
            text = f"{host.name}: looking up {listed(host.slow_names)} takes seconds, or fails late"
            todo = [
                "The job waits for it, too. Check the servers in /etc/resolv.conf, or add the "
                "names to /etc/hosts.",
                f"$ time getent hosts {host.slow_names[0]}",
            ]
            yield Finding(NOTE, "SLOW_RESOLVER", host.name, text, todo)


def _versions(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    checks: list[tuple[str, str, Callable[[str], str]]] = [
        ("pycomm", STOP, str),
        ("torch", STOP, torch_minor),
        ("python", NOTE, torch_minor),
    ]
    for name, level, shortened in checks:
        values = [host.versions.get(name, "?") for host in hosts]
        usual = Counter(map(shortened, values)).most_common(1)[0][0]
        others = next(value for value in values if shortened(value) == usual)
        for host, value in zip(hosts, values, strict=True):
            if shortened(value) != usual:
                todo = ["Install the same on all hosts."]
                if python := host.versions.get("interpreter"):
                    todo[0] += f" On {host.name} this Python runs:"
                    todo.append(f"$ {python} -m pip list")
                text = f"{host.name}: {name} {value}, {_others(hosts)} {others}"
                yield Finding(level, "VERSION", host.name, text, todo)


def _same_settings(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for name in sorted({name for host in hosts for name in host.same_everywhere}):
        values = [host.same_everywhere.get(name, "?") for host in hosts]
        usual = Counter(values).most_common(1)[0][0]
        for host, value in zip(hosts, values, strict=True):
            if value != usual:
                text = f"{host.name}: {name} is {value!r}, elsewhere {usual!r}"
                todo = ["Set it alike on all hosts: docs/options.md has the variable."]
                yield Finding(STOP, "SETTINGS_DIFFER", host.name, text, todo)


def _secrets(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """One secret everywhere, or none. Key ids are public."""
    known = [host for host in hosts if host.secret]
    usual = Counter(host.secret for host in known).most_common(1)[0][0] if known else ""
    for host in known:
        if host.secret != usual:
            text = f"{host.name}: {secret_text(host.secret)}, elsewhere {secret_text(usual)}"
            todo = ["Copy one secret to all hosts: docs/security.md."]
            yield Finding(STOP, "SECRET_DIFFERS", host.name, text, todo)


def secret_text(secret: str) -> str:
    """``HostFacts.secret`` in words."""
    words = {"none": "no secret", "cannot be used": "a secret that cannot be used"}
    return words.get(secret, f"secret {secret}")


def _mtus(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    mtus = [one.mtu if (one := host.chosen) and not one.loopback else 0 for host in hosts]
    usual = _usual(mtus)
    for host, mtu in zip(hosts, mtus, strict=True):
        if 0 < mtu != usual:
            text = f"{host.name}: MTU {mtu} on {host.interface}, {_others(hosts)} {usual}"
            todo = [
                "Where the larger packets do not pass, connections open and then hang. "
                f"If the network carries it, on {host.name}:",
                f"$ sudo ip link set {host.interface} mtu {usual}",
            ]
            yield Finding(NOTE, "MTU_DIFFERS", host.name, text, todo)


def _link_speeds(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    speeds = [one.speed_mbps if (one := host.chosen) else -1 for host in hosts]
    usual = _usual(speeds)
    for host, speed in zip(hosts, speeds, strict=True):
        if 0 < speed < usual:
            text = (
                f"{host.name}: the driver of {host.interface} reports {speed} Mbit/s, "
                f"{_others(hosts)} {usual}"
            )
            todo = ["Cable or switch port?", f"$ ethtool {host.interface} | grep Speed"]
            yield Finding(NOTE, "LINK_SPEED", host.name, text, todo)


def _slower_interfaces(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        used = host.chosen
        found = faster_interface(host, [one for one in hosts if one is not host])
        if used is None or found is None:
            continue
        speed = "Wi-Fi" if used.wireless else f"{used.speed_mbps} Mbit/s"
        by = f" by {host.interface_origin}" if host.interface_setting else ""
        text = (
            f"{host.name}: {used.name} ({speed}) was chosen{by}; {found.name} "
            f"({found.speed_mbps} Mbit/s) reaches the same hosts, in {found.network}"
        )
        names = [
            (found if one is host else _faster(one, _limit(used), found.network)[0]).name
            for one in hosts
        ]
        if value := _one_value(hosts, names):
            where = "On all hosts; with pycomm run, where you type it:"
            todo = [where, f"$ export PYCOMM_SOCKET_IFNAME={value}"]
        else:
            where = "No one value fits all, so not with pycomm run. "
            todo = [
                line
                for one, name in zip(hosts, names, strict=True)
                for line in (f"On {one.name}:", f"$ export PYCOMM_SOCKET_IFNAME={name}")
            ]
            todo[0] = where + todo[0]
        yield Finding(NOTE, "SLOWER_INTERFACE", host.name, text, todo)


def faster_interface(host: HostFacts, others: Sequence[HostFacts]) -> Interface | None:
    """An interface that, by its driver, is faster than the one in use, and whose network holds an
    address of each other host, at an interface that is not known to be as slow."""
    used = host.chosen
    if used is None or not others:
        return None
    limit = _limit(used)
    if limit <= 0:
        return None
    elsewhere = {one.address for other in others for one in other.interfaces}
    found = [
        one
        for one in host.interfaces
        if one.speed_mbps > limit
        and not (one.loopback or one.wireless or is_virtual(one.name))
        and one.family == used.family
        and one.network
        and one.address not in elsewhere
        and not one.address.startswith("fe80:")
        and all(_faster(other, limit, one.network) for other in others)
    ]
    return max(found, key=lambda one: one.speed_mbps, default=None)


def _limit(used: Interface) -> int:
    return _GIGABIT - 1 if used.wireless else used.speed_mbps


def _faster(host: HostFacts, limit: int, network: str) -> list[Interface]:
    """Interfaces in that network that are not known to be so slow; those of a known speed first."""
    found = [
        one
        for one in host.interfaces
        if not (one.loopback or one.wireless or is_virtual(one.name))
        and (one.speed_mbps < 0 or one.speed_mbps > limit)
        and ip_address(one.address.partition("%")[0]) in ip_network(network)
    ]
    return sorted(found, key=lambda one: -one.speed_mbps)


def _one_value(hosts: Sequence[HostFacts], names: Sequence[str]) -> str:
    """A list of interfaces by which each host takes its own of ``names``; "" if there is none."""

    def taken(host: HostFacts, order: Sequence[str]) -> str:
        own = [one.name for one in host.interfaces]
        fits = (n for each in order for n in (each, *own) if n in own and n.startswith(each))
        return next(fits)

    for order in itertools.islice(itertools.permutations(dict.fromkeys(names)), 100):
        if all(taken(host, order) == name for host, name in zip(hosts, names, strict=True)):
            return ",".join(order)
    return ""


def _usual(values: Sequence[int]) -> int:
    """The value of most hosts, of several such the largest; 0 if no host has one above 0."""
    counts = Counter(value for value in values if value > 0)
    return max(counts, key=lambda value: (counts[value], value), default=0)


def _others(hosts: Sequence[HostFacts]) -> str:
    return "the other has" if len(hosts) == 2 else "the others have"


def _descriptors(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    ranks = sum(len(host.ranks) for host in hosts)
    for host in hosts:
        need = files_needed(host, ranks)
        if 0 < host.files_limit < need:
            text = f"{host.name}: at most {host.files_limit} open files, a rank needs {need}"
            todo = [
                "On that host, before the command:",
                "$ ulimit -n 65536",
                "If that is refused: nofile in /etc/security/limits.conf, then log in again.",
            ]
            yield Finding(STOP, "DESCRIPTORS", host.name, text, todo)


def _memfd(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        if host.memfd and len(host.ranks) > 1:
            text = f"{host.name}: ranks share no memory ({host.memfd}); they use sockets instead"
            yield Finding(NOTE, "MEMFD", host.name, text)


def _cores(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        usable = host.cores_usable
        if 0 < usable < host.cores_online:
            text = f"{host.name}: this process may use {usable:g} of {host.cores_online} cores"
            todo = ["Container quota, Slurm or taskset. Count on these when you set threads."]
            yield Finding(NOTE, "CORES", host.name, text, todo)
        if 0 < usable < len(host.ranks):
            text = f"{host.name}: {len(host.ranks)} ranks share {usable:g} cores"
            todo = [f"Start {max(1, math.floor(usable))} ranks there, or give it more cores."]
            yield Finding(NOTE, "FEW_CORES", host.name, text, todo)


def master_name(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Whether every host finds the first one under the name that the job uses."""
    for index, host in enumerate(hosts):
        master = host.master
        if not master:
            continue
        if not host.master_addresses:
            text = f"{host.name}: the name {master} has no address here"
            todo = [f"Add it to /etc/hosts of {host.name}, or use an address instead of the name."]
            yield Finding(STOP, "MASTER_UNKNOWN", host.name, text, todo)
        elif index > 0 and all(map(is_loopback, host.master_addresses)):
            text = (
                f"{host.name}: {master} is {listed(host.master_addresses)} here, which is "
                f"{host.name} itself and not {hosts[0].name}"
            )
            todo = [f"In /etc/hosts of {host.name}: give {master} the address of {hosts[0].name}."]
            yield Finding(STOP, "MASTER_IS_LOOPBACK", host.name, text, todo)


def _own_name(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Debian's installer writes it so. pycomm asks the routing table instead; others do not."""
    found = [host for host in hosts if host.own_addresses and _all_loopback(host)]
    if len(hosts) < 2 or not found:
        return
    names = listed([host.name for host in found])
    where = found[0].own_addresses[0]
    one = found[0]
    text = f"{names}: own name is {where} in /etc/hosts. pycomm works; gloo may not"
    todo = [
        f"For gloo and torchrun's c10d rendezvous, in /etc/hosts of {one.name}:",
        f"$ {one.address or '…'} {one.name}",
    ]
    yield Finding(NOTE, "OWN_NAME_LOOPBACK", one.name, text, todo)


def _all_loopback(host: HostFacts) -> bool:
    return all(map(is_loopback, host.own_addresses))


def twins_chosen(hosts: Sequence[HostFacts]) -> list[int]:
    """Hosts that would listen on an address that another host has, too."""
    return [
        index
        for owners in _owners(hosts).values()
        for index in owners.hosts
        if owners.is_twin and hosts[index].address == owners.address
    ]


@dataclasses.dataclass
class _Owners:
    address: str
    interface: str
    hosts: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_twin(self) -> bool:
        return len(self.hosts) > 1


def _owners(hosts: Sequence[HostFacts]) -> dict[tuple[str, str], _Owners]:
    found: dict[tuple[str, str], _Owners] = {}
    for index, host in enumerate(hosts):
        for one in host.interfaces:
            if not one.loopback and not one.address.startswith("fe80:"):
                key = (one.address, one.name)
                found.setdefault(key, _Owners(one.address, one.name)).hosts.append(index)
    return found


def is_virtual(name: str) -> bool:
    """Whether this is, by its name, an interface within the host: its address is no mistake."""
    return _VIRTUAL.match(name) is not None


def _twins(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    unused: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    twins = {(name, address) for (address, name), one in _owners(hosts).items() if one.is_twin}
    for owners in _owners(hosts).values():
        if not owners.is_twin:
            continue
        name, address = owners.interface, owners.address
        users = [hosts[index] for index in owners.hosts if hosts[index].address == address]
        if not users:
            unused.setdefault((name, tuple(owners.hosts)), []).append(address)
            continue
        names = listed([hosts[index].name for index in owners.hosts])
        # Where nobody set it, the engine followed the route to a host where somebody did.
        user = next((one for one in users if one.interface_setting), users[0])
        by = f" by {user.interface_origin}={user.interface_setting}"
        text = (
            f"{user.name}: {'wrong interface' if is_virtual(name) else 'duplicate address'}: "
            f"{name} was chosen{by if user.interface_setting else ''}, and its address {address} "
            f"is the same on {names}"
        )
        why = f"{name} is {_LOCAL_BRIDGE}." if is_virtual(name) else "Give each host its own, or:"
        better = [
            one.name
            for one in user.interfaces
            if not one.loopback
            and not is_virtual(one.name)
            and (one.name, one.address) not in twins
        ]
        todo = [f"{why} On {user.name}:", f"$ export PYCOMM_SOCKET_IFNAME={(better or ['…'])[0]}"]
        yield Finding(STOP, "TWIN_CHOSEN", user.name, text, todo)
    for (name, indices), addresses in unused.items():
        names = listed([hosts[index].name for index in indices])
        what = _LOCAL_BRIDGE if is_virtual(name) else "a duplicate address"
        text = f"{name} has {listed(addresses, 3)} on {names}: {what}; pycomm does not use it"
        yield Finding(NOTE, "TWIN", hosts[indices[0]].name, text)


def _ports(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    for host in hosts:
        first, last = host.port_range
        if first and host.ports_free < len(host.ranks):
            text = (
                f"{host.name}: {host.ports_free} of the ports {first}-{last} are free, "
                f"{len(host.ranks)} are needed per process group"
            )
            todo = ["Widen PYCOMM_PORT_RANGE. To see who holds a port:", "$ ss -ltnp"]
            yield Finding(STOP, "PORTS", host.name, text, todo)


def _open_store(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    first = hosts[0]
    if len(hosts) < 2 or not first.master_port or not set(first.listeners) & set(_ANY):
        return
    where = next(one for one in _ANY[::-1] if one in first.listeners)
    port = first.master_port
    text = f"{first.name}: torch's store listens on all interfaces ({where} port {port})"
    closed = first.firewall.closed
    still_open = [one for one in FAMILIES[: 1 + (where == "::")] if one not in (closed or ())]
    if not still_open:
        return
    if closed:
        text += f". A rule closes the port for {closed[0]}, and none for {still_open[0]}"
    sources = [host.address for host in hosts[1:] if host.address] or ["…"]
    todo = ["Anyone who reaches that port can stop the job. To admit only its hosts:"]
    todo += lines_to_close(first.firewall, sources, port)
    if closed is None:
        todo += [
            "Whether these rules are in force cannot be seen from here (only root reads nftables, "
            "and other firewalls are not read). To confirm, on a host outside the job:",
            f"$ nc -z -v -w 3 {first.address or '…'} {port}",
            "It must time out.",
        ]
    yield Finding(NOTE, "STORE_OPEN", first.name, text, todo)


_CHECKS: tuple[Callable[[Sequence[HostFacts]], Iterator[Finding]], ...] = (
    _extensions,
    _settings,
    _versions,
    _same_settings,
    _secrets,
    _descriptors,
    _mtus,
    _link_speeds,
    _slower_interfaces,
    _slow_resolver,
    master_name,
    _twins,
    _ports,
    _memfd,
    _cores,
    _own_name,
    _open_store,
)
