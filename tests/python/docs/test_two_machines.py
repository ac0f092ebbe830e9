"""docs/two-machines.md, run: two network namespaces are two hosts, a veth pair is the wire.

Needs root and `ip`; skipped, with the reason, where that is not allowed. Nothing leaves the
namespaces, and whatever runs in them is killed by its pid before they go.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from documents import blocks, installed_environment, read
from hosts import Host, run, run_on_both, wire

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.namespaces,
    pytest.mark.timeout(170),
]

DOCUMENT = read("docs/two-machines.md")
ADDRESSES = dict(re.findall(r"\*\*(alpha|beta)\*\*, (192\.168\.1\.\d+)", DOCUMENT))
ADDRESSES_V6 = {"alpha": "fd77::10", "beta": "fd77::11"}


@pytest.fixture(scope="module")
def wired() -> Iterator[tuple[Host, Host]]:
    hosts = [Host(name, address, ADDRESSES_V6[name]) for name, address in ADDRESSES.items()]
    with wire(*hosts) as both:
        yield both


@pytest.fixture
def hosts(wired: tuple[Host, Host]) -> Iterator[tuple[Host, Host]]:
    yield wired
    for host in wired:
        host.kill_all()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return installed_environment(tmp_path / "installed")


# The document's own commands


def documented_command(name: str) -> list[str]:
    found = re.findall(rf"^On \*\*{name}\*\*[^\n]*:\n\n```bash\n(.*?)```", DOCUMENT, re.M | re.S)
    assert len(found) == 1, f"{len(found)} commands for {name}"
    words = shlex.split(found[0])
    assert words[0] == "torchrun"
    return [sys.executable, "-m", "torch.distributed.run", *words[1:]]


@pytest.mark.ci
def test_the_documented_commands_train_together(
    hosts: tuple[Host, Host], env: dict[str, str], tmp_path: Path
) -> None:
    extra = ["--epochs", "1", "--target", "0"]  # learning is another test's business
    alpha, beta = run_on_both(
        [(host, [*documented_command(host.name), *extra], env) for host in hosts], tmp_path
    )
    assert (alpha.returncode, beta.returncode) == (0, 0), f"{alpha}\n{beta}"
    assert re.search(r"parameters equal on 4 ranks: sha256", alpha.out), alpha.out
    # The lines that the document shows; the prefix has this machine's name.
    for level in ("WARNING", "INFO"):
        (shown,) = re.findall(rf"pycomm {level}: (.*)\n", DOCUMENT)
        assert shown in alpha.err, alpha.err
    assert "INFO" not in beta.err  # rank 0 alone speaks


# Where the bytes really go

REPORT = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("pycomm")
rank, size = dist.get_rank(), dist.get_world_size()
large = torch.full((100_000,), float(rank))
small = torch.full((3,), rank)
dist.all_reduce(large)
dist.all_reduce(small)
groups = [dist.new_group(list(range(size))) for _ in range(int(sys.argv[2]))]
for group in groups:
    dist.barrier(group)

def sockets():
    mine = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(link))
        except OSError:
            pass
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in mine:
                yield fields[1], fields[2], fields[3]

from pycomm._native import loader
from pycomm._group.creation import native_backend
report = {
    "sums": [float(large[0]), float(large[-1]), float(small[0])],
    "says": loader.load().describe_backend(native_backend()),
    "sockets": list(sockets()),
}
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(report))
dist.barrier()  # nobody leaves while another still looks
dist.destroy_process_group()
"""

LISTEN, ESTABLISHED = "0A", "01"
STORE_PORT = 29500  # of torch's store, which listens on all interfaces


def endpoint(text: str) -> tuple[str, int]:
    """An address and port as /proc/net/tcp writes them: 32-bit words in this machine's order."""
    raw, port = text.split(":")
    words = bytes.fromhex(raw)
    packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return str(address), int(port, 16)


@dataclasses.dataclass(frozen=True)
class Report:
    sums: list[float]
    says: str
    listens: list[tuple[str, int]]
    connections: list[tuple[tuple[str, int], tuple[str, int]]]


def report_of(folder: Path, rank: int) -> Report:
    told = json.loads((folder / f"{rank}.json").read_text())
    sockets = [(endpoint(here), endpoint(there), state) for here, there, state in told["sockets"]]
    return Report(
        told["sums"],
        told["says"],
        [here for here, _, state in sockets if state == LISTEN and here[1] != STORE_PORT],
        [(here, there) for here, there, state in sockets if state == ESTABLISHED],
    )


def torchrun(host: Host, master: str, ranks: int) -> list[str]:
    numbers = ["--nnodes=2", f"--nproc-per-node={ranks}", f"--master-port={STORE_PORT}"]
    numbers += [f"--node-rank={list(ADDRESSES).index(host.name)}", f"--master-addr={master}"]
    return [sys.executable, "-m", "torch.distributed.run", *numbers]


def one_rank(host: Host, master: str) -> dict[str, str]:
    """The variables that any launcher sets, for one rank per host."""
    rank = str(list(ADDRESSES).index(host.name))
    names = {"MASTER_ADDR": master, "MASTER_PORT": str(STORE_PORT)}
    return {**names, "RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


@pytest.fixture
def report_script(tmp_path: Path) -> Path:
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    return script


def run_reports(
    hosts: tuple[Host, Host],
    env: Mapping[str, str],
    script: Path,
    *,
    master: str,
    ranks: int = 1,
    groups: int = 0,
) -> list[Report]:
    """Runs the script with so many ranks a host: more than one under torchrun."""
    folder = script.parent
    commands = []
    for host in hosts:
        start = [sys.executable] if ranks == 1 else torchrun(host, master, ranks)
        own = {**env, **one_rank(host, master)} if ranks == 1 else env
        commands.append((host, [*start, str(script), str(folder), str(groups)], own))
    outcomes = run_on_both(commands, folder)
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes
    reports = [report_of(folder, rank) for rank in range(2 * ranks)]
    total = float(sum(range(2 * ranks)))
    assert all(report.sums == [total] * 3 for report in reports)
    return reports


def set_firewall(host: Host, rules: str) -> None:
    run(*host.command("nft", "-f", "-"), input="flush ruleset\n" + rules)


@pytest.fixture
def firewall(hosts: tuple[Host, Host]) -> Iterator[str]:
    """The document's rules, in force on both hosts."""
    if shutil.which("nft") is None:
        pytest.skip("firewalls need the command nft (package nftables)")
    (rules,) = blocks(DOCUMENT, "nft")
    try:
        for host in hosts:
            try:
                set_firewall(host, rules)
            except OSError as error:
                pytest.skip(f"firewalls are not allowed here: {error}")
        yield rules
    finally:
        for host in hosts:
            set_firewall(host, "")


def documented_range() -> str:
    found = re.findall(
        r"^export PYCOMM_PORT_RANGE=(\S+)$", "\n".join(blocks(DOCUMENT, "bash")), re.M
    )
    assert len(found) == 1
    return str(found[0])


@pytest.mark.nightly
def test_the_firewall_of_the_document_lets_everything_through(
    hosts: tuple[Host, Host], env: dict[str, str], report_script: Path, firewall: str
) -> None:
    ports = documented_range()
    assert ports in firewall
    first, last = map(int, ports.split("-"))
    reports = run_reports(
        hosts,
        {**env, "PYCOMM_PORT_RANGE": ports},
        report_script,
        master="alpha",
        ranks=2,
        groups=1,
    )
    for rank, report in enumerate(reports):
        host = hosts[rank // 2]
        assert f"over TCP on eth0 ({host.address}; route to " in report.says
        # One port a group, on the chosen address only.
        assert len(report.listens) == 2, report.listens
        for address, port in report.listens:
            assert address == host.address and first <= port <= last, report.listens
    listening = {place for report in reports for place in report.listens}
    for rank, report in enumerate(reports):
        between = [pair for pair in report.connections if listening & set(pair)]
        used = {address for pair in between for address, _ in pair}
        assert used <= set(ADDRESSES.values()), f"rank {rank}: {between}"
        elsewhere = [pair for pair in between if {end[0] for end in pair} == used]
        assert elsewhere, f"rank {rank} has no connection to the other host: {between}"


@pytest.mark.nightly
@pytest.mark.parametrize("master", ["192.168.1.10", "fd77::10"])
def test_a_master_that_is_an_address(
    hosts: tuple[Host, Host], env: dict[str, str], report_script: Path, master: str
) -> None:
    family = ADDRESSES_V6 if ":" in master else ADDRESSES
    reports = run_reports(hosts, env, report_script, master=master)
    for host, report in zip(hosts, reports, strict=True):
        assert f"on eth0 ({family[host.name]}; " in report.says
        assert [address for address, _ in report.listens] == [family[host.name]]


# What an error means

ERROR = """
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
record = {}
(folder / f"{rank}.here").touch()
while len(list(folder.glob("*.here"))) < 2:  # the limit is for joining, not for importing torch
    time.sleep(0.01)
try:
    dist.init_process_group("pycomm")
    dist.new_group([0, 1])
except dist.DistError as error:
    record = {**getattr(error, "record", {}), "text": str(error)}
    kept = error  # and with it torch's store, if this is rank 0: rank 1 still has to read there
(folder / f"{rank}.partial").write_text(json.dumps(record))
(folder / f"{rank}.partial").rename(folder / f"{rank}.error")
give_up = time.monotonic() + 60
while rank == 0 and not (folder / "1.error").exists() and time.monotonic() < give_up:
    time.sleep(0.05)
"""


def run_errors(
    hosts: tuple[Host, Host],
    env: Mapping[str, str],
    folder: Path,
    *own: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Starts one rank per host, which must not find each other; returns their error records."""
    script = folder / "error.py"
    script.write_text(ERROR)
    commands = [
        (
            host,
            [sys.executable, str(script), str(folder)],
            {**env, **one_rank(host, "alpha"), "PYCOMM_TIMEOUT": "8", **extra},
        )
        for host, extra in zip(hosts, own or ({}, {}), strict=True)
    ]
    outcomes = run_on_both(commands, folder)
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes
    records = [json.loads((folder / f"{rank}.error").read_text()) for rank in (0, 1)]
    assert all(records), f"{outcomes}\n{records}"
    assert {record["code"] for record in records} <= set(documented_codes())
    return records


def documented_codes() -> list[str]:
    return re.findall(r"^\| `([A-Z_]+)` \|", DOCUMENT, re.M)


@pytest.mark.nightly
def test_a_firewall_without_a_port_range(
    hosts: tuple[Host, Host], env: dict[str, str], tmp_path: Path, firewall: str
) -> None:
    records = run_errors(hosts, env, tmp_path)
    for rank, record in enumerate(records):
        host, other = hosts[rank], hosts[1 - rank]
        assert record["code"] == "CONNECT_FAILED", record
        assert "PYCOMM_PORT_RANGE" in record["text"], record
        assert (record["rank"], record["peer"]) == (rank, 1 - rank), record
        shown = [other.address, f"from {host.address} on eth0", "ETIMEDOUT"]
        if rank == 1:  # the lower rank connects; the higher one waits
            shown = ["Rank 0", f"never connected to {host.address}:"]
        assert all(text in record["text"] for text in shown), record


def to_blame(record: Mapping[str, Any]) -> int:
    """The rank that has the trouble: told of as the peer, by itself as the rank that tells."""
    return int(record.get("peer", record["rank"]))


@pytest.mark.nightly
def test_an_interface_that_one_host_lacks(
    hosts: tuple[Host, Host], env: dict[str, str], tmp_path: Path
) -> None:
    records = run_errors(hosts, env, tmp_path, {}, {"NCCL_SOCKET_IFNAME": "ib0"})
    for record in records:  # found on beta, told to alpha
        assert record["code"] == "NO_INTERFACE" and to_blame(record) == 1, record
        assert '"ib0"' in record["text"] and f"eth0 ({ADDRESSES['beta']}" in record["text"]


@pytest.mark.nightly
def test_loopback_by_hand(hosts: tuple[Host, Host], env: dict[str, str], tmp_path: Path) -> None:
    records = run_errors(hosts, env, tmp_path, {"PYCOMM_SOCKET_IFNAME": "lo"}, {})
    for record in records:
        assert record["code"] == "NO_INTERFACE" and to_blame(record) == 0, record
        assert "interface lo was chosen, but some ranks are on other hosts" in record["text"]


@pytest.mark.nightly
def test_a_range_too_short_for_a_second_group(
    hosts: tuple[Host, Host], env: dict[str, str], tmp_path: Path
) -> None:
    short = {"PYCOMM_PORT_RANGE": "29600-29600"}
    for record in run_errors(hosts, env, tmp_path, short, {}):
        assert record["code"] == "PORTS_EXHAUSTED" and to_blame(record) == 0, record
        assert f"29600-29600 on {ADDRESSES['alpha']}" in record["text"]
        assert "EADDRINUSE" in record["text"]
