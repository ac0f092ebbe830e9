"""The memory of an operation that has ended is its user's: no byte comes into it any more.

Rank 0 is in the middle of a large receive when its group ends. The first code that learns of the
end overwrites the part of the tensor that was being received, and checks it 0.3 s later. Between
two network namespaces the bytes come by TCP, and within one host through a ring in shared memory.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import rings
from documents import ROOT, installed_environment
from hosts import Host, run, run_on_both, wire
from processes import LOOPBACK, free_port

pytestmark = pytest.mark.needs_native

STORE_PORT = 29500
LIMIT_S = 120.0

SCRIPT = r"""
import atexit, json, mmap, os, sys, threading, time, weakref
from pathlib import Path

folder, how, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
NBYTES, WINDOW = 192 << 20, 1 << 20
PATTERN = b"\xa5" * (2 * WINDOW)
memory = mmap.mmap(-1, NBYTES)
found = {}
lock = threading.Lock()

def received():
    # The sender sends ones, in order; nothing else has been written here.
    low, high = 0, NBYTES
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if memory[middle] != 0 else (low, middle)
    return low

def fill(*_):
    with lock:
        if "whole" not in found:
            there = received()
            whole = there + WINDOW > NBYTES
            if not whole:
                found["begin"] = max(0, there - WINDOW)
                memory[found["begin"] : found["begin"] + 2 * WINDOW] = PATTERN
            found["whole"] = whole  # last: look() waits for it

def look():
    deadline = time.monotonic() + 20
    while "whole" not in found and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.3)
    if "begin" in found:
        kept = memory[found["begin"] : found["begin"] + 2 * WINDOW].count(PATTERN[:1])
        found["late"] = 2 * WINDOW - kept
    (folder / "partial").write_text(json.dumps(found))
    (folder / "partial").rename(folder / "found.json")

if how == "exit" and rank == 0:
    atexit.register(look)  # before pycomm registers its own hook, so it runs after that

import torch
import torch.distributed as dist

def wait(work):
    try:
        work.wait()
        fill()
    except dist.DistError as error:
        found["error"] = str(error)
        fill()

def receive():
    view = memoryview(memory)
    work = dist.irecv(torch.frombuffer(view, dtype=torch.uint8), 1)
    if how == "dropped":  # the tensor is freed when the operation has ended
        weakref.finalize(view, fill).atexit = False
    elif how in ("future", "exit"):  # at exit a daemon thread that waits would stay where it is
        work.get_future().add_done_callback(fill)
    else:
        threading.Thread(target=wait, args=(work,), daemon=True).start()

def until(there):
    deadline = time.monotonic() + 40
    while not there() and time.monotonic() < deadline:
        time.sleep(0.001)

dist.init_process_group("pycomm")
if rank == 1:
    work = dist.isend(torch.ones(NBYTES, dtype=torch.uint8), 0)
    try:
        work.wait()
    except dist.DistError:
        pass
    until((folder / "found.json").exists)
else:
    receive()
    until(lambda: received() > WINDOW)
    if how != "exit":
        dist.destroy_process_group()
        look()
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return installed_environment(tmp_path / "installed")


def launched(rank: int, master: str, port: int) -> dict[str, str]:
    """What any launcher sets."""
    names = {"MASTER_ADDR": master, "MASTER_PORT": str(port)}
    return {**names, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


def cut_short(folder: Path, how: str) -> bool:
    """Whether the group ended in the middle of the receive; then no byte has come late."""
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    assert "whole" in found, f"nobody learned of the end: {found}"
    if found["whole"]:
        return False
    assert found["late"] == 0, f"{found['late']} bytes came late: {found}"
    if how == "waiter":
        assert "SHUT_DOWN" in found["error"] or "PEER_LEFT" in found["error"], found
    return True


def counted(attempt: Callable[[Path], None], how: str, folder: Path, wanted: int) -> None:
    """Makes attempts until so many groups ended in the middle: a slow rank may come too late."""
    number, limit = 0, 5 * wanted
    while wanted > 0:
        assert number < limit, f"{wanted} more attempts should have ended in the middle"
        place = folder / str(number)
        place.mkdir()
        attempt(place)
        wanted -= cut_short(place, how)
        number += 1


WAYS = ("waiter", "future", "exit", "dropped")
"""How a rank learns of the end of its group: destroy_process_group(), or in one case an exit."""


@pytest.fixture(scope="module")
def wired() -> Iterator[tuple[Host, Host]]:
    hosts = [Host("alpha", "192.168.7.10", "fd78::10"), Host("beta", "192.168.7.11", "fd78::11")]
    with wire(*hosts) as both:
        if shutil.which("tc") is not None:  # so slow that a payload is never there at once
            with contextlib.suppress(OSError):
                shaped = ("rate", "2gbit", "burst", "64kb", "latency", "50ms")
                add = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf")
                run(*both[1].command(*add, *shaped))
        yield both


@pytest.mark.namespaces
@pytest.mark.parametrize("how", rings.first_of(WAYS))
@pytest.mark.ci
def test_over_tcp_between_hosts(
    wired: tuple[Host, Host], env: Mapping[str, str], tmp_path: Path, how: str, repeats: int
) -> None:
    def attempt(folder: Path) -> None:
        commands = [
            (
                host,
                [sys.executable, "-c", SCRIPT, str(folder), how],
                {**env, **launched(rank, wired[0].address, STORE_PORT)},
            )
            for rank, host in enumerate(wired)
        ]
        outcomes = run_on_both(commands, folder, LIMIT_S)
        assert outcomes[0].returncode == 0, outcomes

    counted(attempt, how, tmp_path, repeats)


@pytest.mark.parametrize("how", rings.first_of(WAYS))
@pytest.mark.ci
def test_through_shared_memory_within_a_host(
    env: Mapping[str, str], tmp_path: Path, how: str, repeats: int
) -> None:
    def attempt(folder: Path) -> None:
        port = free_port()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(folder), how],
                env={**env, **launched(rank, LOOPBACK, port)},
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = []
        try:
            said = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        assert ranks[0].returncode == 0, said

    counted(attempt, how, tmp_path, repeats)
