"""Stage 3: syncs of the wrapper that trains, between all ranks, with idle and with busy cores."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm.ddp import DistributedDataParallel
from pycomm.doctor import splits
from pycomm.options import Options
from pycomm.report import Recorder

WIRES = ("fp32", "fp16", "int8")
_PART_NUMEL = 1 << 18
"""Values of one parameter, 1 MiB: buckets of several, as most models have."""
_MOST_PARTS = 32
_BUDGET_S = 0.7
_MAX_REPEATS = 5
_TIMEOUT = timedelta(seconds=60)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sync:
    """One measurement, on the slowest rank."""

    wire: str
    busy: bool
    seconds_per_parameter: float
    seconds_fixed: float = 0.0
    """Of any sync, however small the model is."""

    def of(self, parameters: float) -> float:
        """Seconds for one sync of so many parameters."""
        return self.seconds_fixed + self.seconds_per_parameter * parameters


def measure(store: Any, rank: int, size: int) -> list[Sync]:
    """Times the wrapper; all ranks call it together. Leaves no group behind.

    Args:
        store: An empty one.
        rank: Of this process.
        size: Number of ranks.

    Raises:
        PycommError: The group could not be made, or a rank failed.
    """
    dist.init_process_group(
        "pycomm",
        store=store,
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        # The screen shows what the lines of log would.
        pg_options=Options(debug="WARN", preflight=False, metrics_dir="off"),
    )
    try:
        syncs = [_time(wire, busy=False) for wire in WIRES]
        with _busy_cores():
            syncs += [_time(wire, busy=True) for wire in WIRES]
        return syncs
    finally:
        dist.destroy_process_group()


def without(seconds: float, hosts: int, slowest: float, slowest_of_others: float) -> float:
    """What a sync would take without one of the hosts, by the bytes of a ring: computed."""
    share = splits.ddp_nbytes(1, hosts - 1) / splits.ddp_nbytes(1, hosts)
    return seconds * share * slowest / slowest_of_others


class _Model(nn.Module):
    """Parameters whose gradients take no time to compute."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(_PART_NUMEL) for _ in range(parts))
        self._gradient = torch.randn(_PART_NUMEL)

    def forward(self) -> torch.Tensor:
        return torch.stack([weight.dot(self._gradient) for weight in self.weights]).sum()


def _time(wire: str, *, busy: bool) -> Sync:
    """Two sizes, so that what a small model pays does not count for each parameter."""
    small = _syncs(1, wire, 3)
    parts = max(2, min(_MOST_PARTS, int(_BUDGET_S / small)))
    large = _syncs(parts, wire, max(3, min(_MAX_REPEATS, int(2 * _BUDGET_S / (small * parts)))))
    per_part = max(large - small, 0.5 * large) / (parts - 1)
    return Sync(
        wire=wire,
        busy=busy,
        seconds_per_parameter=per_part / _PART_NUMEL,
        seconds_fixed=max(0.0, large - per_part * parts),
    )


def _syncs(parts: int, wire: str, count: int) -> float:
    """The median seconds of ``count`` syncs, each on the slowest rank."""
    model = DistributedDataParallel(_Model(parts), wire_dtype=wire)
    recorder = Recorder(model)

    def step() -> None:
        model.zero_grad()
        model().backward()

    for _ in range(2):  # after the first, buckets are cut anew
        step()
    found = []
    for _ in range(count):
        dist.barrier()
        took = torch.tensor([recorder.record(step).sync_s], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        found.append(float(took))
    return statistics.median(found)


@contextlib.contextmanager
def _busy_cores() -> Iterator[None]:
    """Multiplies matrices meanwhile, on as many threads as torch trains with."""
    stop = threading.Event()
    ready = threading.Event()

    def multiply() -> None:
        left, right = torch.rand(512, 512), torch.rand(512, 512)
        while not stop.is_set():
            torch.mm(left, right)
            ready.set()

    thread = threading.Thread(target=multiply, daemon=True)
    thread.start()
    ready.wait(10.0)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def find(syncs: Sequence[Sync], wire: str, *, busy: bool) -> Sync | None:
    """The measurement of this wire dtype."""
    return next((one for one in syncs if (one.wire, one.busy) == (wire, busy)), None)
