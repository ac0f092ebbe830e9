"""``pycomm run`` on hosts that are network namespaces, over a real sshd; each host is sick in turn.

node1 is the launcher's own host, so it is started without ssh; the others are reached by ssh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rings
from hosts import Host, run
from run_jobs import GRACE_S, LIMIT_S, Job, write_interpreter
from ssh_servers import SshHosts, processes_of, ssh_hosts
from time_bound import assert_within

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.namespaces,
    pytest.mark.timeout(200),
]

# The bounds of docs/several-machines.md: for a host that receives no heartbeat, and for one whose
# launcher has lost another host. The slack is for a machine that does something else, too.
ALONE_S = 15 + GRACE_S + 2
OTHERS_S = 20 + 3 + GRACE_S + 2
SLACK_S = 5.0

# A rank that needs no torch. It leaves a daemon behind, which no process group of torchrun has.
RANK = """
import os, subprocess, sys, time
from pathlib import Path
rank, go = os.environ["RANK"], Path(sys.argv[1])
subprocess.run(["sh", "-c", "setsid sleep 1000 </dev/null >/dev/null 2>&1 &"], check=True)
print("ready", rank, flush=True)
try:
    while not go.exists():
        time.sleep(0.05)
        if Path(f"{go}-{rank}").exists():
            sys.exit(7)
except KeyboardInterrupt:
    print("interrupted", rank, flush=True)
    raise
print("done", rank, flush=True)
"""

SUM = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("pycomm")
total = torch.ones(100_000)
dist.all_reduce(total)
print("sum", total[-1].item(), sys.argv[2:], flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(3, tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture
def hosts(servers: SshHosts) -> Iterator[SshHosts]:
    """As they were at first, also after the test before."""
    yield servers
    for node in servers.nodes:
        for pid in processes_of(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(hosts: SshHosts, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(*arguments: str, script: str = RANK) -> Job:
        jobs.append(Job(hosts, tmp_path, *arguments, script=script))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.wait()


# The main case


def test_two_hosts_train_together_with_a_secret_that_nobody_sees(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# of the test\nnode1 slots=1\nnode2:2\n")
    job = start("--hostfile", str(hostfile), "--secret", "--rdzv_conf=timeout=60", script=SUM)
    for rank, name in enumerate(("node1", "node2", "node2")):
        job.wait_for(rf"^\[{rank}@{name}\] sum 3\.0 \[\]$")
    secret = b"pycomm-secret-1:"
    environments = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                assert secret not in (folder / "cmdline").read_bytes(), folder
                environments.append((folder / "environ").read_bytes())
    assert not any(secret in each for each in environments)
    # The test looks at the right processes, and there is a secret.
    (found,) = {
        found[1].decode()
        for each in environments
        if b"\0RANK=2\0" in each and (found := re.search(rb"PYCOMM_SECRET_FILE=([^\0]+)", each))
    }
    assert Path(found).read_bytes().startswith(secret)
    job.wait_for("TLS with the secret of key id")  # on another pipe than the sums
    job.go.touch()
    assert job.end() == 0, job.text
    job.all_gone(5)
    assert not Path(found).exists()


# Hosts that cannot run it


def cannot_log_in(hosts: SshHosts, _: Path) -> list[str]:
    (hosts.folder / "authorized").write_text("")
    return []


def no_server(hosts: SshHosts, _: Path) -> list[str]:
    os.kill(hosts.servers["node2"], signal.SIGKILL)
    return []


def names_of(node: Host) -> Path:
    """The host's /etc/hosts."""
    return Path("/etc/netns") / node.namespace / "hosts"


def unknown_name(hosts: SshHosts, _: Path) -> list[str]:
    names = names_of(hosts.nodes[0])
    names.write_text(names.read_text().replace(" node2\n", " another\n"))
    return []


def no_answer(hosts: SshHosts, _: Path) -> list[str]:
    _drop_on_node1(hosts, f"ip saddr {hosts.nodes[1].address} tcp sport 22 drop;")
    return []


def unknown_key(hosts: SshHosts, _: Path) -> list[str]:
    hosts.forget_key(hosts.nodes[1])
    return []


def changed_key(hosts: SshHosts, _: Path) -> list[str]:
    known = hosts.folder / "known"
    one, two = known.read_text().splitlines()[1:3]
    words = [*one.split()[:2], two.split()[2]]
    known.write_text(f"{known.read_text()}".replace(one, " ".join(words)))
    return []


def on_node2(folder: Path, line: str) -> list[str]:
    """An interpreter that is another one on node2."""
    return write_interpreter(folder, f'if [ "$(hostname)" = node2 ]; then\n{line}\nfi')


def no_interpreter(_: SshHosts, folder: Path) -> list[str]:
    return on_node2(folder, "exec /nowhere/python3")


def no_file(_: SshHosts, folder: Path) -> list[str]:
    return _hide_on_node2(folder, folder)


def no_folder(_: SshHosts, folder: Path) -> list[str]:
    return _hide_on_node2(folder, folder.parent)


def _hide_on_node2(folder: Path, hidden: Path) -> list[str]:
    """node2 sees an empty folder there."""
    mount = f"""'mount -t tmpfs none {hidden} && exec "$0" "$@"'"""
    return on_node2(folder, f'exec unshare -m sh -c {mount} {sys.executable} "$@"')


def _fake(folder: Path, package: str, file: str, version: str) -> list[str]:
    (folder / "fake" / package).mkdir(parents=True)
    (folder / "fake" / package / "__init__.py").touch()
    (folder / "fake" / package / file).write_text(f'__version__ = "{version}"\n')
    return on_node2(folder, f"export PYTHONPATH={folder}/fake:$PYTHONPATH")


def other_torch(_: SshHosts, folder: Path) -> list[str]:
    return _fake(folder, "torch", "version.py", "2.1.0+cpu")


def other_pycomm(_: SshHosts, folder: Path) -> list[str]:
    return _fake(folder, "pycomm", "_version.py", "0.0.9")


def no_pycomm(_: SshHosts, folder: Path) -> list[str]:
    return on_node2(folder, 'exec /usr/bin/env -i PYTHONPATH= python3 -S "$@"')


def closed_port(hosts: SshHosts, _: Path) -> list[str]:
    _drop_on_node1(hosts, "tcp dport 29500 drop;")
    return ["--master-port=29500"]


def _drop_on_node1(hosts: SshHosts, rules: str) -> None:
    chain = f"chain c {{ type filter hook input priority 0; iif lo accept; {rules} }};"
    run(
        *Host.command(hosts.nodes[0], "nft", "-f", "-"),
        input=f"flush ruleset\ntable inet filter {{ {chain} }}",
    )


REFUSALS: dict[Callable[[SshHosts, Path], list[str]], str] = {
    no_server: r"node2: no ssh server listens there \(.*refused\)\. Try: start sshd on node2",
    unknown_name: r"node2: its name cannot be resolved \(.*hostname node2: .*\)\. Try: correct",
    no_answer: r"node2: ssh cannot reach it \(.*port 22: .*timed out\)\. Try: ssh node2\. Is the",
    unknown_key: r"node2: its host key is unknown here \(.*\)\. Try: .*: ssh node2$",
    changed_key: r"node2: its host key is not the one that ssh knows .*ssh-keygen -R node2",
    cannot_log_in: r"node2: ssh cannot log in without a password .*\. Try: ssh-copy-id node2",
    no_interpreter: r"node2: there is no interpreter /.*/python \(.*not found.*\)\. Try: --python",
    no_file: r"node2: there is no file /.*/train\.py\. Try: copy it there, or --folder",
    no_folder: r"node2: there is no folder /.*: No such file",
    other_torch: r"node2: /.*/python has torch 2\.1\.0\+cpu there, and .* here\. Try: install",
    other_pycomm: r"node2: /.*/python has pycomm 0\.0\.9 there, and .* here\. Try: install",
    no_pycomm: r"node2: /.*/python has no torch there\. Try: install it, or --python",
    closed_port: r"node2: does not reach node1 \(.*10\.77\.0\.1: timed out.*port 29500\. Try: open",
}


@pytest.mark.ci
@pytest.mark.parametrize("sicken", rings.ends(REFUSALS), ids=lambda one: one.__name__)
def test_a_host_that_cannot_run_the_job_is_named_with_the_reason(
    sicken: Callable[[SshHosts, Path], list[str]],
    hosts: SshHosts,
    start: Callable[..., Job],
    tmp_path: Path,
) -> None:
    authorized = (hosts.folder / "authorized").read_text()
    names = names_of(hosts.nodes[0]).read_text()
    try:
        job = start("-H", "node1:1,node2:1,node3:1", *sicken(hosts, tmp_path))
        assert job.end() == 1
    finally:
        (hosts.folder / "authorized").write_text(authorized)
        names_of(hosts.nodes[0]).write_text(names)
        hosts.remember_keys()
        run(*Host.command(hosts.nodes[0], "nft", "flush", "ruleset"))
        if sicken is no_server:
            hosts.start(hosts.nodes[1])
    assert re.search(rf"^pycomm run: {REFUSALS[sicken]}", job.text, re.MULTILINE), job.text
    assert "ready" not in job.text  # nothing has begun on the others
    blamed = set(re.findall(r"^pycomm run: (node\d): ", job.text, re.MULTILINE))
    assert blamed == ({"node2", "node3"} if sicken in (cannot_log_in, closed_port) else {"node2"})
    job.all_gone(5)


@pytest.mark.nightly
def test_an_address_that_not_all_hosts_reach_is_passed_over(
    hosts: SshHosts, start: Callable[..., Job]
) -> None:
    """The name of node1 leads to it on node1 alone, and comes first."""
    first = hosts.nodes[0]
    names = names_of(first).read_text()
    names_of(first).write_text(names.replace(f"{first.address} node1\n", "10.99.0.9 node1\n"))
    first.ip("addr", "add", "10.99.0.9/32", "dev", "lo")
    try:
        script = RANK.replace('"ready", rank', '"ready at", os.environ["MASTER_ADDR"]')
        job = start("-H", "node1:1,node2:1", script=script)
        job.wait_for(r"^\[\d@node\d\] ready at \S+$", 2)
        job.go.touch()
        assert job.end() == 0, job.text
    finally:
        first.ip("addr", "del", "10.99.0.9/32", "dev", "lo")
        names_of(first).write_text(names)
    assert set(re.findall(r"ready at (\S+)", job.text)) == {first.address}
    job.all_gone(5)


@pytest.mark.nightly
def test_the_doctor_under_run_writes_the_hosts_of_the_next_run(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    hostfile = tmp_path / "hosts"
    options = ["--model", "125M", "--seconds=0.5", "--hostfile", str(hostfile)]
    checked = start("-H", "node1:1,node2:2", "-m", "pycomm", "doctor", *options, script="")
    checked.end()  # not with 0 if it finds a host slow, as on busy cores
    for line in (r"pycomm doctor: 2 hosts, \d+ s +READY", r"one sync of 125 M parameters +fp32 \d"):
        assert re.search(rf"^\[0@node1\] {line}", checked.text, re.M), checked.text
    job = start("--hostfile", str(hostfile))
    job.wait_for(r"^\[\d@node\d\] ready \d$", 3)
    job.go.touch()
    assert job.end() == 0, job.text
    done = re.findall(r"^\[(\d@node\d)\] done", job.text, re.M)
    assert sorted(done) == ["0@node1", "1@node2", "2@node2"]
    job.all_gone(5)


# Jobs that end in the middle


@dataclasses.dataclass(frozen=True)
class End:
    """How a job ends, and what its launcher reports."""

    code: int
    says: str
    within_s: float = 30.0
    daemons: bool = True


def kill_rank(job: Job) -> None:
    os.kill(job.pid_of(job.hosts.nodes[1], r"^\S+python\S* -u train"), signal.SIGKILL)


def fail_rank(job: Job) -> None:
    Path(f"{job.go}-2").touch()


def interrupt(job: Job) -> None:
    job.process.send_signal(signal.SIGINT)


def kill_launcher(job: Job) -> None:
    job.process.kill()


def freeze_launcher(job: Job) -> None:
    """It is killed when nothing else is left."""
    job.process.send_signal(signal.SIGSTOP)
    job.all_gone(LIMIT_S, but_launcher=True)
    job.process.kill()


def kill_ssh(job: Job) -> None:
    os.kill(job.pid_of(job.hosts.nodes[0], r"^ssh .* node2 "), signal.SIGKILL)


def kill_torchrun(job: Job) -> None:
    os.kill(job.pid_of(job.hosts.nodes[1], "torch.distributed.run"), signal.SIGKILL)


def kill_remote_end(job: Job) -> None:
    found = [
        pid for pid, line in processes_of(job.hosts.nodes[1]).items() if "import json;j=" in line
    ]
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def cut_wire(job: Job) -> None:
    _port(job, "down")


def _port(job: Job, state: str) -> None:
    switch = Host("switch", "", "")
    run("ip", "-n", switch.namespace, "link", "set", "port-node2", state)


ENDS: dict[Callable[[Job], None], End] = {
    kill_rank: End(128 + 9, "rank 1 on node2 failed first: signal SIGKILL; all hosts were ended"),
    fail_rank: End(7, "rank 2 on node3 failed first: exit code 7; all hosts were ended"),
    interrupt: End(130, "SIGINT: ending all hosts"),
    kill_launcher: End(-9, ""),
    freeze_launcher: End(-9, "", ALONE_S + SLACK_S),
    kill_ssh: End(1, "the connection to node2 was lost; all hosts were ended"),
    kill_torchrun: End(128 + 9, "torchrun on node2 failed: signal SIGKILL; all hosts were ended"),
    # Only torchrun is left then, and it does not know what its ranks have detached.
    kill_remote_end: End(1, "the connection to node2 was lost; all", daemons=False),
    cut_wire: End(1, "the connection to node2 was lost; all hosts were ended", OTHERS_S + SLACK_S),
}


@pytest.mark.ci
@pytest.mark.time_bound
@pytest.mark.parametrize("strike", rings.ends(ENDS), ids=lambda one: one.__name__)
def test_no_process_is_left_on_any_host(
    strike: Callable[[Job], None], start: Callable[..., Job]
) -> None:
    end = ENDS[strike]
    script = RANK if end.daemons else RANK.replace("setsid sleep", "true")
    job = start("-H", "node1:1,node2:1,node3:1", script=script)
    job.wait_for(r"^\[\d@node\d\] ready \d$", 3)
    # There are daemons, so the test looks where they would be left.
    there = ["sleep 1000" in str(processes_of(node)) for node in job.hosts.nodes]
    assert there == [end.daemons] * 3
    begin = time.monotonic()
    strike(job)
    alone_s = 0.0
    try:
        if strike is cut_wire:
            job.all_gone(LIMIT_S, on=job.hosts.nodes[1:2])
            alone_s = time.monotonic() - begin
        assert job.end() == end.code, job.text
        job.all_gone(end.within_s)
        took_s = time.monotonic() - begin
    finally:
        if strike is cut_wire:
            _port(job, "up")
    last = [line for line in job.lines if line.startswith("pycomm run: ")]
    assert not end.says or end.says in last[-1], job.text
    if strike is interrupt:  # the ranks had the signal, and time to end by themselves
        assert sorted(re.findall(r"interrupted (\d)", job.text)) == ["0", "1", "2"]
    assert_within(alone_s, ALONE_S + SLACK_S, "the host that is cut off")
    assert_within(took_s, end.within_s, job.text)


@pytest.mark.ci
def test_elastic_lets_the_others_go_on(start: Callable[..., Job]) -> None:
    job = start("-H", "node1:1,node2:1,node3:1", "--elastic")
    job.wait_for(r"^\[\d@node\d\] ready \d$", 3)
    fail_rank(job)
    job.wait_for("pycomm run: rank 2 on node3 failed first: exit code 7; the other hosts go on")
    job.go.touch()
    assert job.end(30) == 0, job.text  # torchrun alone waits five minutes for the third
    assert "[0@node1] done 0" in job.lines and "[1@node2] done 1" in job.lines
    job.all_gone(5)


@pytest.mark.ci
def test_a_second_signal_kills_ranks_that_ignore_the_first(start: Callable[..., Job]) -> None:
    deaf = RANK.replace("try:", "import signal; signal.signal(15, signal.SIG_IGN)\ntry:")
    job = start("-H", "node1:1,node2:1", "--grace=60", script=deaf)
    job.wait_for(r"ready \d$", 2)
    job.process.send_signal(signal.SIGTERM)
    job.wait_for("SIGTERM: ending all hosts")
    job.process.send_signal(signal.SIGTERM)
    assert job.end(30) == 128 + 15, job.text
    job.all_gone(5)


def test_nothing_is_started_where_the_launcher_only_prints(start: Callable[..., Job]) -> None:
    job = start("-H", "nowhere:1,node1:2", "--dry-run", "--max_restarts=1")
    assert job.end() == 0
    first, second = job.lines
    assert first.startswith("ssh -F ") and " nowhere 'cd " in first
    assert second.startswith("cd ") and "--node-rank=1 --nproc-per-node=2" in second
    assert all("--master-addr=nowhere" in line and "--max-restarts=1" in line for line in job.lines)
