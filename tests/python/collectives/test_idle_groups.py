"""An idle group holds nothing of the operations that have ended."""

from __future__ import annotations

import ctypes
import time

import pytest
import rings
import torch
import torch.distributed as dist
from mixed_rounds import held_now, mixed_rounds
from ranks import run_ranks
from time_bound import assert_within

import pycomm

pytestmark = pytest.mark.needs_native

ROUNDS = 100


def alternates(rank: int, world_size: int) -> float:
    tensor, few = torch.zeros(1 << 20), torch.zeros(world_size)
    for _ in range(ROUNDS):  # more than the operations in which a rank asks at a time
        work = dist.all_reduce(tensor, async_op=True)
        dist.all_to_all_single(torch.empty(world_size), few)  # over links, beside shared memory
        assert work is not None
        work.wait()
    dist.barrier()
    began_s = time.monotonic()
    with pytest.raises(pycomm.errors.CollectiveMismatchError):
        if rank == 0:
            dist.all_reduce(few)
        else:
            dist.reduce(few, dst=1)
    return time.monotonic() - began_s


@pytest.mark.time_bound
def test_a_mismatch_is_found_after_many_operations_of_both_ways() -> None:
    for took_s in run_ranks(2, alternates, init_timeout_s=20.0).values():
        assert_within(took_s, 5.0)


@pytest.mark.parametrize("world_size", rings.first_of([3, 2]))
def test_rounds_of_all_ways_leave_nothing(world_size: int) -> None:
    """The short version of tests/soak/rounds.py."""
    for looks in run_ranks(world_size, mixed_rounds, args=(400,)).values():
        for name in ("files", "threads"):
            assert looks[-1][name] <= looks[1][name]


def test_an_old_c_library_counts_no_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda name: object())
        assert held_now()["malloc_nbytes"] == 0
    assert held_now()["malloc_nbytes"] > 0
