"""Made-up hosts for the doctor's tests: healthy, until a test changes something."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from documents import ROOT

from pycomm.doctor.facts import Finding, Firewall, HostFacts, Interface

LOOPBACK = Interface(name="lo", address="127.0.0.1", family="ipv4", loopback=True, mtu=65536)


def interface(name: str, address: str, **changes: Any) -> Interface:
    usual = Interface(name=name, address=address, family="ipv4", mtu=1500)
    return dataclasses.replace(usual, **changes)


def healthy(number: int, **changes: Any) -> HostFacts:
    """Host node<number> at 10.0.0.<number>, one rank."""
    address = f"10.0.0.{number}"
    facts = HostFacts(
        name=f"node{number}",
        ranks=(number - 1,),
        identity=f"identity{number}",
        process=f"process{number}",
        versions={"pycomm": "0.2.0", "torch": "2.13.0", "python": "3.11.2", "interpreter": "/py"},
        same_everywhere={"algorithm": "auto"},
        interfaces=(LOOPBACK, interface("eth0", address)),
        cores_online=8,
        cores_usable=8.0,
        files_limit=1024,
        files_open=14,
        own_addresses=(address,),
        master="node1",
        master_port=29500,
        master_addresses=("10.0.0.1",),
        address=address,
        interface="eth0",
        why="route to the store's host 10.0.0.1",
        port=40000 + number,
        firewall=Firewall(tool="nft", chains=("inet filter input",)),
    )
    return dataclasses.replace(facts, **changes)


def cluster_of(count: int, **changed: HostFacts) -> list[HostFacts]:
    """Healthy hosts, but those that are given as node2=..."""
    return [changed.get(f"node{n}", healthy(n)) for n in range(1, count + 1)]


def only(findings: list[Finding], code: str) -> Finding:
    """The one finding with this code."""
    found = [finding for finding in findings if finding.code == code]
    assert len(found) == 1, findings
    return found[0]


def older_pycomm(folder: Path) -> Path:
    """A folder to start in, with this very pycomm but for its version."""
    package = folder / "older" / "pycomm"
    package.mkdir(parents=True)
    for entry in (ROOT / "pycomm").iterdir():
        if entry.name not in ("_version.py", "__pycache__"):
            (package / entry.name).symlink_to(entry)
    (package / "_version.py").write_text('__version__ = "0.0.9"\n')
    return package.parent
