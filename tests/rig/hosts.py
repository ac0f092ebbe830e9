"""Two hosts on one machine: network namespaces, a veth pair between them, and what runs inside.

Needs root and `ip`. Nothing leaves the namespaces, and whatever runs in them is killed by its pid
before they go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT

DOCKER = "172.17.0.1"  # the same on both hosts, as with a real bridge: leads nowhere
LIMIT_S = 100.0


@dataclasses.dataclass(frozen=True)
class Host:
    """A network namespace that is a host to pycomm."""

    name: str
    address: str
    address_v6: str

    @property
    def namespace(self) -> str:
        return f"pycomm-{os.getpid()}-{self.name}"

    def ip(self, *arguments: str) -> None:
        """Runs `ip ARGUMENTS` inside."""
        run("ip", "-n", self.namespace, *arguments)

    def command(self, *arguments: str) -> list[str]:
        """What runs ARGUMENTS inside, as one process and not two: `ip netns exec` becomes it."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def kill_all(self) -> None:
        """Ends every process inside; the namespace is ours, so they are too."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, timeout=60
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def run(*command: str, **options: Any) -> str:
    """What a command printed; OSError with what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    if done.returncode != 0:
        raise OSError(f"{shlex.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def make(host: Host, others: Sequence[Host]) -> None:
    """Makes the namespace. Its names: itself 127.0.1.1, as Debian's installer writes it."""
    run("ip", "netns", "add", host.namespace)
    folder = Path("/etc/netns") / host.namespace
    while not folder.exists():  # the end of another session's test may remove the empty parent
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True)
    names = {"localhost": "127.0.0.1", host.name: "127.0.1.1"}
    names |= {other.name: other.address for other in others if other != host}
    # `ip netns exec` puts this file in the place of /etc/hosts.
    (folder / "hosts").write_text("".join(f"{names[name]} {name}\n" for name in names))


def connect(alpha: Host, beta: Host) -> None:
    """Lays the wire, eth0 to eth0, and gives each host a bridge that leads nowhere."""
    for host in (alpha, beta):  # the bridge first: taking the first interface is wrong
        host.ip("link", "set", "lo", "up")
        host.ip("link", "add", "docker0", "type", "veth", "peer", "name", "docker1")
        host.ip("addr", "add", f"{DOCKER}/16", "dev", "docker0")
        host.ip("link", "set", "docker1", "up")
        host.ip("link", "set", "docker0", "up")
    # Both ends are made where they belong; nothing shows up in the machine's own namespace.
    peer = ["peer", "name", "eth0", "netns", beta.namespace]
    run("ip", "link", "add", "eth0", "netns", alpha.namespace, "type", "veth", *peer)
    for host in (alpha, beta):
        host.ip("addr", "add", f"{host.address}/24", "dev", "eth0")
        host.ip("addr", "add", f"{host.address_v6}/64", "dev", "eth0", "nodad")
        host.ip("link", "set", "eth0", "up")


def remove(host: Host) -> None:
    """Ends what runs inside and takes the namespace away; also one that was half made."""
    host.kill_all()
    subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, timeout=60)
    shutil.rmtree(Path("/etc/netns") / host.namespace, ignore_errors=True)
    with contextlib.suppress(OSError):
        Path("/etc/netns").rmdir()  # only where nobody else has anything in it


def alpha_and_beta() -> tuple[Host, Host]:
    """Two hosts, not made yet, with an address of each family."""
    return Host("alpha", "192.168.1.10", "fd77::10"), Host("beta", "192.168.1.11", "fd77::11")


@contextlib.contextmanager
def wire(*hosts: Host) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a wire between them; skips the test, with the reason, where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (package iproute2)")
    try:
        try:
            for host in hosts:
                make(host, hosts)
            connect(*hosts)
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            remove(host)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one host's command did."""

    returncode: int
    out: str
    err: str


def run_on_both(
    commands: Sequence[tuple[Host, Sequence[str], Mapping[str, str]]],
    folder: Path,
    limit_s: float = LIMIT_S,
) -> list[Outcome]:
    """Runs one command a host, at once; AssertionError with all output if one takes too long."""
    children: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        for host, arguments, env in commands:
            stack.callback(host.kill_all)
            out = stack.enter_context((folder / f"{host.name}.out").open("wb"))
            err = stack.enter_context((folder / f"{host.name}.err").open("wb"))
            child = subprocess.Popen(
                host.command(*arguments),
                env=dict(env),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
            children.append(child)
        deadline = time.monotonic() + limit_s
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
    late = [child.returncode is None for child in children]
    codes = [child.wait(20) for child in children]  # killed by now, where they had not ended
    outcomes = [
        Outcome(code, *((folder / f"{host.name}.{end}").read_text() for end in ("out", "err")))
        for code, (host, _, _) in zip(codes, commands, strict=True)
    ]
    assert not any(late), f"not ended after {limit_s} s: {outcomes}"
    return outcomes
