"""A thousand slow connections at the ports of a group while it forms, or at its Unix sockets."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import free_port_range, run_ranks
from time_bound import assert_within

from pycomm._group import secrets

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(120)]

SIZE = 3
CROWD = 1000
FEWEST_PER_S = CROWD / 4
"""Connections per second."""


class Crowd:
    """Up to a thousand connections per second, one byte on each; ``CROWD`` are held open."""

    def __init__(self, ports: range) -> None:
        self.opened = 0
        self._opened_at: list[float] = []  # the first one, and the last one
        self._ports = ports
        self._held: deque[socket.socket] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="the crowd")

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        while self._held:
            self._held.pop().close()

    @property
    def per_s(self) -> float:
        """How many connections it opened per second, from the first one to the last."""
        return self.opened / (self._opened_at[-1] - self._opened_at[0])

    def _run(self) -> None:
        while not self._stop.wait(len(self._ports) / 1000):
            for port in self._ports:
                stranger = socket.socket()
                self._held.append(stranger)
                if len(self._held) > CROWD:
                    self._held.popleft().close()
                with contextlib.suppress(OSError):  # not open yet, or no more
                    stranger.connect(("127.0.0.1", port))
                    stranger.send(b"\x16")  # as a TLS client begins
                    self.opened += 1
                    self._opened_at[1:] = [time.monotonic()]


def form(rank: int, world_size: int, folder: str) -> float:
    """Seconds until the ranks have met and every pair has spoken."""
    Path(f"{folder}/here-{rank}").touch()
    while len(list(Path(folder).glob("here-*"))) < world_size:
        time.sleep(0.01)  # the time is for meeting, not for importing torch
    begin = time.monotonic()
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=world_size)
    met = time.monotonic() - begin
    time.sleep(3.0)  # the ports are open: the crowd is there before the first connection is
    begin = time.monotonic()
    outputs = [torch.empty(1) for _ in range(world_size)]
    dist.all_to_all(outputs, [torch.full((1,), float(rank)) for _ in range(world_size)])
    seconds = met + time.monotonic() - begin
    assert [float(output) for output in outputs] == list(range(world_size))
    dist.barrier()
    dist.destroy_process_group()
    return seconds


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * CROWD:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2 * CROWD, soft), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.alone
@pytest.mark.time_bound
@pytest.mark.usefixtures("many_files")
def test_a_thousand_slow_connections_delay_a_group_by_less_than_a_second(tmp_path: Path) -> None:
    secrets.generate_file(str(tmp_path / "secret"))

    def seconds(name: str, first: int, last: int) -> float:
        (tmp_path / name).mkdir()
        env = {
            "PYCOMM_SECRET": None,
            "PYCOMM_SECRET_FILE": str(tmp_path / "secret"),
            "PYCOMM_TRANSPORT": "tcp",
            "PYCOMM_SOCKET_IFNAME": "lo",
            "PYCOMM_PORT_RANGE": f"{first}-{last}",
        }
        results = run_ranks(
            SIZE, form, args=(str(tmp_path / name),), init="none", backend=None, env=env
        )
        return float(max(results.values()))

    first, last = free_port_range(SIZE)
    alone = seconds("alone", first, last)
    first, last = free_port_range(SIZE)
    with Crowd(range(first, last + 1)) as crowd:
        beside = seconds("beside", first, last)
    print(f"alone {alone:.2f} s, beside {crowd.opened} strangers {beside:.2f} s")
    print(f"{crowd.per_s:.0f} strangers per second")
    assert_within(1 / crowd.per_s, 1 / FEWEST_PER_S, "for each stranger")
    assert crowd.opened >= CROWD / 2, "it filled all places, many times"
    assert_within(beside, alone + 1)


# Another user of the host at the ranks' Unix sockets, whose names are no secret (/proc/net/unix)

OTHER_USER = 4321
# Connects to each name that it reads, until its input ends: then it prints what it has done.
AS_ANOTHER_USER = f"""
import collections, json, os, socket, time
os.setgroups([])
os.setresgid({OTHER_USER}, {OTHER_USER}, {OTHER_USER})
os.setresuid({OTHER_USER}, {OTHER_USER}, {OTHER_USER})
os.set_blocking(0, False)
names, held, did, ended = [], collections.deque(), collections.Counter(), False
did.update(opened=0, full=0, answered=0)

def let_go(stranger):
    try:
        did["answered"] += len(stranger.recv(1))
    except OSError:
        pass
    stranger.close()

opened_at = [0.0]
while not ended:
    try:
        text = os.read(0, 1 << 16)
        names += text.decode().split()
        ended = not text
    except BlockingIOError:
        pass
    for name in names:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.setblocking(False)
        try:
            stranger.connect(b"\\0pycomm/" + name.encode())
            did["opened"] += 1
            opened_at[0] = opened_at[0] or time.monotonic()
            opened_at[1:] = [time.monotonic()]
            stranger.send(b"c")  # as a pycomm begins
        except BlockingIOError:
            did["full"] += 1
        except OSError:  # not open yet, or no more; or it is dropped already
            pass
        held.append(stranger)
        if len(held) > {CROWD}:
            let_go(held.popleft())
    time.sleep(max(1, len(names)) / 1000)
for stranger in held:
    let_go(stranger)
print(json.dumps({{**did, "seconds": opened_at[-1] - opened_at[0]}}))
"""


def own_unix_sockets() -> set[str]:
    """The names, without "pycomm/", of the sockets that links of this process are opened to."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{descriptor}"))
            inodes.update(found.groups() if found else ())
    lines = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    listening_stream = ("00010000", "0001")
    return {
        line[7].removeprefix("@pycomm/")
        for line in lines
        if len(line) == 8 and tuple(line[3:5]) == listening_stream and line[6] in inodes
    }


def form_and_tell_names(rank: int, world_size: int, folder: str) -> float:
    """The same as form(), and the crowd learns the names of this rank's sockets."""
    done = threading.Event()

    def tell() -> None:
        told: set[str] = set()
        while not done.wait(0.01):
            for name in own_unix_sockets() - told:
                (Path(folder) / f"name-{name}").touch()
                told.add(name)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        return form(rank, world_size, folder)
    finally:
        done.set()
        teller.join()


class UnixCrowd:
    """A process of another user; it connects to the sockets that ranks name in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.did: dict[str, float] = {}
        self._folder = folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._forward, name="names for the crowd")

    def __enter__(self) -> UnixCrowd:
        self._child = subprocess.Popen(
            [sys.executable, "-c", AS_ANOTHER_USER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        output, _ = self._child.communicate(timeout=30)
        self.did = json.loads(output)

    def _forward(self) -> None:
        told: set[str] = set()
        assert self._child.stdin is not None
        while not self._stop.wait(0.01):
            for path in set(self._folder.glob("name-*")):
                name = path.name.removeprefix("name-")
                if name not in told:
                    told.add(name)
                    self._child.stdin.write(name + "\n")
                    self._child.stdin.flush()


@pytest.mark.alone
@pytest.mark.time_bound
@pytest.mark.usefixtures("many_files")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_users_crowd_at_unix_sockets_delays_a_group_by_less_than_a_second(
    tmp_path: Path,
) -> None:
    def seconds(name: str) -> float:
        results = run_ranks(
            SIZE,
            form_and_tell_names,
            args=(str(tmp_path / name),),
            init="none",
            backend=None,
            env={"PYCOMM_TRANSPORT": "auto"},
        )
        for result in results:
            # One that is read is logged. Those of another user are dropped before.
            assert "turned away" not in result.stderr, result.stderr
        return float(max(results.values()))

    for name in ("alone", "beside"):
        (tmp_path / name).mkdir()
    alone = seconds("alone")
    with UnixCrowd(tmp_path / "beside") as crowd:
        beside = seconds("beside")
    print(f"alone {alone:.2f} s, beside {crowd.did} {beside:.2f} s")
    assert len(list((tmp_path / "beside").glob("name-*"))) >= SIZE
    assert crowd.did["answered"] == 0
    took_s = crowd.did["seconds"] / crowd.did["opened"]
    assert_within(took_s, 1 / FEWEST_PER_S, "for each stranger")
    assert crowd.did["opened"] >= CROWD / 4
    assert_within(beside, alone + 1)
