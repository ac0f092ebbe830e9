"""The doctor on clusters of network namespaces that are made sick: it names what and where.

Needs root, `ip`, `nft` and `tc`; skipped, with the reason, where that is not allowed.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Node, cluster
from doctor_facts import older_pycomm
from documents import ROOT
from hosts import Outcome, run_on_both
from processes import child_environment
from time_bound import assert_within

from pycomm.doctor.report import Report
from pycomm.doctor.screen import as_text

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.namespaces,
    pytest.mark.timeout(300),
]

# They judge rates between namespaces, which share the machine's cores: on two busy cores the
# verdict is a matter of luck. test_doctor_rate.py has the judgement without a network.
rates = pytest.mark.nightly

RANGE = {"PYCOMM_PORT_RANGE": "29600-29699"}
# The first port of the range is the store's by hand, the next the doctor's on node1.
FILES = 20
SMALL = f"ulimit -n {FILES} && exec "


@pytest.fixture
def four() -> Iterator[Cluster]:
    with cluster(4) as made:
        yield made


@pytest.fixture
def three() -> Iterator[Cluster]:
    with cluster(3) as made:
        yield made


def by_hand(
    made: Cluster,
    folder: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    changes: Mapping[str, Mapping[str, str]] | None = None,
    before: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Starts the doctor on each host; ``changes`` and ``before`` (a shell's) are of one host."""
    commands = []
    for rank, node in enumerate(made.nodes):
        words = [sys.executable, "-m", "pycomm", "doctor", f"--nnodes={len(made.nodes)}"]
        words += [f"--node-rank={rank}", "--master-addr=node1", *options]
        if shell := (before or {}).get(node.name):
            words = ["sh", "-c", shell + shlex.join(words)]
        own = (changes or {}).get(node.name, {})
        commands.append((node, words, child_environment({**(env or {}), **own})))
    return run_on_both(commands, folder, 150.0)


def report_of(outcomes: Sequence[Outcome], code: int) -> dict[str, Any]:
    """The report that all hosts agree on."""
    assert all(one.out for one in outcomes), outcomes
    reports = [json.loads(one.out) for one in outcomes]
    shown = {key: reports[0][key] for key in ("verdict", "findings", "rates")}
    assert [one.returncode for one in outcomes] == [code] * len(outcomes), shown
    assert all(one == reports[0] for one in reports)
    assert reports[0]["exit_code"] == code
    report: dict[str, Any] = reports[0]
    return report


def finding(report: Mapping[str, Any], code: str) -> dict[str, Any]:
    found = [one for one in report["findings"] if one["code"] == code]
    assert len(found) == 1, (code, report["findings"])
    one: dict[str, Any] = found[0]
    return one


def problems(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(one["code"], one["host"]) for one in report["findings"] if one["level"] != "note"]


def paste(node: Node, lines: Sequence[str]) -> None:
    """Runs the commands of a finding, as an administrator pastes them."""
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ sudo ")]
    assert commands
    for command in commands:
        node.inside("sh", "-c", command.removeprefix("sudo "))


# A healthy cluster


@rates
@pytest.mark.alone
@pytest.mark.time_bound
def test_a_healthy_cluster_is_ready_under_torchrun(four: Cluster, tmp_path: Path) -> None:
    commands = []
    for rank, node in enumerate(four.nodes):
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=4"]
        words += [f"--node-rank={rank}", "--nproc-per-node=1", "--master-addr=node1"]
        words += ["--master-port=29500", "-m", "pycomm", "doctor"]
        commands.append((node, words, child_environment()))
    begin = time.monotonic()
    outcomes = run_on_both(commands, tmp_path, 150.0)
    took = time.monotonic() - begin
    first, *others = outcomes
    assert [one.returncode for one in outcomes] == [0] * 4, first.out or first.err
    assert [one.out for one in others] == [""] * 3  # rank 0 alone prints
    lines = first.out.splitlines()
    assert re.fullmatch(r"pycomm doctor: 4 hosts, \d+ s +READY", lines[0])
    assert all(len(line) <= 79 for line in lines)
    row = r"node{0} .* eth0 +10\.77\.0\.{0} +1500 +([\d.]+) +([\d.]+) +([\d.]+) "
    for number in range(1, 5):
        rates = re.search(row.format(number), first.out)
        assert rates is not None, first.out
        out, into, both = map(float, rates.groups())
        assert 60 < out < 130 and 60 < into < 130 and both < 260  # a gigabit is 125 MB/s
    assert re.search(
        r"one sync of 62\.5 M parameters +fp32 \d.* fp16 .* int8 .*predicted", first.out
    )
    assert "torch's store listens on all interfaces (:: port 29500)" in first.out
    assert_within(took, 45.0)


@rates
@pytest.mark.alone
def test_several_ranks_of_a_host_are_one_row(three: Cluster, tmp_path: Path) -> None:
    commands = []
    for rank, node in enumerate(three.nodes[:2]):
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        words += [f"--node-rank={rank}", "--nproc-per-node=2", "--master-addr=node1"]
        words += ["--master-port=29500", "-m", "pycomm", "doctor", "--json", "--seconds=0.5"]
        commands.append((node, words, child_environment()))
    first, second = run_on_both(commands, tmp_path, 150.0)
    # 0.5 s of four ranks on a few cores: the network may seem slow.
    assert first.returncode in (0, 1), first  # torchrun makes 1 of 3
    assert second.returncode == first.returncode, second
    report = json.loads(first.out)
    assert report["exit_code"] in (0, 3), report["findings"]
    assert [host["ranks"] for host in report["hosts"]] == [[0, 1], [2, 3]]
    assert report["stages"] == ["local", "reach", "rate", "sync"]


@pytest.mark.nightly
def test_it_runs_as_a_step_of_slurm(three: Cluster, tmp_path: Path) -> None:
    """With the variables that srun sets, and nothing else."""
    commands = []
    for rank, node in enumerate(three.nodes):
        step = {"NUM_TASKS": "3", "NODELIST": "node[1-3]", "TASKS_PER_NODE": "1(x3)", "ID": "0"}
        env = {f"SLURM_STEP_{name}": value for name, value in step.items()}
        env |= {"SLURM_JOB_ID": "77", "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)}
        env |= {"SLURM_LOCALID": "0"}
        words = [sys.executable, "-m", "pycomm", "doctor", "--reach-only", "--json"]
        commands.append((node, words, child_environment(env)))
    first, *others = run_on_both(commands, tmp_path, 100.0)
    assert [one.returncode for one in (first, *others)] == [0, 0, 0], (first, others)
    assert [one.out for one in others] == ["", ""]
    report = json.loads(first.out)
    assert [host["name"] for host in report["hosts"]] == ["node1", "node2", "node3"]
    assert report["hosts"][0]["master_port"] == 10077  # as pycomm.integrations.launch derives it


# Which host reaches which


@pytest.mark.nightly
def test_firewalls_are_found_and_the_pasted_line_mends_them(four: Cluster, tmp_path: Path) -> None:
    node1, node2, node3, node4 = four.nodes
    node1.firewall(f"ip saddr {node4.address} tcp dport 29601-29699 drop")
    node2.firewall(f"ip saddr {node3.address} tcp dport 29600-29699 reject with tcp reset")
    report = report_of(by_hand(four, tmp_path, "--reach-only", "--json", env=RANGE), 1)
    dropped, refused = finding(report, "NO_ANSWER"), finding(report, "REFUSED")
    assert sorted(problems(report)) == [("NO_ANSWER", "node1"), ("REFUSED", "node2")]
    assert dropped["text"].startswith("node4 -> node1: no answer (dropped: a firewall")
    assert refused["text"].startswith("node3 -> node2: refused by a firewall")
    assert "Only this direction: node1 -> node4 works." in dropped["todo"]
    assert "Only this direction: node2 -> node3 works." in refused["todo"]
    paste(node1, dropped["todo"])
    paste(node2, refused["todo"])
    paste(node1, finding(report, "STORE_OPEN")["todo"])  # which keeps the hosts of the job
    healed = report_of(by_hand(four, tmp_path, "--reach-only", "--json", env=RANGE), 0)
    assert problems(healed) == []
    assert not [one for one in healed["findings"] if one["code"] == "STORE_OPEN"]


@pytest.mark.nightly
def test_a_firewall_that_opens_the_first_port_only(three: Cluster, tmp_path: Path) -> None:
    _, node2, node3 = three.nodes
    node3.firewall(f"ip saddr {node2.address} tcp dport 29601-29699 drop")
    options = ["--reach-only", "--json", "--ranks-per-host=2"]
    report = report_of(by_hand(three, tmp_path, *options, env=RANGE), 1)
    assert problems(report) == [("RANGE_CLOSED", "node3")]
    closed = finding(report, "RANGE_CLOSED")
    assert closed["text"].startswith(
        "node2 -> node3: port 29600 of PYCOMM_PORT_RANGE answers, 29601 and 29699 not: no answer"
    )
    one_rank = report_of(by_hand(three, tmp_path, *options[:2], env=RANGE), 0)
    note = finding(one_rank, "RANGE_CLOSED")
    assert note["level"] == "note" and "answers, 29699 not: no answer" in note["text"]
    paste(node3, closed["todo"])
    healed = report_of(by_hand(three, tmp_path, *options, env=RANGE), 0)
    assert not [one for one in healed["findings"] if one["code"] == "RANGE_CLOSED"]


@pytest.mark.ci
def test_what_each_host_lacks_is_found_by_name(four: Cluster, tmp_path: Path) -> None:
    """Another version, low descriptors, an own name on 127.0.1.1, docker0 twins, an open store."""
    for node in four.nodes:
        node.add_twin()
    four.nodes[3].name_is_loopback()
    outcomes = by_hand(
        four,
        tmp_path,
        "--reach-only",
        "--json",
        before={"node2": f"cd {older_pycomm(tmp_path)} && exec ", "node3": SMALL},
    )
    report = report_of(outcomes, 1)
    version, files = finding(report, "VERSION"), finding(report, "DESCRIPTORS")
    assert sorted(problems(report)) == [("DESCRIPTORS", "node3"), ("VERSION", "node2")]
    assert re.fullmatch(r"node2: pycomm 0\.0\.9, the others have \S+", version["text"])
    assert re.fullmatch(rf"node3: at most {FILES} open files, a rank needs \d+", files["text"])
    assert "$ ulimit -n 65536" in files["todo"]
    name = finding(report, "OWN_NAME_LOOPBACK")
    assert name["text"].startswith("node4: own name is 127.0.1.1 in /etc/hosts")
    assert "$ 10.77.0.4 node4" in name["todo"]
    twins = finding(report, "TWIN")
    assert twins["text"].startswith("docker0 has 172.17.0.1 on node1, node2, node3 and node4")
    store = finding(report, "STORE_OPEN")
    assert store["text"] == "node1: torch's store listens on all interfaces (:: port 29500)"
    paste(four.nodes[0], store["todo"])  # nft takes every line


@pytest.mark.nightly
def test_an_interface_that_leads_elsewhere_is_found(three: Cluster, tmp_path: Path) -> None:
    node2 = three.nodes[1]
    node2.ip("link", "add", "eth1", "type", "veth", "peer", "name", "eth1-end")
    node2.ip("addr", "add", "10.88.0.2/24", "dev", "eth1")
    node2.ip("link", "set", "eth1-end", "up")
    node2.ip("link", "set", "eth1", "up")
    changes = {"node2": {"PYCOMM_SOCKET_IFNAME": "eth1"}}
    report = report_of(by_hand(three, tmp_path, "--reach-only", "--json", changes=changes), 1)
    assert problems(report) == [("WRONG_INTERFACE", "node2")]
    found = finding(report, "WRONG_INTERFACE")
    assert found["text"] == (
        "node2: wrong interface: eth1 (10.88.0.2) is not reached, eth0 (10.77.0.2) is"
    )
    assert "$ export PYCOMM_SOCKET_IFNAME=eth0" in found["todo"]


@pytest.mark.nightly
def test_a_host_that_cannot_join_has_the_line_on_its_own_screen(
    three: Cluster, tmp_path: Path
) -> None:
    node1, _, node3 = three.nodes
    node1.name_is_loopback()  # as Debian writes it, which is no wrong interface
    node1.firewall(f"ip saddr {node3.address} tcp dport 1024-65535 drop")
    outcomes = by_hand(three, tmp_path, "--reach-only", "--json", "--wait=20", env=RANGE)
    assert [one.returncode for one in outcomes] == [1, 1, 1], outcomes
    first, _, third = (json.loads(one.out) for one in outcomes)
    assert problems(first) == [("MISSING", "")]
    assert finding(first, "MISSING")["text"] == "node rank 2 did not come within 20 s"
    assert problems(third) == [("NO_STORE", "node1")]
    found = finding(third, "NO_STORE")
    assert found["text"].startswith("node3 -> node1 (10.77.0.1) port 29600: no answer (dropped")
    paste(node1, found["todo"])
    healed = report_of(by_hand(three, tmp_path, "--reach-only", "--json", env=RANGE), 0)
    assert problems(healed) == []


@pytest.mark.nightly
def test_a_blocked_store_port_is_found_before_torch_needs_it(
    three: Cluster, tmp_path: Path
) -> None:
    three.nodes[0].firewall("tcp dport 29500 drop")
    report = report_of(by_hand(three, tmp_path, "--reach-only", "--json"), 1)
    assert problems(report) == [("STORE_NO_ANSWER", "node1")]
    paste(three.nodes[0], finding(report, "STORE_NO_ANSWER")["todo"])
    assert problems(report_of(by_hand(three, tmp_path, "--reach-only", "--json"), 0)) == []


@pytest.mark.nightly
def test_a_pod_that_starts_again_while_the_others_train_is_not_failed(
    three: Cluster, tmp_path: Path
) -> None:
    node2 = three.nodes[1]
    words = [sys.executable, "-m", "pycomm", "doctor", "--nnodes=3", "--node-rank=1"]
    words += ["--master-addr=node1", "--wait=1"]
    for extra, code in (([], 0), (["--strict"], 1)):
        (outcome,) = run_on_both([(node2, [*words, *extra], child_environment())], tmp_path, 60.0)
        assert outcome.returncode == code, outcome
        assert re.match(r"pycomm doctor: 1 host, \d+ s +NOT JUDGED\n", outcome.out)
        said = " ".join(outcome.out.split())
        assert "has already ended, or the job is running." in said
        assert "node2 -> node1 (10.77.0.1) port 29501: refused (no doctor listens there" in said


@pytest.mark.ci
def test_the_first_host_prints_the_lines_for_the_others(three: Cluster, tmp_path: Path) -> None:
    """And these lines, run by a shell as they are, join it and measure what it was asked to."""
    options = ["--hosts", "node1,node2", "--reach-only", "--json", "--wait=90"]
    words = [sys.executable, "-m", "pycomm", "doctor", *options]
    node1, node2, _ = three.nodes
    env = child_environment(RANGE)
    errors = tmp_path / "lines"
    with errors.open("w") as lines, (tmp_path / "out").open("w") as out:
        first = subprocess.Popen(node1.command(*words), env=env, cwd=ROOT, stdout=out, stderr=lines)
        try:
            deadline = time.monotonic() + 60
            found: list[str] = []
            while not found and time.monotonic() < deadline:
                found = re.findall(r"^  node2:\n    (PYCOMM_.*)$", errors.read_text(), re.MULTILINE)
                time.sleep(0.05)
            assert len(found) == 1, errors.read_text()
            assert found[0].startswith("PYCOMM_PORT_RANGE=29600-29699 ")
            assert found[0].endswith(" --wait=90")
            (second,) = run_on_both(
                [(node2, ["sh", "-c", found[0]], child_environment())], tmp_path
            )
            assert (first.wait(30), second.returncode) == (0, 0), second
        finally:
            node1.kill_all()
            first.wait(20)
    report = json.loads((tmp_path / "out").read_text())
    assert report["stages"] == ["local", "reach"]
    assert second.out.rstrip("\n") == as_text(Report.from_json(report))


# Slow hosts and slow links


@rates
@pytest.mark.alone
def test_a_host_at_100_megabits_is_found(three: Cluster, tmp_path: Path) -> None:
    three.shape(three.nodes[2], "rate", "100mbit", "burst", "64kb", "latency", "50ms")
    report = report_of(by_hand(three, tmp_path, "--json"), 3)
    assert problems(report) == [("LINK_SLOW", "node3")]
    text = finding(report, "LINK_SLOW")["text"]
    assert text.startswith("node3: the link runs at 100 Mbit/s (eth0), 1")
    assert [row["slow"] for row in report["rates"]] == [False, False, True]
    assert 10e6 < report["rates"][2]["out"] < 12.6e6
    idle = {one["wire"]: one for one in report["syncs"] if not one["busy"]}
    # A ring over three hosts sends 4/3 of the bytes over each link: 62.5 M float32 values.
    predicted = idle["fp32"]["seconds_per_parameter"] * 62.5e6
    assert predicted == pytest.approx(62.5e6 * 4 * 4 / 3 / 12.0e6, rel=0.25)


@rates
@pytest.mark.alone
def test_a_token_bucket_is_found(three: Cluster, tmp_path: Path) -> None:
    shape = ("rate", "100mbit", "burst", "50mb", "latency", "50ms")
    three.shape(three.nodes[1], *shape, "peakrate", "1gbit", "mtu", "64kb")
    report = report_of(by_hand(three, tmp_path, "--json"), 3)
    assert problems(report) == [("TOKEN_BUCKET", "node2")]
    text = finding(report, "TOKEN_BUCKET")["text"]
    burst, then = re.fullmatch(r"node2: bursts to ([\d.]+) MB/s, then ([\d.]+) MB/s", text).groups()
    assert float(burst) > 40 and 9 < float(then) < 13  # 100 Mbit/s are 12.5 MB/s


@rates
@pytest.mark.alone
def test_an_mtu_hole_is_found(three: Cluster, tmp_path: Path) -> None:
    three.swallow_large_packets(three.nodes[1])
    report = report_of(by_hand(three, tmp_path, "--json"), 1)
    assert problems(report) == [("MTU_HOLE", "node2")]
    found = finding(report, "MTU_HOLE")
    assert found["text"].startswith("node2, with node1 and node3: packets of full size vanish")
    assert "node2 eth0 1500" in found["todo"][0]
    assert report["syncs"] == []  # it would hang
    for node in three.nodes:
        node.ip("link", "set", "eth0", "mtu", "1280")
    outcomes = by_hand(three, tmp_path, "--json")
    healed = json.loads(outcomes[0].out)
    # Without segmentation in the kernel the wire is as fast as the cores are, so it may be slow.
    assert {one.returncode for one in outcomes} <= {0, 3}, healed["findings"]
    assert "MTU_HOLE" not in dict(problems(healed))
    assert len(healed["syncs"]) == 6
