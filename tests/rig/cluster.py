"""Several hosts on one switch: a network namespace each, with a name of its own, and a bridge.

Needs root, `ip`, `nft` and `tc`. Links are shaped to a gigabit, so that the network is the limit
and not the cores of this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hosts import Host, make, remove, run

GIGABIT = ("rate", "1gbit", "burst", "256kb", "latency", "50ms")
TWIN = "172.17.0.1/16"


@dataclasses.dataclass(frozen=True)
class Node(Host):
    """A namespace with a host name of its own, wired to the switch."""

    def command(self, *arguments: str) -> list[str]:
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return super().command(*named, *arguments)

    def machine(self) -> list[str]:
        """The words of a command that runs another one here as the first of a pid namespace."""
        unshare = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return super().command(*unshare, "sh", "-c", 'hostname "$0" && exec "$@"', self.name)

    def inside(self, *arguments: str, input: str | None = None) -> None:
        """Runs a command that configures this host."""
        run(*Host.command(self, *arguments), input=input)

    def firewall(self, *rules: str) -> None:
        """Rules for incoming packets, in the table and chain of Debian's default configuration."""
        body = " ".join(f"{rule};" for rule in rules)
        usual = "iif lo accept; ct state established,related accept;"
        chain = f"chain input {{ type filter hook input priority 0; {usual} {body} }}"
        self.inside("nft", "-f", "-", input=f"flush ruleset\ntable inet filter {{ {chain}; }}")

    def name_is_loopback(self) -> None:
        """As Debian's installer writes it."""
        file = Path("/etc/netns") / self.namespace / "hosts"
        file.write_text(
            file.read_text().replace(f"{self.address} {self.name}", f"127.0.1.1 {self.name}")
        )

    def add_twin(self) -> None:
        """A bridge with the address that Docker gives it on every host."""
        self.ip("link", "add", "docker0", "type", "veth", "peer", "name", "docker1")
        self.ip("addr", "add", TWIN, "dev", "docker0")
        self.ip("link", "set", "docker1", "up")
        self.ip("link", "set", "docker0", "up")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts and the switch between them."""

    nodes: Sequence[Node]
    switch: Host

    def shape(self, node: Node, *tbf: str) -> None:
        """Both directions of the link of one host."""
        for host, device in ((node, "eth0"), (self.switch, f"port-{node.name}")):
            run("tc", "-n", host.namespace, "qdisc", "replace", "dev", device, "root", "tbf", *tbf)

    def drop(self, *ways: tuple[Node, Node]) -> None:
        """From now on the switch drops what comes from the first for the second, and no more."""
        rules = "".join(
            f"iifname port-{one.name} oifname port-{other.name} drop; " for one, other in ways
        )
        chain = f"chain c {{ type filter hook forward priority 0; {rules} }}"
        run(
            *self.switch.command("nft", "-f", "-"),
            input=f"flush ruleset\ntable bridge cut {{ {chain}; }}",
        )

    def swallow_large_packets(self, node: Node) -> None:
        """The switch's port of this host carries 1400 bytes and reports nothing: an MTU hole.

        The kernel would otherwise hand over packets of 64 KiB, which no MTU stops on such a wire.
        """
        for one in self.nodes:
            one.ip("link", "set", "eth0", "gso_max_segs", "1")
        port = f"port-{node.name}"
        rules = f"oif {port} meta length > 1400 drop; iif {port} meta length > 1400 drop;"
        chain = f"chain c {{ type filter hook forward priority 0; {rules} }}"
        run(
            *self.switch.command("nft", "-f", "-"),
            input=f"flush ruleset\ntable bridge hole {{ {chain}; }}",
        )


@contextlib.contextmanager
def cluster(count: int) -> Iterator[Cluster]:
    """Hosts node1, node2 ... at 10.77.0.1, 10.77.0.2 ...; skips the test where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool in ("ip", "nft", "tc", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"a cluster of network namespaces needs the command {tool}")
    nodes = [Node(f"node{i}", f"10.77.0.{i}", f"fd77::{i}") for i in range(1, count + 1)]
    made = Cluster(nodes, Host("switch", "", ""))
    try:
        try:
            _build(made)
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield made
    finally:
        for host in (*nodes, made.switch):
            remove(host)


def _build(made: Cluster) -> None:
    switch = made.switch
    run("ip", "netns", "add", switch.namespace)
    switch.ip("link", "add", "br0", "type", "bridge")
    switch.ip("link", "set", "br0", "up")
    for node in made.nodes:
        make(node, made.nodes)
        file = Path("/etc/netns") / node.namespace / "hosts"
        own = f"{node.address} {node.name}"
        file.write_text(file.read_text().replace(f"127.0.1.1 {node.name}", own))
        port = f"port-{node.name}"
        peer = ["peer", "name", port, "netns", switch.namespace]
        run("ip", "link", "add", "eth0", "netns", node.namespace, "type", "veth", *peer)
        switch.ip("link", "set", port, "master", "br0")
        switch.ip("link", "set", port, "up")
        node.ip("link", "set", "lo", "up")
        node.ip("addr", "add", f"{node.address}/24", "dev", "eth0")
        node.ip("addr", "add", f"{node.address_v6}/64", "dev", "eth0", "nodad")
        node.ip("link", "set", "eth0", "up")
        made.shape(node, *GIGABIT)
    made.nodes[0].inside("nft", "list", "ruleset")  # not in every container
