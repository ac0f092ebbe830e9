"""Time all_reduce over several backends: `python benchmarks/allreduce.py --help`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import harness
import torch
import torch.distributed as dist
from collective import Collective, Segment
from exact import reduced_pattern


class AllReduce(Collective):
    name = "all_reduce"

    def bus_factor(self, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks

    def call(self, place: harness.Place, output: torch.Tensor, source: torch.Tensor) -> None:
        dist.all_reduce(output, op=place.reduce_op, group=place.group)

    def expect(self, place: harness.Place, numel: int, seed: int) -> Iterable[Segment]:
        yield Segment(0, numel, reduced_pattern(seed, place.ranks, place.redop))


if __name__ == "__main__":
    sys.exit(harness.main(AllReduce()))
