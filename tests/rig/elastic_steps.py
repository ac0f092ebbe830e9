"""What a rank of the tests of elastic steps does: sums that say who is in them.

The first element of a sum is the number whose bits are the ranks in it, by their numbers at the
beginning. The rest must then be the sum of what these ranks put in, which the test computes in
float64 by itself; all are whole numbers, so every order of adding gives the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rank_child import describe_exception, mark
from signals import CaughtSignal

import pycomm
from pycomm._group.creation import native_backend
from pycomm._native import loader


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a rank trains."""

    steps: int = 200
    numels: tuple[int, ...] = (64, 1 << 18)
    """Of the buckets."""
    between_s: float = 0.002
    """What a step computes."""
    min_ranks: int = 1
    quorum_wait_s: float = 10.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the group."""
    struck: tuple[int, str] = (-1, "")
    """A rank that arms fault points when its steps begin, of the build that has them, and which."""
    late: tuple[int, int, float] = (-1, -1, 0.0)
    """A rank that is busy before a step, and for how long."""
    held: tuple[tuple[int, int], ...] = ()
    """Ranks that the test kills or stops, and the step before which each waits for that. So they
    are struck in the middle of the steps, however late the test is. SIGCONT ends the wait."""


def bucket(rank: int, step: int, index: int, numel: int) -> torch.Tensor:
    """What a rank puts into a sum."""
    values = _values(index, numel) + float((rank * 31 + step * 7) % 1000)
    values[0] = float(1 << rank)
    return values


@functools.cache
def _pattern(index: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float64).mul_(index + 3).remainder_(257.0)


def _values(index: int, numel: int) -> torch.Tensor:
    return _pattern(index, numel).to(torch.float32, copy=True)


def members_in(total: torch.Tensor) -> list[int]:
    """The ranks whose part is in a sum."""
    bits = int(total[0])
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]


def check(total: torch.Tensor, step: int, index: int) -> list[int]:
    """Raises AssertionError unless the sum is the one over the ranks that it names."""
    ranks = members_in(total)
    expected = torch.zeros(total.numel(), dtype=torch.float64)
    for rank in ranks:
        expected += bucket(rank, step, index, total.numel()).double()
    assert torch.equal(total.double(), expected), (step, index, ranks)
    return ranks


def open_steps(world_size: int, plan: Plan) -> tuple[dist.ProcessGroup, Any]:
    """A group of its own for all ranks, and the agreement about its steps. Collective."""
    c10d: Any = dist.distributed_c10d
    world: Any = dist.group.WORLD
    ranks = list(range(world_size))
    own, _ = c10d._new_process_group_helper(
        world_size,
        dist.get_rank(),
        ranks,
        "pycomm",
        c10d._world.pg_map[world][1],
        "elastic",
        backend_options=pycomm.Reconfigurable(**plan.options),
        timeout=timedelta(seconds=60),
    )
    c10d._world.pg_group_ranks[own] = dict(enumerate(ranks))
    handles: list[Any] = [None] * world_size
    dist.all_gather_object(handles, pycomm.reconfigure_handle(own))
    pycomm.reconfigure(1, handles, group=own)
    steps = loader.native.step_agreement(
        native_backend(own),
        own,
        plan.min_ranks,
        accept_split_brain=False,
        quorum_wait_ms=round(plan.quorum_wait_s * 1000),
    )
    return own, steps


def trains(rank: int, world_size: int, plan: Plan) -> dict[str, Any]:
    """Each step: who is in its sum, and when it returned; and how it ended."""
    own, steps = open_steps(world_size, plan)
    members: list[list[int]] = []
    ended_s: list[float] = []
    redone = 0
    error: BaseException | None = None
    continued = CaughtSignal(signal.SIGCONT)
    if rank == plan.struck[0]:
        loader.load().arm_fault_points(plan.struck[1])
    mark("trains")
    try:
        for step in range(plan.steps):
            if plan.late[:2] == (rank, step):
                mark("late")
                time.sleep(plan.late[2])
            if (rank, step) in plan.held:
                continued.wait()
            time.sleep(plan.between_s)
            steps.begin()
            while True:
                raised: BaseException | None = None
                sums = [bucket(rank, step, i, n) for i, n in enumerate(plan.numels)]
                try:
                    works = [dist.all_reduce(each, group=own, async_op=True) for each in sums]
                    for work in works:
                        work.wait()
                except Exception as caught:
                    raised = caught
                if not steps.end(raised):
                    break
                redone += 1
            ended_s.append(time.monotonic())
            found = {tuple(check(each, step, i)) for i, each in enumerate(sums)}
            assert len(found) == 1, found
            members.append(list(found.pop()))
            mark(f"step {step}")
    except Exception as caught:
        error = caught
    size = own.size()
    left = steps.members()
    strikes = [each[2] for each in loader.load().fault_points()] if plan.struck[0] == rank else []
    began_s = time.monotonic()
    steps.close()
    return {
        "members": members,
        "ended_s": ended_s,
        "redone": redone,
        "size": size,
        "left": left,
        "closed_s": time.monotonic() - began_s,
        "error": None if error is None else describe_exception(error),
        "strikes": strikes,
    }
