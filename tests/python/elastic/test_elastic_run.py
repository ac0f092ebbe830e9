"""``pycomm run --elastic`` starts a training with ``elastic=``; hosts and ranks die.

The hosts are network namespaces with a real sshd. node1 is the launcher's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from cluster import Cluster
from elastic_hosts import alone, last_notes
from run_jobs import Job
from ssh_servers import SshHosts, processes_of, ssh_hosts

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.namespaces,
    pytest.mark.nightly,
    pytest.mark.timeout(200),
]

TRAIN = """
import sys
from pathlib import Path
import torch.distributed as dist
import pycomm
from elastic_hosts import Course, trains_until_told
from elastic_training import Plan
dist.init_process_group("pycomm")
rank = dist.get_rank()
course = Course(str(Path(sys.argv[1]).parent), Plan(settings=(("quorum_wait", 4.0),)))
error = trains_until_told(rank, dist.get_world_size(), course)["error"]
print("ended", rank, error and error.type_name, flush=True)
dist.destroy_process_group()
sys.exit(error is not None)
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(3, tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture
def start(servers: SshHosts, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(*arguments: str) -> Job:
        jobs.append(Job(servers, tmp_path, "--elastic", *arguments, script=TRAIN))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.wait()
    servers.made.drop()
    for node in servers.nodes:
        for pid in processes_of(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_for_steps(job: Job, folder: Path, ranks: Sequence[int], members: Sequence[int]) -> float:
    """Until these ranks have made steps as these members; when all had made the first."""
    deadline = time.monotonic() + 60
    while True:
        found = {rank: last_notes(folder, rank, members) for rank in ranks}
        if all(len(each) >= 10 for each in found.values()):
            return max(each[0].at_s for each in found.values())
        assert time.monotonic() < deadline, f"{found}\n{job.text}"
        assert job.process.poll() is None, job.text
        time.sleep(0.05)


def pids_of_rank(job: Job, rank: int) -> list[int]:
    found = []
    for node in job.hosts.nodes:
        for pid in processes_of(node):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                environment = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
                found += [pid] * (f"\0RANK={rank}\0".encode() in environment)
    return found


def kill_rank(rank: int) -> Callable[[Job], None]:
    def act(job: Job) -> None:
        for pid in pids_of_rank(job, rank):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return act


def lose_power(host: int) -> Callable[[Job], None]:
    def act(job: Job) -> None:
        made: Cluster = job.hosts.made
        ways = alone(host, len(made.nodes))
        made.drop(*((made.nodes[a - 1], made.nodes[b - 1]) for a, b in ways))
        for pid in processes_of(made.nodes[host - 1]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return act


@pytest.mark.parametrize(
    ("placed", "act", "goes_on"),
    [
        pytest.param("node1:1,node2:1,node3:1", kill_rank(2), (0, 1), id="a rank",
                     marks=pytest.mark.ci),
        pytest.param("node1:1,node2:1,node3:1", lose_power(3), (0, 1), id="power of a host"),
        pytest.param("node1:2,node2:2", kill_rank(3), (0, 1), id="a rank beside another"),
        pytest.param("node2:1,node1:1,node3:1", kill_rank(0), (1, 2), id="rank 0"),
        pytest.param("node2:1,node1:1,node3:1", lose_power(2), (1, 2), id="power of rank 0's host"),
    ],
)  # fmt: skip
def test_the_others_go_on(
    placed: str,
    act: Callable[[Job], None],
    goes_on: tuple[int, ...],
    start: Callable[..., Job],
    tmp_path: Path,
) -> None:
    job = start("-H", placed)
    count = sum(int(each[-1]) for each in placed.split(","))
    wait_for_steps(job, tmp_path, range(count), range(count))
    at_s = time.monotonic()
    act(job)
    took_s = wait_for_steps(job, tmp_path, goes_on, goes_on) - at_s
    time.sleep(1.0)
    (tmp_path / "stop").touch()
    stopped_s = time.monotonic()
    code = job.end(80)
    print(f"went on after {took_s:.2f} s; ended {time.monotonic() - stopped_s:.2f} s after the end")
    assert code == 0, job.text
    for rank in goes_on:
        assert any(line.endswith(f"ended {rank} None") for line in job.lines), job.text
    servers = job.hosts
    servers.made.drop()
    job.all_gone(25)
