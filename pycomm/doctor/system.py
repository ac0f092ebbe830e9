"""Reads from this host what ``HostFacts`` holds. Parsers take text, so that tests make it up."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import platform
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from pycomm._group import secrets
from pycomm._native import loader
from pycomm._settings import SECRET_FILE_VARIABLE, SETTINGS
from pycomm._version import __version__
from pycomm.doctor.bounded import within
from pycomm.doctor.facts import Firewall, HostFacts, Interface
from pycomm.doctor.rules import closed_families, input_chains
from pycomm.options import Options, ResolvedOptions

_LISTEN = "0A"
_RESOLVE_S = 5.0
_SLOW_RESOLVER_S = 2.0
_resolved: dict[str, tuple[list[str], float]] = {}
_CGROUPS = "/sys/fs/cgroup"
_DEVICES = Path("/sys/class/net")


def local_facts(
    environ: Mapping[str, str],
    master: str,
    master_port: int,
    store_port: int,
    identity: str,
    process: str,
) -> HostFacts:
    """Everything but what needs the other hosts. Never raises for what it finds.

    Args:
        environ: ``os.environ``: the settings in force.
        master: The store's host as the user wrote it; "" if there is none.
        master_port: Of the job's store.
        store_port: Of the store that is there now: by hand, the doctor's own.
        identity: ``host_identity()``.
        process: Random.
    """
    problems = []
    options = Options().resolve({})
    try:
        options = Options().resolve(environ)
    except ValueError as error:
        problems.append(str(error))
    first, last = options.port_range
    facts = passive_facts(options, environ)
    own_name = facts.name
    return dataclasses.replace(
        facts,
        identity=identity,
        process=process,
        problems=[*problems, *facts.problems],
        own_addresses=tuple(resolve(own_name)),
        master=master,
        master_port=master_port,
        master_addresses=tuple(resolve(master)) if master else (),
        slow_names=tuple(n for n in dict.fromkeys((own_name, master)) if n and is_slow_name(n)),
        port_range=(first, last),
        ports_free=sum(map(_is_free, range(first, last + 1))) if first else 0,
        listeners=tuple(listeners_of_this_host(store_port)),
        firewall=find_firewall(master_port),
    )


def passive_facts(options: ResolvedOptions, environ: Mapping[str, str] | None = None) -> HostFacts:
    """The facts that take a few milliseconds: no resolver, no other program, no port.

    ``own_addresses`` are those that /etc/hosts has.

    Args:
        options: The settings in force.
        environ: Where the secret is looked for; default ``os.environ``.
    """
    own_name = socket.gethostname()
    secret, unusable = secrets.state(environ)
    return HostFacts(
        name=own_name,
        versions=_versions(),
        problems=unusable,
        extension=why_no_extension(),
        same_everywhere={
            setting.field: str(getattr(options, setting.field))
            for setting in SETTINGS
            if setting.same_on_all_ranks
        },
        secret=secret.get("key_id", secret["state"]),
        interface_setting=options.interface,
        interface_origin=options.origins["interface"],
        interfaces=tuple(_interfaces()),
        cores_online=os.cpu_count() or 1,
        cores_usable=usable_cores(),
        files_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        files_open=len(os.listdir("/proc/self/fd")),
        memfd=_why_no_memfd(),
        own_addresses=tuple(addresses_in_hosts(_read("/etc/hosts"), own_name)),
    )


def addresses_in_hosts(table: str, name: str) -> list[str]:
    """The addresses of a name in the text of /etc/hosts."""
    rows = [line.partition("#")[0].split() for line in table.splitlines()]
    return [row[0] for row in rows if name in row[1:] and _is_address(row[0])]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def link_speed(name: str, devices: Path = _DEVICES) -> int:
    """Mbit/s as the driver of a network device reports it; -1 if nobody knows.

    A bond, VLAN or bridge has the speed of its slowest device below. Other virtual devices are
    unknown: the kernel reports 10000 for every veth.
    """
    device = devices / name
    below = [entry.name.removeprefix("lower_") for entry in device.glob("lower_*")]
    if below:
        return min((speed for one in below if (speed := link_speed(one, devices)) > 0), default=-1)
    if "/devices/virtual/" in os.path.realpath(device):
        return -1
    return _whole(_read(f"{device}/speed"), -1)


def networks_of(routes: str, routes6: str) -> dict[str, list[str]]:
    """The networks that each interface reaches without a router.

    Args:
        routes: /proc/net/route.
        routes6: /proc/net/ipv6_route.
    """
    found: dict[str, list[str]] = {}
    for name, target, gateway, *rest in _fields(routes, 8)[1:]:
        address, mask = (bytes.fromhex(text)[::-1] for text in (target, rest[4]))
        length = int.from_bytes(mask, "big").bit_count()
        if length and int(gateway, 16) == 0:
            found.setdefault(name, []).append(f"{ipaddress.IPv4Address(address)}/{length}")
    for target, bits, _, _, gateway, *rest in _fields(routes6, 10):
        length = int(bits, 16)
        if 0 < length < 128 and int(gateway, 16) == 0:
            text = f"{ipaddress.IPv6Address(bytes.fromhex(target))}/{length}"
            found.setdefault(rest[-1], []).append(text)
    return found


def _fields(table: str, least: int) -> list[list[str]]:
    rows = [line.split() for line in table.splitlines()]
    return [row for row in rows if len(row) >= least]


def network_of(address: str, networks: Iterable[str]) -> str:
    """The smallest of these networks that the address is in; "" if it is in none."""
    one = ipaddress.ip_address(address.partition("%")[0])
    holding = [net for net in map(ipaddress.ip_network, networks) if one in net]
    return str(max(holding, key=lambda net: net.prefixlen)) if holding else ""


def socket_options(environ: Mapping[str, str]) -> ResolvedOptions:
    """The settings; the defaults where they are not allowed, which is a problem of its own."""
    try:
        return Options().resolve(environ)
    except ValueError:
        return Options().resolve({})


def variables_in_force(environ: Mapping[str, str]) -> list[str]:
    """ "NAME=value" of each variable that sets something, to start another host alike."""
    settings = (name for one in SETTINGS for name in (one.variable, *one.fallbacks))
    names = dict.fromkeys([*settings, SECRET_FILE_VARIABLE])
    return [f"{name}={shlex.quote(environ[name])}" for name in names if environ.get(name, "")]


def resolve(host: str, *, again: bool = False) -> list[str]:
    """All addresses of a name in the resolver's order; empty if it has none, or is not in time.

    A name that has addresses, or that took long, is not looked up again: a resolver without a
    server takes half a minute, and the others wait meanwhile. ``again`` retries that, too.
    """
    if host not in _resolved or (again and not _resolved[host][0]):
        begin = time.monotonic()
        found = _look_up(host)
        took = time.monotonic() - begin
        if not found and took < _SLOW_RESOLVER_S:
            return []  # its entry may still come: a pod's name exists when the pod is ready
        _resolved[host] = (found, took)
    return list(_resolved[host][0])


def is_slow_name(host: str) -> bool:
    """Whether the resolver answered this name late, or not in time."""
    return host in _resolved and _resolved[host][1] >= _SLOW_RESOLVER_S


def _look_up(host: str) -> list[str]:
    try:
        found = within(_RESOLVE_S, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError:  # a TimeoutError, too
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_of_this_host(address: str) -> bool:
    """Whether a socket here can have this address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.bind((address, 0))
    except OSError:
        return False
    return True


def why_no_extension() -> str:
    """Why pycomm's extension does not load; "" if it does."""
    try:
        loader.load()
    except ImportError as error:
        return str(error)
    return ""


def host_identity() -> str:
    """Equal in two processes of one host and network namespace; also without the extension."""
    try:
        return loader.native.host_identity()
    except ImportError:
        namespace = os.readlink("/proc/self/ns/net")
        return f"{socket.gethostname()} {_read('/etc/machine-id').strip()} {namespace}"


def is_loopback(address: str) -> bool:
    """Whether this address leads to the host itself, whichever host that is."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def usable_cores() -> float:
    """Cores by CPU affinity and by the quotas of control groups, whichever is less."""
    affinity = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError):
        quota = quota_cores(Path("/proc/self/cgroup").read_text(), _read)
        return min(affinity, quota)
    return affinity


def quota_cores(cgroups: str, read: Callable[[str], str]) -> float:
    """The least CPU quota of a process's control groups, in cores; infinity if there is none.

    Args:
        cgroups: /proc/self/cgroup.
        read: Returns a file's text; "" if there is none.
    """
    least = float("inf")
    for line in cgroups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for folder in _upwards(path):
                least = min(least, _ratio(*(read(f"{_CGROUPS}{folder}/cpu.max").split() or [""])))
        elif "cpu" in controllers.split(","):
            for folder in _upwards(path):
                base = f"{_CGROUPS}/{controllers}{folder}"
                quota = read(f"{base}/cpu.cfs_quota_us").strip()
                least = min(least, _ratio(quota, read(f"{base}/cpu.cfs_period_us").strip()))
    return least


def _upwards(path: str) -> Iterable[str]:
    """ "/a/b" → "/a/b", "/a", "": a container sees its own group as the root."""
    folder = path.rstrip("/") if ".." not in path else ""
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]
    yield ""


def _ratio(quota: str, period: str = "100000", *_: str) -> float:
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else float("inf")


def listeners(table: str, port: int) -> list[str]:
    """The local addresses that listen at ``port``, from /proc/net/tcp or tcp6."""
    found = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        raw, _, number = fields[1].partition(":")
        if fields[3] == _LISTEN and int(number, 16) == port:
            words = bytes.fromhex(raw)
            packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
            found.append(str(ipaddress.ip_address(packed)))
    return found


def listeners_of_this_host(port: int) -> list[str]:
    """All addresses of this host at which somebody listens on ``port``."""
    return [
        address
        for name in ("tcp", "tcp6")
        for address in listeners(_read(f"/proc/net/{name}"), port)
    ]


def find_firewall(port: int) -> Firewall:
    """The tool that is in charge of this host's firewall, and whether the port is closed in it."""
    if "ENABLED=yes" in _read("/etc/ufw/ufw.conf"):
        return Firewall(tool="ufw")
    if _has_firewalld():
        return Firewall(tool="firewalld")
    if shutil.which("nft"):
        listing = _output("nft", "-j", "list", "ruleset")
        return Firewall("nft", input_chains(listing), closed_families(listing, port))
    return Firewall(tool="iptables" if shutil.which("iptables") else "")


def _has_firewalld() -> bool:
    """Under systemd, firewalld writes no pid file."""
    if Path("/run/firewalld.pid").exists():
        return True
    return _output("systemctl", "is-active", "firewalld").strip() == "active"


def _versions() -> dict[str, str]:
    return {
        "pycomm": __version__,
        "torch": str(torch.__version__),
        "built for torch": ", ".join(loader.built_for()) or "not built",
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda) if torch.cuda.is_available() else "no GPU",
        "interpreter": sys.executable,
    }


def _interfaces() -> Iterable[Interface]:
    if why_no_extension():
        return
    networks = networks_of(_read("/proc/net/route"), _read("/proc/net/ipv6_route"))
    for entry in loader.native.list_interfaces():
        name = str(entry["name"])
        yield Interface(
            name=name,
            address=str(entry["address"]),
            family=str(entry["family"]),
            loopback=bool(entry["loopback"]),
            mtu=_whole(_read(f"{_DEVICES}/{name}/mtu"), 0),
            speed_mbps=link_speed(name),
            wireless=(_DEVICES / name / "wireless").exists(),
            network=network_of(str(entry["address"]), networks.get(name, ())),
        )


def _why_no_memfd() -> str:
    try:
        os.close(os.memfd_create("pycomm-doctor"))
    except (OSError, AttributeError) as error:
        return str(error)
    return ""


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _whole(text: str, default: int) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    return default


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # also where the driver does not know: EINVAL
        return ""


def _output(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done: Any = subprocess.run(
            command, capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL
        )
        return str(done.stdout)
    return ""
