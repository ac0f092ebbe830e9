"""PYCOMM_PREFLIGHT between hosts, which are network namespaces: a job names what differs.

Needs root, `ip`, `nft` and `tc`; skipped, with the reason, where that is not allowed.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from doctor_facts import older_pycomm
from hosts import Outcome, run_on_both
from processes import child_environment
from time_bound import assert_within

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.namespaces,
    pytest.mark.ci,
    pytest.mark.timeout(200),
]

FILES = 20
JOB = """
import time
import torch.distributed as dist
import pycomm
begin = time.monotonic()
dist.init_process_group("pycomm")
print(time.monotonic() - begin)
dist.barrier()  # the store goes with rank 0
dist.destroy_process_group()
"""


@pytest.fixture
def four() -> Iterator[Cluster]:
    with cluster(4) as made:
        yield made


def start(
    made: Cluster,
    folder: Path,
    changes: Mapping[str, Mapping[str, str | None]] | None = None,
    before: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """A job with one rank per host; ``changes`` and ``before`` (a shell's) are of one host."""
    commands = []
    for rank, node in enumerate(made.nodes):
        words = [sys.executable, "-c", JOB]
        if shell := (before or {}).get(node.name):
            words = ["sh", "-c", f"{shell} && exec {shlex.join(words)}"]
        env: dict[str, str | None] = {"RANK": str(rank), "WORLD_SIZE": str(len(made.nodes))}
        env |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "PYCOMM_PREFLIGHT": "1"}
        env |= {"PYCOMM_SECRET_FILE": "none", "PYCOMM_SECRET": None}
        commands.append((node, words, child_environment(env | (changes or {}).get(node.name, {}))))
    outcomes = run_on_both(commands, folder)
    assert [one.returncode for one in outcomes] == [0] * len(outcomes), outcomes
    assert all("preflight" not in one.err for one in outcomes[1:])  # rank 0 alone speaks
    return outcomes


def said(outcomes: list[Outcome]) -> list[str]:
    return re.findall(r"pycomm \w+: preflight: (.*)", outcomes[0].err)


@pytest.mark.nightly
def test_hosts_that_are_alike_are_one_line(four: Cluster, tmp_path: Path) -> None:
    (line,) = said(start(four, tmp_path))
    assert re.fullmatch(
        r"4 hosts alike: pycomm \S+, torch \S+, python \S+, eth0 MTU 1500, no secret", line
    )


def test_what_differs_is_named_with_host_and_remedy(four: Cluster, tmp_path: Path) -> None:
    """A lower MTU, fewer open files, another version, and an own name on 127.0.1.1."""
    four.nodes[1].ip("link", "set", "eth0", "mtu", "1400")
    four.nodes[0].name_is_loopback()
    before = {"node3": f"ulimit -n {FILES}", "node4": f"cd {older_pycomm(tmp_path)}"}
    lines = said(start(four, tmp_path, before=before))
    assert len(lines) == 4, lines
    version, files, mtu, name = lines  # the worst first
    assert re.fullmatch(
        r"node4: pycomm 0\.0\.9, the others have \S+\. Install the same on all hosts\.", version
    )
    assert re.match(rf"node3: at most {FILES} open files, a rank needs \d+\. On that host, ", files)
    assert "`ulimit -n 65536`" in files
    assert mtu.startswith("node2: MTU 1400 on eth0, the others have 1500. Where the larger packets")
    assert mtu.endswith("on node2: `sudo ip link set eth0 mtu 1500`")
    assert name.startswith("node1: own name is 127.0.1.1 in /etc/hosts. pycomm works; gloo may not")


@pytest.mark.nightly
@pytest.mark.time_bound
def test_a_host_without_the_variable_is_named_and_waited_for_briefly(
    four: Cluster, tmp_path: Path
) -> None:
    outcomes = start(four, tmp_path, {"node3": {"PYCOMM_PREFLIGHT": None}})
    assert said(outcomes) == [
        "no facts of rank 2 (node3) in time. Set PYCOMM_PREFLIGHT=1 on all hosts."
    ]
    took = [float(one.out) for one in outcomes]
    assert took[0] >= 5.0  # of which a part was for the other interpreters to start
    assert_within(took[0], 5.0 + 30.0)
