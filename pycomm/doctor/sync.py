"""Stage 3: all_reduce of the real engine between all ranks, with idle and with busy cores."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm import codecs
from pycomm.options import Options

WIRES = ("fp32", "fp16", "int8")
BUCKET_NUMEL = 25 * (1 << 20) // 4
"""float32 values of 25 MiB, as a bucket of DistributedDataParallel."""
_TRIAL_NUMEL = 1 << 18
_BUDGET_S = 0.7
_MAX_REPEATS = 8
_IN_FLIGHT = 2
_TIMEOUT = timedelta(seconds=60)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sync:
    """One measurement, on the slowest rank."""

    wire: str
    busy: bool
    seconds_per_parameter: float

    def of(self, parameters: float) -> float:
        """Seconds for one sync of so many parameters."""
        return self.seconds_per_parameter * parameters


def measure(store: Any, rank: int, size: int) -> list[Sync]:
    """Times the engine; all ranks call it together. Leaves no group behind.

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
        pg_options=Options(debug="WARN", preflight=False),
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
    share = ((hosts - 2) / (hosts - 1)) / ((hosts - 1) / hosts)
    return seconds * share * slowest / slowest_of_others


def _time(wire: str, *, busy: bool) -> Sync:
    _run(_TRIAL_NUMEL, wire, 1)
    expected = _run(_TRIAL_NUMEL, wire, 2) / 2 * BUCKET_NUMEL / _TRIAL_NUMEL
    numel = BUCKET_NUMEL
    if expected > 4 * _BUDGET_S:  # a slow network: less than a bucket is enough
        numel = max(_TRIAL_NUMEL, int(BUCKET_NUMEL * _BUDGET_S / expected))
    count = max(2, min(_MAX_REPEATS, int(_BUDGET_S / expected)))
    took = _run(numel, wire, count)
    return Sync(wire=wire, busy=busy, seconds_per_parameter=took / (count * numel))


def _run(numel: int, wire: str, count: int) -> float:
    """Seconds for ``count`` all_reduces, a few in flight, on the slowest rank."""
    tensors = [torch.rand(numel) for _ in range(min(count, _IN_FLIGHT))]
    pending: list[Any] = []
    dist.barrier()
    begin = time.perf_counter()
    for number in range(count):
        if len(pending) == _IN_FLIGHT:
            pending.pop(0).wait()
        tensor = tensors[number % _IN_FLIGHT]
        pending.append(codecs.all_reduce(tensor, wire, op=dist.ReduceOp.AVG, async_op=True))
    for work in pending:
        work.wait()
    took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


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
