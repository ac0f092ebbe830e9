"""Rounds of operations that go every way in turn, and what a process holds while they go on."""

from __future__ import annotations

import ctypes
import gc
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
from idle import check_idle_together

LOOKS = 20
_LARGE_EACH = 50


def one_round(rank: int, world_size: int, dice: random.Random, number: int) -> None:
    """Some operations over shared memory and links, messages too, as all ranks draw them."""
    numel = (1 << 17) if number % _LARGE_EACH == 0 else dice.choice([1, 100, 2500])
    one = torch.ones(numel)
    each = torch.ones(world_size * 4)
    root, tag = dice.randrange(world_size), dice.randrange(4)
    works = [dist.all_reduce(one, async_op=True)]
    for kind in dice.sample(range(6), 3):
        if kind == 0:
            works.append(dist.all_to_all_single(torch.empty_like(each), each, async_op=True))
        elif kind == 1:
            works.append(dist.reduce(one.clone(), dst=root, async_op=True))
        elif kind == 2:
            works.append(dist.broadcast(one.clone(), src=root, async_op=True))
        elif kind == 3:
            parts = [torch.empty(4) for _ in range(world_size)] if rank == root else None
            works.append(dist.gather(torch.ones(4), parts, dst=root, async_op=True))
        elif kind == 4:
            works.append(dist.isend(each, (rank + 1) % world_size, tag=tag))
            works.append(dist.irecv(torch.empty_like(each), (rank - 1) % world_size, tag=tag))
        else:
            parts = [torch.empty(4) for _ in range(world_size)]
            works.append(dist.all_gather(parts, torch.ones(4), async_op=True))
    dice.shuffle(works)
    for work in works:
        assert work is not None
        work.wait()


class _Malloc(ctypes.Structure):
    """What mallinfo2() returns, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _malloc_nbytes() -> int:
    """What malloc counts; 0 in a C library without mallinfo2(), as glibc before 2.33."""
    look = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if look is None:
        return 0
    look.restype = _Malloc
    found = look()
    return int(found.uordblks + found.hblkhd)


def held_now() -> dict[str, int]:
    """What this process holds: descriptors, threads, memory."""
    gc.collect()
    resident = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
    )
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss_kb": int(resident.split()[1]),
        "malloc_nbytes": _malloc_nbytes(),
    }


def mixed_rounds(rank: int, world_size: int, rounds: int) -> list[dict[str, int]]:
    """Runs the rounds; looks twenty times at what process and group hold."""
    torch.set_num_threads(1)
    dice = random.Random(rounds)
    looks = []
    for number in range(1, rounds + 1):
        one_round(rank, world_size, dice, number)
        if number % max(1, rounds // LOOKS) == 0:
            check_idle_together(f"round {number}")
            looks.append(held_now())
    return looks
