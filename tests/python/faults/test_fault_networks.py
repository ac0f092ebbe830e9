"""What networks do: resets, silent drops, partitions, a cable that is pulled, a slow link.

Two network namespaces are two hosts; nft and tbf are the trouble. Needs root, `ip`, `nft` and `tc`;
skipped, with the reason, where that is not allowed. CI has four of them with one rank on each host,
`make nightly` the others and two ranks. With TEST_SECRET the packets of the first host are
recorded, and what is there of each stream is read as TLS records (`make release`, step
``faults_tls``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rings
from documents import ROOT
from fault_ranks import patience
from fault_report import agreement, took
from hosts import Host, alpha_and_beta, connect, make, remove, run
from processes import child_environment
from sniffer import not_tls, recorded
from time_bound import assert_within

pytestmark = [pytest.mark.needs_native, pytest.mark.faults, pytest.mark.ci, pytest.mark.namespaces]

RANK = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist, pycomm
folder = Path(sys.argv[1])
timeout_s, enough_s, pause_s = (float(word) for word in sys.argv[2:5])
met, rank, step = {"error": None}, int(os.environ["RANK"]), 0
(folder / f"here-{rank}").touch()
while len(list(folder.glob("here-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)  # limits of seconds are for joining, not for importing torch
try:
    dist.init_process_group("pycomm", timeout=timedelta(seconds=timeout_s))
    end_s = float("inf")
    while True:
        over = torch.tensor([float(time.monotonic() > end_s)])
        dist.all_reduce(over, dist.ReduceOp.MAX)
        tensor = torch.full((1 << 16,), float(rank))
        dist.all_reduce(tensor)
        size = dist.get_world_size()
        assert float(tensor[-1]) == size * (size - 1) / 2, "a wrong sum"
        if float(over):
            break
        time.sleep(pause_s)
        if step == 3:
            (folder / f"middle-{rank}").touch()
            end_s = time.monotonic() + enough_s
        step += 1
except pycomm.errors.PycommError as error:
    met = {"error": error.code, "text": str(error), "record": dict(error.record)}
met["monotonic_s"] = time.monotonic()
(folder / f"{rank}.json").write_text(json.dumps(met))
"""


def _filter(incoming: str, outgoing: str) -> Callable[[Host], None]:
    """What nft does with the packets that come and go."""

    def act(host: Host) -> None:
        chain = "chain {0} {{ type filter hook {0} priority 0; {1} lo accept; {2}; }}"
        into = chain.format("input", "iif", incoming)
        out = chain.format("output", "oif", outgoing)
        run(*host.command("nft", f"flush ruleset; table inet fault {{ {into}; {out}; }};"))

    return act


def _heal(host: Host) -> None:
    run(*host.command("nft", "flush ruleset"))


def _pull_the_cable(host: Host) -> None:
    host.ip("link", "set", "eth0", "down")


def _plug_it_in(host: Host) -> None:
    host.ip("link", "set", "eth0", "up")


def _slow(host: Host) -> None:
    shape = ("tbf", "rate", "20mbit", "burst", "32kbit", "latency", "400ms")
    run(*host.command("tc", "qdisc", "replace", "dev", "eth0", "root", *shape))


def _fast(host: Host) -> None:
    run(*host.command("tc", "qdisc", "del", "dev", "eth0", "root"))


def _dropped(host: Host) -> int:
    """Packets at the counters of ``_filter``'s rules."""
    rules = run(*host.command("nft", "list", "ruleset"))
    return sum(map(int, re.findall(r"counter packets (\d+)", rules)))


def _delayed(host: Host) -> int:
    """How often ``_slow`` has held a packet back."""
    shapes = json.loads(run(*host.command("tc", "-s", "-j", "qdisc", "show", "dev", "eth0")))
    return sum(int(each.get("overlimits", 0)) for each in shapes)


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What happens to beta's network, and what the ranks must say."""

    name: str
    act: Callable[[Host], None]
    heal: Callable[[Host], None]
    codes: tuple[str, ...]
    """() if nobody may notice. Then ``felt`` shows that it has struck."""
    bound_s: float = 4.5
    heal_after_s: float | None = None
    before: bool = False
    """Before the ranks start; else in the middle."""
    timeout_s: float = 60.0
    felt: Callable[[Host], int] = lambda _: 1
    """How many packets it has met, before it is healed."""


SECRET = bool(os.environ.get("TEST_SECRET"))
STORE_PORT = 29500
SILENCE = ("PEER_UNRESPONSIVE",)
NO_OTHER_PORT = (
    f"tcp dport {STORE_PORT} accept; tcp sport {STORE_PORT} accept; meta l4proto tcp drop"
)
RESET = _filter("meta l4proto tcp reject with tcp reset", "accept")
TROUBLES = (
    Trouble("silent drop", _filter("drop", "drop"), _heal, SILENCE),
    # Beta answers incoming packets with a reset and receives none: alpha sees resets, beta silence.
    Trouble("reset", RESET, _heal, ("PEER_DEAD", "CONN_RESET", *SILENCE)),
    Trouble("drop, outgoing only", _filter("accept", "drop"), _heal, SILENCE),
    Trouble("drop, incoming only", _filter("drop", "accept"), _heal, SILENCE),
    # Beta has no route then: a link that it opens just now, say to ask who is late, fails at once.
    Trouble("cable pulled", _pull_the_cable, _plug_it_in, ("CONNECT_FAILED", *SILENCE)),
    Trouble("slow link", _slow, _fast, (), 40.0, felt=_delayed),
    Trouble(
        "0.8 s of silence",
        _filter("counter drop", "counter drop"),
        _heal,
        (),
        40.0,
        heal_after_s=0.8,
        felt=_dropped,
    ),
    Trouble(
        "firewall",
        _filter(NO_OTHER_PORT, NO_OTHER_PORT),
        _heal,
        ("CONNECT_FAILED",),
        8.0,
        before=True,
        timeout_s=4.0,
    ),
)


IN_CI = ("silent drop", "reset", "cable pulled", "firewall")


@pytest.fixture(scope="module")
def wired() -> Iterator[tuple[Host, Host]]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for command in ("ip", "nft", "tc"):
        if shutil.which(command) is None:
            pytest.skip(f"needs the command {command} (packages iproute2, nftables)")
    hosts = alpha_and_beta()
    try:
        try:
            for host in hosts:
                make(host, hosts)
            connect(*hosts)
            _filter("drop", "drop")(hosts[1])
            _heal(hosts[1])
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            remove(host)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "trouble" in metafunc.fixturenames:
        chosen = [(trouble, ranks) for ranks in (1, 2) for trouble in TROUBLES]
        ids = [_name(case) for case in chosen]
        cases = [
            case if case[1] == 1 and case[0].name in IN_CI else rings.nightly(case)
            for case in chosen
        ]
        metafunc.parametrize(("trouble", "ranks_a_host"), cases, ids=ids)


def _name(case: tuple[Trouble, int]) -> str:
    return f"{case[0].name}-{2 * case[1]}ranks"


@pytest.mark.time_bound
@pytest.mark.ci
def test_networks(
    wired: tuple[Host, Host],
    trouble: Trouble,
    ranks_a_host: int,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    world_size = 2 * ranks_a_host
    with read_as_tls(wired[0], tmp_path, enough=0 if trouble.before else 3 << 18):
        struck_s = make_trouble(wired, trouble, ranks_a_host, tmp_path)
    met = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world_size)]
    name = _name((trouble, ranks_a_host))
    for rank, each in enumerate(met):
        check(trouble, rank, each, met, ranks_a_host)
        if trouble.codes and not trouble.before:
            took(record_property, name, each["monotonic_s"] - struck_s, trouble.bound_s)
    # Across a cut no news comes, so only the ranks of one host can agree.
    for host in range(2 if trouble.codes else 0):
        of_host = range(host * ranks_a_host, (host + 1) * ranks_a_host)
        told = {rank: (met[rank]["error"], met[rank]["record"]["peer"]) for rank in of_host}
        agreement(record_property, f"{name}-host{host}", told, joined=not trouble.before)
    for each in met if trouble.codes and not trouble.before else []:
        assert_within(each["monotonic_s"] - struck_s, trouble.bound_s * patience(), each["text"])


@contextlib.contextmanager
def read_as_tls(host: Host, folder: Path, enough: int) -> Iterator[None]:
    """With TEST_SECRET: what passes this host's interfaces, but to torch's store, is TLS.

    At least ``enough`` bytes of it have passed.
    """
    if not SECRET:
        yield
        return
    with recorded(host, folder, cut=True) as streams:
        yield
    ours = [stream for stream in streams if STORE_PORT not in stream.ports]
    assert sum(len(stream.data) for stream in ours) >= enough
    for stream in ours:
        assert not_tls(stream.data, cut=True) == "", stream.ports


def make_trouble(
    wired: tuple[Host, Host], trouble: Trouble, ranks_a_host: int, folder: Path
) -> float:
    """Runs the ranks and the trouble to their ends; returns when the trouble began, in seconds."""
    _, beta = wired
    world_size = 2 * ranks_a_host
    children: dict[int, subprocess.Popen[bytes]] = {}
    struck_s = time.monotonic()
    try:
        if trouble.before:
            trouble.act(beta)
        for rank in range(world_size):
            children[rank] = start(wired[rank // ranks_a_host], rank, world_size, trouble, folder)
        if not trouble.before:
            wait_for([folder / f"middle-{rank}" for rank in range(world_size)], children)
            struck_s = time.monotonic()
            trouble.act(beta)
        ends = [folder / f"{rank}.json" for rank in range(world_size)]
        if trouble.heal_after_s is None:
            wait_for(ends, children)
            felt = trouble.felt(beta)
        else:
            time.sleep(trouble.heal_after_s)
            felt = trouble.felt(beta)
            trouble.heal(beta)
            wait_for(ends, children)
        assert felt > 0, f"{trouble.name}: no packet has met it"
    finally:
        if trouble.heal_after_s is None:
            trouble.heal(beta)
        for host in wired:
            host.kill_all()
        for child in children.values():
            child.wait(20)
    return struck_s


def start(
    host: Host, rank: int, world_size: int, trouble: Trouble, folder: Path
) -> subprocess.Popen[bytes]:
    env = child_environment(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "192.168.1.10",
            "MASTER_PORT": str(STORE_PORT),
        }
    )
    pause_s = "0.02" if SECRET else "0"  # so that a recording stays small
    arguments = [sys.executable, "-c", RANK, str(folder), str(trouble.timeout_s), "3", pause_s]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            host.command(*arguments),
            env=env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def wait_for(paths: list[Path], children: dict[int, subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 90
    while not all(path.exists() and path.suffix != ".partial" for path in paths):
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text() for path in paths[0].parent.glob("*.log"))
            raise AssertionError(f"no {[str(path) for path in paths if not path.exists()]}\n{logs}")
        time.sleep(0.02)
    if paths[0].suffix == ".json":
        for child in children.values():
            child.wait(20)


def check(
    trouble: Trouble,
    rank: int,
    met: dict[str, Any],
    everybody: list[dict[str, Any]],
    ranks_a_host: int,
) -> None:
    said = "\n".join(str(each.get("text")) for each in everybody)
    if not trouble.codes:
        assert met["error"] is None, said
        return
    assert met["error"] in trouble.codes, said
    # The rank that saw it, this one or the one that reported it, can only say that it does not
    # receive from a rank on the other side of the cut.
    record = met["record"]
    peer = record["peer"]
    reported = re.search(r"reported by rank (\d+)", record.get("cause") or "")
    saw = int(reported[1]) if reported else rank
    assert peer // ranks_a_host != saw // ranks_a_host, said
    assert f"peer={peer}" in met["text"]
    assert f"ank {peer} on " in record["summary"] and "] Try: " in met["text"], said
