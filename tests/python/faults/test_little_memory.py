"""Two ranks at a memory limit need little more room for shared memory than they take."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from memory_limit import join, memory_limit, room_in
from ranks import run_ranks

import pycomm

pytestmark = [pytest.mark.needs_native, pytest.mark.faults, pytest.mark.ci, pytest.mark.alone]

MIB = 1 << 20
LIMIT_NBYTES = 256 * MIB
LEFT_NBYTES = 20 * MIB
"""Less than a reserve for 64 ranks, 32 MiB; two ranks' stages and reserves are 5."""


def reduce_with_little_room(rank: int, world_size: int, limit: Path, store: str) -> Any:
    join(limit)
    tensor = torch.full((1 << 20,), float(rank + 1))
    ballast = []
    meeting = dist.FileStore(f"{store}-full", world_size)  # type: ignore[attr-defined]
    if rank == 0:
        meeting.get("joined")
        while room_in(limit) > LEFT_NBYTES:
            ballast.append(bytearray(b"x") * MIB)
        meeting.set("full", "")
    else:
        meeting.set("joined", "")
        meeting.get("full")
    dist.init_process_group(
        "pycomm",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
        pg_options=pycomm.Options(transport="shm"),
    )
    dist.all_reduce(tensor)  # so large that it goes through the stages
    filled = len(ballast)
    ballast.clear()
    dist.barrier()
    return float(tensor[0]), float(tensor[-1]), filled


def test_a_group_and_its_first_large_operation(tmp_path: Path) -> None:
    with memory_limit(LIMIT_NBYTES) as limit:
        if limit is None:
            pytest.skip("no control group with a memory limit can be made here")
        args = (limit, f"{tmp_path}/store")
        # Fresh, as a forked process copies its parent's pages at its end, and needs room for them.
        results = run_ranks(
            2, reduce_with_little_room, args=args, init="none", backend=None, fresh=True
        )
    (first, last, filled), (again, _, _) = results.values()
    assert (first, last, again) == (3.0, 3.0, 3.0)
    assert filled * MIB > LIMIT_NBYTES - 5 * LEFT_NBYTES, "the limit was not reached"
