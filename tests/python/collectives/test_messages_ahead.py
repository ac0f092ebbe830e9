"""Senders and receivers that are far ahead of each other, over links of either kind."""

from __future__ import annotations

import os
import resource
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from processes import run_python
from ranks import run_ranks

import pycomm

pytestmark = pytest.mark.needs_native

TRANSPORTS = ["shm", "tcp"]
ROOT = Path(__file__).resolve().parents[3]


def all_done(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


def both_ahead(rank: int, world_size: int, count: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    numbers = torch.arange(count, dtype=torch.float32)
    got = torch.full((count,), -1.0)
    works = [dist.isend(value, 1 - rank) for value in numbers.split(1)]
    store.set(f"issued{rank}", "1")
    store.wait(["issued0", "issued1"], timedelta(seconds=60))
    works += [dist.irecv(value, 1 - rank) for value in got.split(1)]
    all_done(works)
    assert torch.equal(got, numbers)
    dist.barrier()


@pytest.mark.parametrize("transport", rings.first_of(TRANSPORTS))
def test_isend_never_blocks(transport: str) -> None:
    run_ranks(2, both_ahead, args=(30_000,), pg_options={"transport": transport})


def broadcasts_to_a_slower_rank(rank: int, world_size: int, count: int) -> None:
    """The root needs nothing from the others: it is ahead by as much as they have room for."""
    tensor = torch.zeros(64)
    for step in range(count):
        if rank == 0:
            tensor.fill_(step)
        elif step % 16 == 0:
            time.sleep(0.0002)  # work between two of them
        dist.broadcast(tensor, 0)
        assert float(tensor[-1]) == step
    dist.barrier()


@pytest.mark.nightly
def test_a_root_that_is_ahead_for_100000_broadcasts() -> None:
    run_ranks(2, broadcasts_to_a_slower_rank, args=(100_000,), pg_options={"transport": "tcp"})


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def the_step_is_the_tag(rank: int, world_size: int, steps: int) -> int:
    """Bytes that this rank has grown by in the second half."""
    value = torch.zeros(1)
    half = 0
    for step in range(steps):
        if step % 1000 == 0:
            dist.barrier()  # messages that are ahead take memory too
        if step == steps // 2:
            half = resident()
        dist.send(value, 1, tag=step) if rank == 0 else dist.recv(value, 0, tag=step)
    dist.barrier()
    return resident() - half


def test_a_tag_that_is_never_used_again_is_forgotten() -> None:
    for grown in run_ranks(
        2, the_step_is_the_tag, args=(60_000,), pg_options={"transport": "tcp"}
    ).values():
        assert grown < 2 << 20


def descriptors_that_are_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def all_here(rank: int, world_size: int, what: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{what}{rank}", "1")
    store.wait([f"{what}{other}" for other in range(world_size)], timedelta(seconds=60))


def cannot_ask(rank: int, world_size: int) -> Any:
    """A ring of ranks, one of them late, and another without descriptors to ask who it is."""
    tensor = torch.ones(1 << 16)
    dist.all_reduce(tensor)  # its links are open
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors_that_are_open() + 1, limits[1]))
    all_here(rank, world_size, "ready")
    if rank == world_size - 1:
        threading.Event().wait(0.6)  # the others ask everybody after 0.2 s
    dist.all_reduce(tensor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    dist.barrier()
    assert pycomm.last_error() is None, pycomm.last_error()
    all_here(rank, world_size, "done")  # this is not about ranks that leave
    return float(tensor[0])


def test_a_rank_that_cannot_ask_who_is_late_goes_on() -> None:
    options = {"transport": "tcp", "algorithm": "ring"}
    assert run_ranks(6, cannot_ask, pg_options=options).values() == [36.0] * 6


@pytest.mark.ci
def test_the_benchmark_with_a_slower_receiver() -> None:
    script = ROOT / "benchmarks" / "messages_ahead.py"
    arguments = ["--messages", "3000", "--sizes", "0,4", "--slower-us", "100"]
    output = run_python([str(script), *arguments], timeout_s=300)
    rows = [line.split() for line in output.stdout.splitlines() if line[:6] in ("pycomm", "gloo  ")]
    assert len(rows) == 6, output.stdout
    for row in rows:
        assert float(row[3]) < 10_000, "at most 10,000 messages per second can be taken"


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_a_million_messages_ahead() -> None:
    """Values are compared in the program; here the bounds on memory and rate."""
    script = ROOT / "benchmarks" / "messages_ahead.py"
    output = run_python(
        [str(script), "--messages", "1000000", "--sizes", "0,4,256"], timeout_s=3000
    )
    rows = [
        line.split() for line in output.stdout.splitlines() if line.startswith(("pycomm:", "gloo"))
    ]
    assert len(rows) == 9, output.stdout
    rates = {(row[0], int(row[1])): float(row[3]) for row in rows}
    for transport in TRANSPORTS:
        assert rates[(f"pycomm:{transport}", 256)] >= rates[("gloo", 256)] / 2, rates
    for row in rows:
        if row[0] != "gloo":
            assert float(row[5]) <= 512 + 64 * 2**20 / 1_000_000, row
            assert float(row[6]) <= 64, row
