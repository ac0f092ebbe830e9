"""A process on another host joins over TCP; a wire that is cut meanwhile costs little."""

from __future__ import annotations

import contextlib
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_joining import Plan
from hosts import Host, alpha_and_beta, run, run_on_both, wire
from processes import RIG, child_environment
from test_joined_trainings import check, joining, longest_gap
from time_bound import assert_within

pytestmark = [
    pytest.mark.ci,
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.namespaces,
    pytest.mark.timeout(200),
]


class Trainer:
    """A process of a host, by itself."""

    def __init__(self, host: Host, name: str, plan: Plan, folder: Path) -> None:
        self.name = name
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        self.result = folder / f"{name}.result"
        given = folder / f"{name}.plan"
        given.write_bytes(pickle.dumps(plan))
        env = child_environment(
            {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "0",
                "RANK": "0",
                "WORLD_SIZE": "1",
                "PYCOMM_SOCKET_IFNAME": "eth0",
            }
        )
        program = [sys.executable, str(RIG / "joining_program.py"), str(given), str(self.result)]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                host.command(*program), env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def wait_for_mark(self, name: str, timeout_s: float = 60.0) -> None:
        end_s = time.monotonic() + timeout_s
        while name not in self.out.read_text().split("\n"):
            if time.monotonic() > end_s or self.process.poll() is not None:
                raise AssertionError(f"{self.name} did not reach {name!r}\n{self.describe()}")
            time.sleep(0.02)

    def ended(self, timeout_s: float) -> Trainer:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        return self

    @property
    def ok(self) -> bool:
        return self.process.returncode == 0

    @property
    def value(self) -> Any:
        return pickle.loads(self.result.read_bytes())

    def describe(self) -> str:
        return f"--- {self.name}: {self.out.read_text()[-2000:]}\n{self.err.read_text()[-6000:]}"


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    with wire(*alpha_and_beta()) as hosts, contextlib.ExitStack() as stack:
        for host in hosts:
            stack.callback(host.kill_all)
        yield hosts


def test_a_process_of_another_host_joins(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path / "peers"), 2)
    with two_hosts() as (alpha, beta):
        first = Trainer(alpha, "first", plan, tmp_path)
        first.wait_for_mark("step 10")
        second = Trainer(beta, "second", joining(plan), tmp_path)
        second.wait_for_mark("trains")
        third = Trainer(alpha, "third", joining(plan), tmp_path)
        ended = [each.ended(60) for each in (first, second, third)]
    values = check(ended)  # type: ignore[arg-type]
    assert values[0]["steps"][-1]["members"] == (0, 1, 2)
    assert [value["mine"] for value in values] == [0, 1, 2]


TELL_HANDLE = """
import torch.distributed as dist, pycomm
from pycomm._group.queries import elastic_group
dist.init_process_group("pycomm", pg_options=pycomm.Options(interface="eth1"))
own = dist.new_group([0, 1], pg_options=pycomm.Options())
print(pycomm.reconfigure_handle(elastic_group(own)), flush=True)
"""


def test_members_tell_the_address_of_the_wrappers_own_group(tmp_path: Path) -> None:
    """Not that of another group of the process, on an interface that others may not reach."""
    with two_hosts() as (alpha, beta):
        peer = ["peer", "name", "eth1", "netns", beta.namespace]
        run("ip", "link", "add", "eth1", "netns", alpha.namespace, "type", "veth", *peer)
        for number, host in enumerate((alpha, beta)):
            host.ip("addr", "add", f"10.61.0.{1 + number}/24", "dev", "eth1")
            host.ip("link", "set", "eth1", "up")
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": alpha.name, "MASTER_PORT": "29500"}
        commands = [
            (
                host,
                [sys.executable, "-c", TELL_HANDLE],
                child_environment({**variables, "RANK": str(rank)}),
            )
            for rank, host in enumerate((alpha, beta))
        ]
        outcomes = run_on_both(commands, tmp_path)
    for host, outcome in zip((alpha, beta), outcomes, strict=True):
        assert outcome.returncode == 0, outcome.err
        assert host.address in outcome.out and "10.61.0." not in outcome.out, outcome.out


@pytest.mark.time_bound
def test_a_cut_during_the_transfer_costs_less_than_join_pause(tmp_path: Path) -> None:
    """The members go on after heartbeat_timeout, and it joins when the wire is back."""
    if shutil.which("tc") is None:
        pytest.skip("needs the command tc (package iproute2)")
    plan = Plan(
        str(tmp_path / "peers"),
        2,
        payload=20 << 20,
        check=False,
        settings=(("join_pause", 20.0),),
    )
    with two_hosts() as (alpha, beta):
        rate = ["root", "tbf", "rate", "50mbit", "burst", "64kb", "latency", "200ms"]
        try:
            run(*alpha.command("tc", "qdisc", "add", "dev", "eth0", *rate))
        except OSError as error:
            pytest.skip(f"tc is not allowed here: {error}")
        first = Trainer(alpha, "first", plan, tmp_path)
        first.wait_for_mark("trains")
        second = Trainer(alpha, "second", joining(plan), tmp_path)
        second.wait_for_mark("trains")
        marks = first.out.read_text().count("gives\n")
        third = Trainer(beta, "third", joining(plan), tmp_path)
        end_s = time.monotonic() + 60.0
        while first.out.read_text().count("gives\n") == marks and time.monotonic() < end_s:
            time.sleep(0.02)
        time.sleep(1.0)  # of the 3.4 s that the state takes
        beta.ip("link", "set", "eth0", "down")
        steps = first.out.read_text().count("step ")
        end_s = time.monotonic() + 60.0
        while first.out.read_text().count("step ") < steps + 3 and time.monotonic() < end_s:
            time.sleep(0.02)
        beta.ip("link", "set", "eth0", "up")
        ended = [each.ended(90) for each in (first, second, third)]
    values = check(ended)  # type: ignore[arg-type]
    assert [value["mine"] for value in values] == [0, 1, 2]
    gap_s = max(longest_gap(value) for value in values[:2])
    assert gap_s > 1.0  # else nobody was waiting
    assert_within(gap_s, 12.0)
