"""One collective, timed and checked on all ranks of a group."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

_MAX_OPERATIONS = 5000
_TRIAL = 3

COLLECTIVES: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "reduce": lambda ranks: 1.0,
}
"""busbw / algbw by the number of ranks, in the order of the help text."""


@dataclass(frozen=True)
class Timing:
    """One row of the output."""

    seconds: float
    """Of one operation, from call to return on the slowest rank; the median."""
    cpu_seconds: float
    """Of one operation, all ranks and threads together."""
    wrong: int
    """Elements that differ from the exact result, on all ranks."""


class Case:
    """One collective over buffers; `nbytes` is of the whole tensor, all parts together."""

    def __init__(self, collective: str, nbytes: int, dtype: torch.dtype) -> None:
        ranks = dist.get_world_size()
        self.collective = collective
        self.dtype = dtype
        self.bus_factor = COLLECTIVES[collective](ranks)
        self._has_parts = collective in ("all_gather", "reduce_scatter")
        numel = max(1, nbytes // dtype.itemsize)
        self.numel = -(-numel // ranks) * ranks if self._has_parts else numel
        self.nbytes = self.numel * dtype.itemsize
        self._whole = torch.zeros(self.numel, dtype=dtype)
        self._part = torch.zeros(self.numel // ranks, dtype=dtype) if self._has_parts else None

    def run(self) -> None:
        """Does the operation once, to completion; on zeros it leaves zeros."""
        if self._part is not None and self.collective == "all_gather":
            dist.all_gather_into_tensor(self._whole, self._part)
        elif self._part is not None:
            dist.reduce_scatter_tensor(self._part, self._whole)
        elif self.collective == "all_reduce":
            dist.all_reduce(self._whole)
        elif self.collective == "broadcast":
            dist.broadcast(self._whole, 0)
        else:
            dist.reduce(self._whole, 0)

    def wrong(self) -> int:
        """Runs it on small whole numbers, which add up exactly, and counts wrong elements here."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        source = self._part if self.collective == "all_gather" else self._whole
        assert source is not None
        source.fill_(rank + 1)
        self.run()
        total = ranks * (ranks + 1) // 2
        if self.collective == "all_gather":
            per_rank = self._whole.view(ranks, -1)
            wrong = sum(int((part != peer + 1).sum()) for peer, part in enumerate(per_rank))
        elif self.collective == "reduce" and rank != 0:
            wrong = 0
        else:
            result = self._part if self._part is not None else self._whole
            wrong = int((result != (1 if self.collective == "broadcast" else total)).sum())
        self._whole.zero_()
        if self._part is not None:
            self._part.zero_()
        return wrong


def measure(case: Case, seconds: float) -> Timing:
    """Times a case for about so long; all ranks of the default group call it together.

    Args:
        case: What to run.
        seconds: The time that the timed operations shall take together.
    """
    wrong = _of_all(float(case.wrong()), dist.ReduceOp.SUM)
    trial = _of_all(_median(_times(case, _TRIAL)), dist.ReduceOp.MAX)
    count = max(2, min(_MAX_OPERATIONS, int(seconds / max(trial, 1e-7))))
    _times(case, max(1, count // 10))
    dist.barrier()
    cpu = _cpu_seconds()
    times = torch.tensor(_times(case, count), dtype=torch.float64)
    cpu = _cpu_seconds() - cpu
    dist.all_reduce(times, op=dist.ReduceOp.MAX)  # an operation has ended when it has everywhere
    return Timing(
        seconds=float(times.median()),
        cpu_seconds=_of_all(cpu, dist.ReduceOp.SUM) / count,
        wrong=int(wrong),
    )


def _times(case: Case, count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        case.run()
        times.append(time.perf_counter() - begin)
    return times


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _of_all(number: float, op: dist.ReduceOp.RedOpType) -> float:
    tensor = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(tensor, op=op)
    return float(tensor)
