"""Two hosts with two ranks each, numbered as no ring should be, in network namespaces.

Needs root and `ip`; skipped, with the reason, where that is not allowed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import installed_environment
from hosts import Host, run_on_both, wire

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.namespaces,
    pytest.mark.timeout(170),
]

# One host's ranks: 0 and 2, or 1 and 3. Each prints what it got, as JSON.
RANKS = """
import json, os, sys

host = int(os.environ["HOST"])
children = []
for local in range(2):
    pid = os.fork()
    if pid == 0:
        rank = host + 2 * local
        break
    children.append(pid)
else:
    sys.exit(max(os.waitpid(pid, 0)[1] for pid in children) >> 8)
os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(local)}

import torch
import torch.distributed as dist
import pycomm

dist.init_process_group("pycomm")
wrong = []


def check(what, tensor, expected):
    if not torch.equal(tensor, expected):
        wrong.append(what)


base = torch.arange(50_001, dtype=torch.float32) % 97
for numel in (1, 50_001):
    tensor = base[:numel] * (rank + 1)
    dist.all_reduce(tensor)
    check(f"all_reduce of {numel}", tensor, base[:numel] * 10)
    tensor = base[:numel] * (rank + 1)
    dist.broadcast(tensor, 3)
    check(f"broadcast of {numel}", tensor, base[:numel] * 4)
    gathered = torch.empty(4 * numel)
    dist.all_gather_into_tensor(gathered, base[:numel] * (rank + 1))
    check(f"all_gather of {numel}", gathered, torch.cat([base[:numel] * n for n in (1, 2, 3, 4)]))
    part = torch.empty(numel)
    whole = torch.cat([base[:numel] * (rank + 1) + n for n in range(4)])
    dist.reduce_scatter_tensor(part, whole)
    check(f"reduce_scatter of {numel}", part, base[:numel] * 10 + 4 * rank)
    sizes = [numel + peer for peer in range(4)]
    exchanged = torch.empty(sum(sizes))
    dist.all_to_all_single(
        exchanged, torch.full((4 * sizes[rank],), rank + 1.0), sizes, [sizes[rank]] * 4
    )
    expected = torch.cat([torch.full((size,), peer + 1.0) for peer, size in enumerate(sizes)])
    check(f"all_to_all of {numel}", exchanged, expected)
    for apart in (1, 2):  # to the other host, then to the other rank of this one
        arriving, to, source = torch.empty(20 * numel), (rank + apart) % 4, (rank - apart) % 4
        works = [dist.irecv(arriving, source)]
        works += [dist.isend(torch.full((20 * numel,), rank + 1.0), to)]
        for work in works:
            work.wait()
        check(f"message of {numel}", arriving, torch.full((20 * numel,), source + 1.0))
dist.barrier()
with open("/proc/self/smaps") as smaps:
    in_memory = [line for line in smaps if "memfd:pycomm" in line or line.startswith("Rss:")]
touched_kib = sum(
    int(after.split()[1])
    for before, after in zip(in_memory, in_memory[1:])
    if "memfd:pycomm" in before
)
operations = pycomm.flight_record().operations
algorithms = [one.algorithm for one in operations if one.op == "all_reduce"]
told = {"rank": rank, "wrong": wrong, "algorithms": algorithms, "kib": touched_kib}
# A host's ranks share one pipe: the line and its end in one write, also without a buffer.
sys.stdout.write(json.dumps(told) + "\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


@pytest.fixture
def wired() -> Iterator[tuple[Host, Host]]:
    hosts = [Host("gamma", "10.98.0.1", "fd78::1"), Host("delta", "10.98.0.2", "fd78::2")]
    with wire(*hosts) as both:
        yield both


@pytest.mark.nightly
def test_interleaved_ranks_share_their_hosts_slices(
    wired: tuple[Host, Host], tmp_path: Path
) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    env = {
        **installed_environment(tmp_path),
        "MASTER_ADDR": wired[0].address,
        "MASTER_PORT": "29561",
    }
    commands = [
        (host, [sys.executable, str(script)], {**env, "HOST": str(number)})
        for number, host in enumerate(wired)
    ]
    outcomes = run_on_both(commands, tmp_path)
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes
    told = [json.loads(line) for outcome in outcomes for line in outcome.out.splitlines()]
    assert sorted(one["rank"] for one in told) == [0, 1, 2, 3]
    for one in told:
        assert one["wrong"] == [], one
        assert one["algorithms"] == ["recursive_doubling", "hierarchical"]
    # Links within a host go through 1 MiB of memory. Not every link does: one that was opened to
    # answer a faster rank, before this rank knew of the memory, is TCP. The first rank to know of
    # it had no rank to answer.
    assert max(one["kib"] for one in told) > 900, told
