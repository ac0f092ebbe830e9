"""torch's own floor: what an all_reduce costs when its backend does nothing.

    python benchmarks/allreduce.py --backends pycomm,torch_floor,gloo --ranks 2 --sizes 4,4K

The backend is torch's own "fake" one, in C++: its all_reduce makes a Work that has ended. So a row
has the time and the CPU of what torch does around any backend that it calls in this way:
dist.all_reduce() in Python, the bindings, the dispatcher, a Work and its wait().

Not in a row: bytes that move or are added, a rank that waits for another one, or what a Work needs
to end later. It is a lower bound for a backend behind torch.distributed, not for an all_reduce. It
does not depend on the size, and its algbw and busbw mean nothing. As in all rows the time is the
longest over the ranks, which here do not wait for each other: take no more ranks than cores. #wrong
counts elements that differ from what this rank put in.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable

import torch.distributed as dist
from collective import CollectiveCase, Segment
from exact import pattern
from harness import Place
from whole_sum import AllReduce, refuse_all_but_sums
from world import World

NAME = "torch_floor"


class Untouched(AllReduce):
    """An all_reduce that leaves each rank its own values."""

    def expect(self, place: Place, numel: int, seed: int) -> Iterable[Segment]:
        yield Segment(0, numel, pattern(place.rank, seed, place.ranks, place.redop))


def prepare(world: World, place: Place, workload: str) -> CollectiveCase:
    """This rank's part at one size."""
    refuse_all_but_sums(NAME, place, workload)
    if NAME not in world.groups:
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
        world.groups[NAME] = dist.new_group(backend="fake")
    return Untouched().prepare(dataclasses.replace(place, group=world.groups[NAME]))
