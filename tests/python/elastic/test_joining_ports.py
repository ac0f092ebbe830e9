"""Processes find the members of a training at a port of their hosts, without a shared file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_joining import Plan, start
from elastic_training import SHARED, TCP
from processes import child_environment
from ranks import TORCH_DDP, Ranks, free_port, run_ranks
from test_joined_trainings import check, joining
from test_joining_hosts import Trainer, two_hosts
from time_bound import assert_within

from pycomm._group import secrets
from pycomm.ddp import joining as joining_module

pytestmark = [
    pytest.mark.ci,
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.timeout(200),
]

TAKEN_WITHIN_S = 1.0
"""As docs/elastic.md has it."""


def at(port: int, hosts: str = "localhost") -> str:
    return f"pycomm://{hosts}:{port}"


def listener(pids: Sequence[int], port: int) -> int | None:
    """The first of these processes, of one host, that listens at a port."""
    for pid in pids:
        sockets = set()
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    words = line.split()
                    if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                        sockets.add(f"socket:[{words[9]}]")
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(fd) in sockets:
                        return pid
    return None


def taken_after(pids: Sequence[int], port: int, since: float) -> float:
    """The seconds until one of these listens there."""
    while time.monotonic() < since + 30.0:
        if listener(pids, port) is not None:
            return time.monotonic() - since
        time.sleep(0.005)
    raise AssertionError(f"none of {pids} has taken port {port} within 30 s")


def pids_of(*running: Ranks) -> list[int]:
    return [process.pid for each in running for process in each.processes.values()]


@pytest.mark.time_bound
def test_another_member_takes_the_port_of_a_dead_one(tmp_path: Path) -> None:
    """A founder has it, and dies; a founder or a newcomer takes it, and more processes join."""
    port = free_port()
    plan = Plan(at(port), 3)
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), SHARED) as second:
            second.wait_for_mark(0, "trains")
            first = listener(pids_of(running), port)
            assert first is not None
            dead = pids_of(running).index(first)
            since = running.kill(dead)
            left = [pid for pid in pids_of(running, second) if pid != first]
            took_s = taken_after(left, port, since)
            with start(1, joining(plan), SHARED) as third:
                ended = [*second.collect(90), *third.collect(90)]
            others = [result for result in running.collect(90) if result.rank != dead]
    values = check([*others, *ended])
    assert values[0]["steps"][-1]["members"] == (1 - dead, 2, 3)
    print(f"taken after {took_s:.3f} s")
    assert_within(took_s, TAKEN_WITHIN_S)


def asks_members(pid: int) -> bool:
    """Whether this process has the thread that sends its wish to join."""
    names = [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
    return "pycomm-agree" in names


@pytest.mark.time_bound
def test_a_process_that_waits_to_become_a_member_takes_no_port(tmp_path: Path) -> None:
    """It knows no members to name. So another member takes it, and if none is left, another
    training may begin there."""
    port = free_port()
    plan = Plan(at(port), 2, points=10**6, settings=(("join_pause", None),), check=False)
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), SHARED) as waiting:
            (pid,) = pids_of(waiting)
            waiting.wait_until(0, lambda: asks_members(pid), "does not ask")
            founders = pids_of(running)
            first = listener(founders, port)
            assert first is not None
            since = running.kill(founders.index(first))
            others = [each for each in founders if each != first]
            took_s = taken_after([*others, pid], port, since)
            assert listener([pid], port) is None
            running.kill(founders.index(others[0]))
            time.sleep(3 * TAKEN_WITHIN_S)
            assert listener([pid], port) is None
            with start(1, plan, SHARED) as next_one:
                next_one.wait_for_mark(0, "trains")
                next_one.kill(0)
                next_one.collect(30)
            waiting.kill(0)
            waiting.collect(30)
        running.collect(30)
    assert_within(took_s, TAKEN_WITHIN_S)


def test_a_newcomer_answers_when_the_founders_are_gone(tmp_path: Path) -> None:
    plan = Plan(at(free_port()), 2)
    with start(1, plan, TCP) as first:
        first.wait_for_mark(0, "trains")
        with start(1, joining(plan), TCP) as second:
            second.wait_for_mark(0, "trains")
            first.kill(0)
            with start(1, joining(plan), TCP) as third:
                results = [*second.collect(90), *third.collect(90)]
            first.collect(30)
    assert check(results)[0]["steps"][-1]["members"] == (1, 2)


def test_the_variable_names_the_port(tmp_path: Path) -> None:
    plan = Plan("", 1)
    peers = at(free_port())
    with start(1, plan, SHARED, PYCOMM_PEERS=peers) as first:
        first.wait_for_mark(0, "trains")
        with start(1, joining(plan), SHARED, PYCOMM_PEERS=peers) as second:
            results = [*first.collect(90), *second.collect(90)]
    assert check(results)[0]["steps"][-1]["members"] == (0, 1)


@pytest.mark.time_bound
def test_nobody_answers(tmp_path: Path) -> None:
    """The error names each host and address, and the process founds nothing."""
    port = free_port()
    plan = Plan(at(port, "localhost,not-a-host"), 2, settings=(("join_wait", 1.0),))
    with start(1, joining(plan), SHARED) as newcomer:
        none = newcomer.collect(60)[0].value
    text = none["error"].text
    assert none["error"].is_a("RendezvousTimeoutError"), text
    assert f"localhost (127.0.0.1:{port}): " in text, text
    assert "ECONNREFUSED" in text, text
    assert "not-a-host: this name has no address" in text, text
    assert_within(none["after_s"], 6.0)
    assert none["after_s"] > 0.9


# --- a port that is another one's -----------------------------------------------------------------


def test_the_port_of_a_training_that_runs_is_not_taken(tmp_path: Path) -> None:
    plan = Plan(at(free_port()), 2)
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(2, plan, SHARED) as others:
            refused = [result.value for result in others.collect(60)]
        with start(1, joining(plan), SHARED) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    for value in refused:
        assert value["error"].is_a("InvalidArgumentError"), value["error"].text
        assert "training that runs: one of its 2 members has answered" in value["error"].text
    check(results)


@pytest.mark.time_bound
def test_a_port_of_another_program_is_named_on_all_ranks(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with start(2, Plan(at(port), 0), SHARED) as running:
            refused = [result.value for result in running.collect(60)]
        with start(1, joining(Plan(at(port), 0, settings=(("join_wait", 1.0),))), SHARED) as late:
            none = late.collect(60)[0].value["error"]
    for value in refused:
        assert value["error"].is_a("InvalidArgumentError"), value["error"].text
        assert f"rank 0 cannot listen at 127.0.0.1:{port}" in value["error"].text
        assert "EADDRINUSE" in value["error"].text
        assert_within(value["after_s"], 6.0)
    assert none.is_a("RendezvousTimeoutError"), none.text
    assert f"127.0.0.1:{port}" in none.text


def wraps(rank: int, world_size: int, peers: Sequence[str]) -> str:
    import pycomm

    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    elastic = pycomm.Elastic(peers=peers[rank], state=[optimizer])
    with pytest.raises(pycomm.errors.ConfigMismatchError) as differs:
        pycomm.DistributedDataParallel(net, elastic=elastic)
    return str(differs.value)


@pytest.mark.parametrize("other", ["pycomm://localhost,other:1", "file"])
def test_ranks_with_other_peers_are_refused(other: str, tmp_path: Path) -> None:
    peers = ["pycomm://localhost:1", other if "://" in other else str(tmp_path / other)]
    for text in run_ranks(2, wraps, args=(peers,), preload=TORCH_DDP).values():
        assert "peers" in text
        assert "pycomm://localhost:1" in text


# --- with a secret --------------------------------------------------------------------------------


@pytest.mark.time_bound
def test_only_holders_of_the_secret_find_the_members(tmp_path: Path) -> None:
    """Each other one is refused at once, and the members do not notice."""
    files = [tmp_path / "secret", tmp_path / "another"]
    for path in files:
        secrets.generate_file(str(path))
    mine, another = (str(path) for path in files)
    key_id = secrets.read_file(mine)[0].key_id
    plan = Plan(at(free_port()), 2)
    with start(2, plan, TCP, PYCOMM_SECRET_FILE=mine) as running:
        running.wait_for_mark(0, "step 10")
        for file in ("none", another):
            with start(1, joining(plan), TCP, PYCOMM_SECRET_FILE=file) as stranger:
                refused = stranger.collect(60)[0].value
            assert refused["error"].is_a("JoinRefusedError"), refused["error"].text
            assert "secret" in refused["error"].text, refused["error"].text
            assert key_id not in refused["error"].text  # strangers learn nothing
            assert_within(refused["after_s"], 6.0)
        with start(1, joining(plan), TCP, PYCOMM_SECRET_FILE=mine) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    values = check(results)
    assert values[2]["steps"][0]["members"] == (0, 1, 2)
    assert values[0]["stats"]["epochs"] == 2


def test_a_stranger_with_a_secret_is_told_that_the_members_have_none(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    secrets.generate_file(str(file))
    plan = Plan(at(free_port()), 1)
    with start(1, plan, TCP, PYCOMM_SECRET_FILE="none") as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), TCP, PYCOMM_SECRET_FILE=str(file)) as stranger:
            refused = stranger.collect(60)[0].value["error"]
        running.kill(0)
        running.collect(30)
    assert refused.is_a("JoinRefusedError"), refused.text
    assert "has no secret" in refused.text, refused.text


# --- two hosts ------------------------------------------------------------------------------------


@pytest.mark.namespaces
def test_the_other_host_answers_when_the_first_one_has_lost_its_member(tmp_path: Path) -> None:
    """A name leads to loopback on its own host, as Debian writes it, and from others to eth0."""
    plan = Plan("pycomm://alpha,beta:29600", 3)
    with two_hosts() as (alpha, beta):
        first = Trainer(alpha, "first", plan, tmp_path)
        first.wait_for_mark("step 10")
        second = Trainer(beta, "second", joining(plan), tmp_path)
        second.wait_for_mark("trains")
        third = Trainer(beta, "third", joining(plan), tmp_path)
        third.wait_for_mark("trains")
        first.process.kill()
        first.process.wait()
        fourth = Trainer(alpha, "fourth", joining(plan), tmp_path)
        ended = [each.ended(60) for each in (second, third, fourth)]
    values = check(ended)  # type: ignore[arg-type]
    assert values[0]["steps"][-1]["members"] == (1, 2, 3)


WITH_A_NAME = """
import ctypes, os, socket, torch
assert ctypes.CDLL(None, use_errno=True).unshare(0x04000000) == 0  # CLONE_NEWUTS
socket.sethostname("container" + os.environ["RANK"])
import torch.distributed as dist, pycomm
dist.init_process_group("pycomm", pg_options=pycomm.Options(interface="eth0"))
net = torch.nn.Linear(3, 3)
elastic = pycomm.Elastic(
    peers="pycomm://192.168.1.10:29600", state=[torch.optim.SGD(net.parameters(), lr=0.1)]
)
print(pycomm.DistributedDataParallel(net, elastic=elastic).elastic.size)
"""


@pytest.mark.namespaces
def test_containers_with_names_of_their_own_share_a_port(tmp_path: Path) -> None:
    """As those of a pod do: they have one network, so one of them listens for both."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "192.168.1.10", "MASTER_PORT": "29500"}
    with two_hosts() as (alpha, _):
        processes = [
            subprocess.Popen(
                alpha.command(sys.executable, "-c", WITH_A_NAME),
                env=child_environment({**variables, "RANK": str(rank)}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert [text.split()[-1] for text in said] == ["2", "2"], said


@pytest.mark.namespaces
def test_a_training_begins_on_no_host_of_the_list(tmp_path: Path) -> None:
    plan = Plan("pycomm://beta:29600", 2)
    with two_hosts() as (alpha, _):
        value = Trainer(alpha, "first", plan, tmp_path).ended(60).value
    assert value["error"].is_a("InvalidArgumentError"), value["error"].text
    assert "no rank runs on one of these hosts" in value["error"].text


@pytest.mark.namespaces
@pytest.mark.time_bound
def test_a_host_that_is_cut_off_is_passed_over(tmp_path: Path) -> None:
    """The first of the list does not answer at all; the member that is asked next does."""
    plan = dataclasses.replace(Plan("pycomm://alpha,beta:29600", 1), check=False)
    with two_hosts() as (alpha, beta):
        first = Trainer(beta, "first", plan, tmp_path)
        first.wait_for_mark("step 10")
        alpha.ip("link", "set", "eth0", "down")
        second = Trainer(beta, "second", joining(plan), tmp_path)
        second.wait_for_mark("asks")
        began_s = time.monotonic()
        second.wait_for_mark("trains")
        joined_s = time.monotonic() - began_s
        ended = [each.ended(60) for each in (first, second)]
    values: list[dict[str, Any]] = check(ended)  # type: ignore[arg-type]
    assert values[0]["steps"][-1]["members"] == (0, 1)
    assert_within(joined_s, 20.0)


def test_a_process_listens_at_the_port_once_it_is_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """With addresses that it has looked up before others wait for it: that may take seconds."""
    calls: list[Any] = []
    agreement = types.SimpleNamespace(pull=lambda: calls.append("is admitted"))
    model = types.SimpleNamespace(
        _elastic=types.SimpleNamespace(peers_port=at(29600)), _own_group=None
    )

    def offer_port(group: Any, peers: str, addresses: Sequence[str]) -> Any:
        calls.append(addresses)
        return ("", ()), ""

    monkeypatch.setattr(joining_module, "offer_port", offer_port)
    joining_module.pull(agreement, model, ["127.0.0.1"])
    assert calls == ["is admitted", ["127.0.0.1"]]


@pytest.mark.parametrize(("members", "warns"), [(["a", "mine"], False), (["b"], True)])
def test_a_busy_port_of_another_training_is_named(
    members: list[str], warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    native = types.SimpleNamespace(ask_port=lambda *_: ("the same model", members))
    monkeypatch.setattr(joining_module, "loader", types.SimpleNamespace(native=native))
    monkeypatch.setattr(joining_module, "native_backend", lambda _: None)
    monkeypatch.setattr(joining_module, "reconfigure_handle", lambda _: "mine")
    offered = ("", [("127.0.0.1:29600", "EADDRINUSE")]), ""
    joining_module._be_found(None, at(29600), offered)
    assert ("nobody can find" in caplog.text) == warns, caplog.text
