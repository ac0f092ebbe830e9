"""The doctor's note that a slower interface than another to the same hosts was chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctor_facts import LOOPBACK, healthy, interface, only

from pycomm.doctor import local, system
from pycomm.doctor.facts import NOTE, HostFacts, Interface

SLOW_NET, FAST_NET = "10.0.0.0/24", "192.168.7.0/24"


def host(number: int, *more: Interface, speed: int = 1000, **changes: bool) -> HostFacts:
    eth0 = interface("eth0", f"10.0.0.{number}", speed_mbps=speed, network=SLOW_NET, **changes)
    return healthy(number, interfaces=(LOOPBACK, eth0, *more))


def fast(number: int, name: str = "eth1", **changes: Any) -> Interface:
    usual = interface(name, f"192.168.7.{number}", speed_mbps=10_000, network=FAST_NET)
    return dataclasses.replace(usual, **changes)


def notes(hosts: list[HostFacts]) -> list[str]:
    return [one.host for one in local.judge(hosts) if one.code == "SLOWER_INTERFACE"]


def test_a_faster_network_between_the_same_hosts_is_named() -> None:
    hosts = [host(1, fast(1)), host(2, fast(2, "enp3s0", speed_mbps=-1))]
    found = only(local.judge(hosts), "SLOWER_INTERFACE")
    assert (found.level, found.host) == (NOTE, "node1")
    assert found.text == (
        "node1: eth0 (1000 Mbit/s) was chosen; eth1 (10000 Mbit/s) reaches the same hosts, "
        "in 192.168.7.0/24"
    )
    assert found.todo == [
        "On all hosts; with pycomm run, where you type it:",
        "$ export PYCOMM_SOCKET_IFNAME=eth1,enp3s0",
    ]


def test_one_value_fits_all_hosts_and_a_setting_is_blamed() -> None:
    hosts = [host(1, fast(1)), host(2, fast(2, "enp3s0"))]
    hosts[1] = dataclasses.replace(
        hosts[1], interface_setting="eth0", interface_origin="PYCOMM_SOCKET_IFNAME"
    )
    assert notes(hosts) == ["node1", "node2"]
    second = [one for one in local.judge(hosts) if one.code == "SLOWER_INTERFACE"][1]
    assert "eth0 (1000 Mbit/s) was chosen by PYCOMM_SOCKET_IFNAME;" in second.text
    assert second.todo[-1] == "$ export PYCOMM_SOCKET_IFNAME=eth1,enp3s0"


def swapped() -> list[HostFacts]:
    """eth0 of one host is eth1 of the other."""
    one, other = host(1, fast(1)), host(2, fast(2, "eth0"))
    slow, quick = other.interfaces[1:]
    return [
        one,
        dataclasses.replace(other, interfaces=(dataclasses.replace(slow, name="eth1"), quick)),
    ]


def test_the_order_of_the_value_is_one_that_no_host_mistakes() -> None:
    for name in ("eth1", "eth10"):  # a beginning counts, too
        away = interface(name, "172.31.0.2", network="172.31.0.0/24")
        hosts = [host(1, fast(1)), host(2, fast(2, "enp3s0"), away)]
        for one in local.judge(hosts):
            assert one.todo[-1] == "$ export PYCOMM_SOCKET_IFNAME=enp3s0,eth1"
    for one in local.judge(swapped()):
        assert one.todo == [
            "No one value fits all, so not with pycomm run. On node1:",
            "$ export PYCOMM_SOCKET_IFNAME=eth1",
            "On node2:",
            "$ export PYCOMM_SOCKET_IFNAME=eth0",
        ]


def test_wifi_is_slower_than_a_wire_of_a_gigabit() -> None:
    def with_wire(number: int, speed: int) -> HostFacts:
        return host(number, fast(number, speed_mbps=speed), speed=-1, wireless=True)

    assert notes([with_wire(1, 1000), with_wire(2, 1000)]) == ["node1", "node2"]
    assert notes([with_wire(1, 100), with_wire(2, 100)]) == []


def test_two_interfaces_in_one_network() -> None:
    def with_two(number: int, speed: int) -> HostFacts:
        other = interface("eth1", f"10.0.0.{number + 100}", speed_mbps=speed, network=SLOW_NET)
        return host(number, other)

    assert notes([with_two(1, 2500), with_two(2, 2500)]) == ["node1", "node2"]
    assert notes([with_two(1, 2500), with_two(2, 1000)]) == []


SILENT: dict[str, Callable[[], list[HostFacts]]] = {
    "one host alone": lambda: [host(1, fast(1))],
    "it is the fast one already": lambda: [host(n, fast(n), speed=25_000) for n in (1, 2)],
    "one of three hosts is not in that network": lambda: [
        host(1, fast(1)),
        host(2, fast(2)),
        host(3),
    ],
    "its other end is as slow": lambda: [
        host(1, fast(1)),
        host(2, fast(2, speed_mbps=1000)),
    ],
    "the speed in use is unknown": lambda: [host(n, fast(n), speed=-1) for n in (1, 2)],
    "the network of the faster one is unknown": lambda: [
        host(n, fast(n, network="")) for n in (1, 2)
    ],
    "a bridge within each host": lambda: [host(n, fast(n, "docker0")) for n in (1, 2)],
    "a bridge within one host": lambda: [host(1, fast(1, "docker0")), host(2, fast(2))],
    "it is wireless": lambda: [host(1, fast(1, wireless=True)), host(2, fast(2))],
    "a duplicate address": lambda: [host(n, fast(9)) for n in (1, 2)],
    "another family": lambda: [
        host(n, fast(n, family="ipv6", address=f"fd00::{n}", network="fd00::/64")) for n in (1, 2)
    ],
    "nothing chosen": lambda: [
        dataclasses.replace(host(n, fast(n)), address="", interface="") for n in (1, 2)
    ],
}


@pytest.mark.parametrize("case", SILENT)
def test_no_note(case: str) -> None:
    assert notes(SILENT[case]()) == []


ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth0\t0000FEA9\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eth1\t0007A8C0\t0100000A\t0003\t0\t0\t0\t00FFFFFF\t0\t0\t0

"""
NONE6, ON_LINK6 = "0" * 32, "fd00" + "0" * 28
ROUTES6 = f"""\
{ON_LINK6} 40 {NONE6} 00 {NONE6} 00000100 00000001 00000000 00000001     eth0
{NONE6} 00 {NONE6} 00 {ON_LINK6[:-1]}1 00000400 00000003 00000000 00000003     eth0
{ON_LINK6[:-1]}2 80 {NONE6} 00 {NONE6} 00000000 00000003 00000000 80200001     eth0
"""


def test_networks_without_a_router_and_the_smallest_that_holds_an_address() -> None:
    found = system.networks_of(ROUTES, ROUTES6)
    assert found == {"eth0": ["10.0.0.0/24", "169.254.0.0/16", "fd00::/64"]}
    assert system.network_of("10.0.0.7", found["eth0"]) == "10.0.0.0/24"
    assert system.network_of("10.0.0.7", ["10.0.0.0/8", "10.0.0.0/28"]) == "10.0.0.0/28"
    assert system.network_of("fd00::9%eth0", found["eth0"]) == "fd00::/64"
    assert system.network_of("10.1.0.7", found["eth0"]) == ""
    assert system.networks_of("", "") == {}


def test_this_hosts_own_routes_can_be_read() -> None:
    tables = [Path(f"/proc/net/{name}") for name in ("route", "ipv6_route")]
    texts = [table.read_text() if table.exists() else "" for table in tables]
    for networks in system.networks_of(*texts).values():
        assert all("/" in network for network in networks)
