"""all_reduce as a workload, and what is asked of those that are measured beside process groups."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from collective import Collective, Segment
from exact import reduced_pattern
from harness import Place


class AllReduce(Collective):
    name = "all_reduce"

    def bus_factor(self, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks

    def call(self, place: Place, output: torch.Tensor, source: torch.Tensor) -> None:
        dist.all_reduce(output, op=place.reduce_op, group=place.group)

    def expect(self, place: Place, numel: int, seed: int) -> Iterable[Segment]:
        yield Segment(0, numel, reduced_pattern(seed, place.ranks, place.redop))


def refuse_all_but_sums(name: str, place: Place, workload: str) -> None:
    """Exit where something that only adds up fp32 is asked for anything else."""
    if workload != "all_reduce" or place.dtype != torch.float32 or place.redop != "sum":
        raise SystemExit(f"{name} is measured with all_reduce, float32 and sum only")
