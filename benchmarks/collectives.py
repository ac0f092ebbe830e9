"""Time every collective over several backends: `python benchmarks/collectives.py --help`.

Sizes are those of the larger buffer, as in nccl-tests: an all_gather of 1 MiB over 4 ranks sends
256 KiB from each. `--backends pycomm,gloo,openmpi` adds Open MPI over TCP (openmpi.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable

import harness
import numpy as np
import torch
import torch.distributed as dist
from collective import Collective, Segment
from exact import Pattern, pattern, reduced_pattern
from harness import Place
from whole_sum import AllReduce

_ROOT = 0
_GAP = 16


def _rolled(numbers: Pattern, start: int) -> Pattern:
    """The pattern as it goes on from element `start`."""
    return np.roll(numbers, -(start % len(numbers)))


class _InParts(Collective):
    """A collective whose larger buffer has an equal part a rank."""

    in_place = False
    gap = 0
    """Elements between two parts. Not 0 for lists: tensors of a list are seldom neighbours."""

    def stride(self, place: Place, numel: int) -> int:
        return numel // place.ranks + self.gap

    def pieces(self, place: Place, flat: torch.Tensor) -> list[torch.Tensor]:
        stride = len(flat) // place.ranks
        return [each[: stride - self.gap] for each in flat.split(stride)]

    def bus_factor(self, ranks: int) -> float:
        return (ranks - 1) / ranks

    def round_numel(self, place: Place, numel: int) -> int:
        return max(1, numel // place.ranks) * place.ranks


class Broadcast(Collective):
    name = "broadcast"

    def bus_factor(self, ranks: int) -> float:
        return 1.0

    def call(self, place: Place, output: torch.Tensor, source: torch.Tensor) -> None:
        dist.broadcast(output, _ROOT, group=place.group)

    def expect(self, place: Place, numel: int, seed: int) -> Iterable[Segment]:
        yield Segment(0, numel, pattern(_ROOT, seed, place.ranks, place.redop))


class Reduce(Collective):
    name = "reduce"

    def bus_factor(self, ranks: int) -> float:
        return 1.0

    def call(self, place: Place, output: torch.Tensor, source: torch.Tensor) -> None:
        dist.reduce(output, _ROOT, op=place.reduce_op, group=place.group)

    def expect(self, place: Place, numel: int, seed: int) -> Iterable[Segment]:
        if place.rank == _ROOT:
            yield Segment(0, numel, reduced_pattern(seed, place.ranks, place.redop))


class AllGather(_InParts):
    name = "all_gather_into_tensor"

    def shapes(self, place: Place, numel: int) -> tuple[int, int]:
        return numel // place.ranks, place.ranks * self.stride(place, numel)

    def call(self, place: Place, output: torch.Tensor, source: torch.Tensor) -> None:
        dist.all_gather_into_tensor(output, source, group=place.group)

    def expect(self, place: Place, numel: int, seed: int) -> Iterable[Segment]:
        part = numel // place.ranks
        for rank in range(place.ranks):
            numbers = pattern(rank, seed, place.ranks, place.redop)
            yield Segment(rank * self.stride(place, numel), part, numbers)


class AllGatherList(AllGather):
    name = "all_gather"
    gap = _GAP

    def bind(
        self, place: Place, output: torch.Tensor, source: torch.Tensor
    ) -> Callable[[], object]:
        parts = self.pieces(place, output)
        return lambda: dist.all_gather(parts, source, group=place.group)


class Gather(AllGatherList):
    name = "gather"

    def shapes(self, place: Place, numel: int) -> tuple[int, int]:
        source, output = super().shapes(place, numel)
        return source, output if place.rank == _ROOT else 0

    def bind(
        self, place: Place, output: torch.Tensor, source: torch.Tensor
    ) -> Callable[[], object]:
        parts = self.pieces(place, output) if place.rank == _ROOT else None
        return lambda: dist.gather(source, parts, _ROOT, group=place.group)

    def expect(self, place: Place, numel: int, seed: int) -> Iterable[Segment]:
        return super().expect(place, numel, seed) if place.rank == _ROOT else ()


class Scatter(_InParts):
    name = "scatter"
    gap = _GAP

    def shapes(self, place: Place, numel: int) -> tuple[int, int]:
        whole = place.ranks * self.stride(place, numel)
        return whole if place.rank == _ROOT else 0, numel // place.ranks

    def bind(
        self, place: Place, output: torch.Tensor, source: torch.Tensor
    ) -> Callable[[], object]:
        parts = self.pieces(place, source) if place.rank == _ROOT else None
        return lambda: dist.scatter(output, parts, _ROOT, group=place.group)

    def expect(self, place: Place, numel: int, seed: int) -> Iterable[Segment]:
        part = numel // place.ranks
        numbers = pattern(_ROOT, seed, place.ranks, place.redop)
        yield Segment(0, part, _rolled(numbers, place.rank * self.stride(place, numel)))


class ReduceScatter(_InParts):
    name = "reduce_scatter_tensor"

    def shapes(self, place: Place, numel: int) -> tuple[int, int]:
        return place.ranks * self.stride(place, numel), numel // place.ranks

    def call(self, place: Place, output: torch.Tensor, source: torch.Tensor) -> None:
        dist.reduce_scatter_tensor(output, source, op=place.reduce_op, group=place.group)

    def expect(self, place: Place, numel: int, seed: int) -> Iterable[Segment]:
        part = numel // place.ranks
        numbers = reduced_pattern(seed, place.ranks, place.redop)
        yield Segment(0, part, _rolled(numbers, place.rank * self.stride(place, numel)))


class ReduceScatterList(ReduceScatter):
    name = "reduce_scatter"
    gap = _GAP

    def bind(
        self, place: Place, output: torch.Tensor, source: torch.Tensor
    ) -> Callable[[], object]:
        parts = self.pieces(place, source)
        return lambda: dist.reduce_scatter(output, parts, op=place.reduce_op, group=place.group)


class AllToAll(_InParts):
    name = "all_to_all_single"

    def shapes(self, place: Place, numel: int) -> tuple[int, int]:
        whole = place.ranks * self.stride(place, numel)
        return whole, whole

    def call(self, place: Place, output: torch.Tensor, source: torch.Tensor) -> None:
        dist.all_to_all_single(output, source, group=place.group)

    def expect(self, place: Place, numel: int, seed: int) -> Iterable[Segment]:
        part, stride = numel // place.ranks, self.stride(place, numel)
        for rank in range(place.ranks):
            numbers = pattern(rank, seed, place.ranks, place.redop)
            yield Segment(rank * stride, part, _rolled(numbers, place.rank * stride))


class AllToAllList(AllToAll):
    name = "all_to_all"
    gap = _GAP

    def bind(
        self, place: Place, output: torch.Tensor, source: torch.Tensor
    ) -> Callable[[], object]:
        sources, outputs = self.pieces(place, source), self.pieces(place, output)
        return lambda: dist.all_to_all(outputs, sources, group=place.group)


class SendRecv(Collective):
    """There and back between ranks 0 and 1, 2 and 3, …: `time` is that of both ways."""

    name = "send_recv"
    in_place = False

    def bus_factor(self, ranks: int) -> float:
        return 2.0

    def call(self, place: Place, output: torch.Tensor, source: torch.Tensor) -> None:
        peer = place.rank ^ 1
        if peer >= place.ranks:
            return
        if place.rank < peer:
            dist.send(source, peer, group=place.group)
            dist.recv(output, peer, group=place.group)
        else:
            dist.recv(output, peer, group=place.group)
            dist.send(source, peer, group=place.group)

    def expect(self, place: Place, numel: int, seed: int) -> Iterable[Segment]:
        peer = place.rank ^ 1
        if peer < place.ranks:
            yield Segment(0, numel, pattern(peer, seed, place.ranks, place.redop))


class Barrier:
    """Checked by time: nobody may leave before the last has come. One host has one clock."""

    name = "barrier"
    sized = False

    def bus_factor(self, ranks: int) -> None:
        return None

    def prepare(self, place: Place) -> BarrierCase:
        return BarrierCase(place)


class BarrierCase:
    """One rank's barriers over one backend."""

    numel = 0
    nbytes = 0
    _ROUNDS = 4

    def __init__(self, place: Place) -> None:
        self.place = place
        self.times = torch.zeros(2, self._ROUNDS, dtype=torch.int64)

    def run(self) -> None:
        dist.barrier(group=self.place.group)

    def arm(self, seed: int) -> None:
        self.times.zero_()

    def burst(self) -> None:
        for index in range(self._ROUNDS):
            if self.place.rank == index % self.place.ranks:
                time.sleep(0.002)
            self.times[0, index] = time.monotonic_ns()
            dist.barrier(group=self.place.group)
            self.times[1, index] = time.monotonic_ns()

    def wrong(self) -> tuple[int, int]:
        entered, left = self.times[0].clone(), self.times[1]
        if os.environ.get("LOCAL_WORLD_SIZE") == str(self.place.ranks):
            dist.all_reduce(entered, op=dist.ReduceOp.MAX, group=self.place.group)
        return int((left < entered).sum()), self._ROUNDS


WORKLOADS: list[harness.Workload] = [
    Broadcast(),
    AllReduce(),
    Reduce(),
    AllGather(),
    AllGatherList(),
    Gather(),
    Scatter(),
    ReduceScatter(),
    ReduceScatterList(),
    AllToAll(),
    AllToAllList(),
    SendRecv(),
    Barrier(),
]

if __name__ == "__main__":
    sys.exit(harness.main(WORKLOADS, table="collectives", sizes="4K,1M,25M"))
