"""The one harness behind every table: backends take turns, in the same processes, in one run.

All backends live side by side as process groups over the same ranks. For each size every backend
runs a block of operations in turn, A B, B A, A B and so on, so that whatever else the machine does
falls on both. Blocks begin at a barrier in the key/value store, which belongs to none of them.

    one block:  fresh checked inputs | barrier | warm-up | timed operations | checked operations
                                                         '- CPU time too -'  back to back, compared

A table is a script that passes one or more Workloads to main(); allreduce.py is one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import openmpi
import torch
import torch.distributed as dist
from launching import RankFailedError, die_with_parent, run_ranks
from options import make_parser
from report import Floats, Report, Row, header, paired_ratio
from world import World

_MAX_BLOCK_LENGTH = 5000
# Modules beside this one, which import it: World does not open these.
_BESIDE = {"raw": "raw", "deepspeed": "deepspeed_shm", "torch_floor": "torch_floor"}
_DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8"]


@dataclass(frozen=True)
class Place:
    """Where a case runs: which rank, over which group, with what operands."""

    backend: str
    group: dist.ProcessGroup
    rank: int
    ranks: int
    nbytes: int
    dtype: torch.dtype
    redop: str

    @property
    def variant(self) -> str:
        """What follows the colon in a backend's name, "" where nothing does."""
        return self.backend.partition("#")[0].partition(":")[2]

    @property
    def empty(self) -> Callable[..., torch.Tensor]:
        """Makes this backend's tensors: those of ``pycomm:arena`` are reached in place."""
        if self.variant == "arena":
            made: Callable[..., torch.Tensor] = importlib.import_module("pycomm").empty
            return made
        return torch.empty

    @property
    def reduce_op(self) -> dist.ReduceOp:
        names = {"prod": "PRODUCT"}
        op: dist.ReduceOp = getattr(dist.ReduceOp, names.get(self.redop, self.redop.upper()))
        return op


class Case(Protocol):
    """One rank's part in one operation, on one backend, at one size."""

    numel: int
    nbytes: int

    def run(self) -> None:
        """Do the operation that is timed, to completion."""

    def arm(self, seed: int) -> None:
        """Make fresh inputs for the checked operations."""

    def burst(self) -> None:
        """Do the checked operations, one after the other without a pause."""

    def wrong(self) -> tuple[int, int]:
        """Return how many elements of the results are wrong, and how many were compared."""


class Workload(Protocol):
    """What a table measures."""

    name: str

    def bus_factor(self, ranks: int) -> float | None:
        """Return busbw / algbw, None where bytes on the bus mean nothing."""

    def prepare(self, place: Place) -> Case: ...


@dataclass
class _Tally:
    """What one backend did at one size, as rank 0 sees it."""

    times: list[Floats] = field(default_factory=list)
    cpu_s: float = 0.0
    wrong: int = 0
    checked: int = 0

    def add(self, times: Floats, cpu_s: float, wrong: float, checked: float) -> None:
        self.times.append(times)
        self.cpu_s += float(cpu_s)
        self.wrong += int(wrong)
        self.checked += int(checked)

    def block_medians(self) -> list[float]:
        return [float(np.median(times)) for times in self.times]


def _time_ops(case: Case, count: int) -> Floats:
    times = np.empty(count)
    clock = time.perf_counter
    for index in range(count):
        begin = clock()
        case.run()
        times[index] = clock() - begin
    return times


def _block_length(world: World, case: Case | openmpi.MpiCase, seconds: float) -> int:
    """Choose, on rank 0, how many operations fill a block's share of the time budget."""
    if isinstance(case, openmpi.MpiCase):
        length = 0
        if world.rank == 0:
            each = float(np.median(case.block(10, 0)[1]))
            length = max(1, min(_MAX_BLOCK_LENGTH, int(seconds / each)))
        return world.agree(length)
    case.run()
    guess = 3
    for _ in range(2):
        each = float(np.median(_time_ops(case, guess)))
        length = world.agree(max(1, min(_MAX_BLOCK_LENGTH, int(seconds / each))))
        guess = min(length, 50)
    return length


def _run_block(
    world: World, case: Case | openmpi.MpiCase, length: int, seed: int, tally: _Tally
) -> None:
    if isinstance(case, openmpi.MpiCase):
        if world.rank == 0:
            sums, times = case.block(length, seed)
            tally.add(times, *sums)
        world.barrier()
        return
    case.arm(seed)
    world.barrier()
    for _ in range(max(1, length // 10)):
        case.run()
    cpu_s = time.process_time()
    times = _time_ops(case, length)
    cpu_s = time.process_time() - cpu_s
    case.burst()
    wrong, checked = case.wrong()
    parts = world.gather(np.concatenate([[cpu_s, wrong, checked], times]))
    if parts:
        stacked = np.stack(parts)
        # An operation has ended when it has ended on every rank.
        tally.add(stacked[:, 3:].max(axis=0), *stacked[:, :3].sum(axis=0))


def _measure(
    world: World, workload: Workload, nbytes: int, options: argparse.Namespace
) -> list[Row | str]:
    """Measure all backends at one size.

    Returns:
        On rank 0 the rows, and a remark for each backend that cannot do it. Elsewhere nothing.
    """
    dtype = getattr(torch, options.dtype)
    cases: dict[str, Case | openmpi.MpiCase] = {}
    lengths: dict[str, int] = {}
    remarks: list[Row | str] = []
    for backend in options.backends:
        case: Case | openmpi.MpiCase
        if backend in _BESIDE:
            rival = importlib.import_module(_BESIDE[backend])
            group = next(iter(world.groups.values()))
            place = Place(backend, group, world.rank, world.ranks, nbytes, dtype, options.redop)
            case = rival.prepare(world, place, workload.name)
        elif backend in openmpi.NAMES:
            numel = next(iter(cases.values())).numel  # as many as the backend before it has
            case = openmpi.MpiCase(
                backend, workload.name, world.ranks, numel, dtype, options.redop, options.timeout
            )
        else:
            group = world.groups[backend]
            place = Place(backend, group, world.rank, world.ranks, nbytes, dtype, options.redop)
            case = workload.prepare(place)
        try:
            lengths[backend] = _block_length(world, case, options.seconds / options.blocks)
        except RuntimeError as error:
            if "does not support" not in str(error):
                raise
            remarks.append(f"{backend} has no {workload.name}")
            continue
        cases[backend] = case
    tallies = {backend: _Tally() for backend in cases}
    for block in range(options.blocks):
        turn = list(cases) if block % 2 == 0 else list(cases)[::-1]
        for backend in turn:
            seed = 1000 * block
            _run_block(world, cases[backend], lengths[backend], seed, tallies[backend])
    if world.rank != 0:
        return []
    return remarks + [
        _row(workload, world.ranks, cases[backend], backend, tallies, options) for backend in cases
    ]


def _row(
    workload: Workload,
    ranks: int,
    case: Case | openmpi.MpiCase,
    backend: str,
    tallies: dict[str, _Tally],
    options: argparse.Namespace,
) -> Row:
    tally, first = tallies[backend], next(iter(tallies))
    times = np.concatenate(tally.times)
    p50 = float(np.median(times))
    algbw = case.nbytes / p50 / 1e9
    factor = workload.bus_factor(ranks) if case.nbytes > 0 else None
    versus = None
    if backend != first:
        versus = paired_ratio(first, tallies[first].block_medians(), tally.block_medians())
    return Row(
        workload=workload.name,
        backend=backend,
        ranks=ranks,
        size_bytes=case.nbytes,
        count=case.numel,
        dtype=options.dtype,
        redop=options.redop,
        ops=len(times),
        p50_us=p50 * 1e6,
        p99_us=float(np.percentile(times, 99)) * 1e6,
        algbw_gbps=algbw,
        busbw_gbps=None if factor is None else algbw * factor,
        wrong=tally.wrong,
        checked=tally.checked,
        cpu_s_per_op=tally.cpu_s / len(times),
        cpu_s_per_gb=tally.cpu_s / len(times) / max(case.nbytes, 1) * 1e9,
        versus=versus,
    )


def _run_as_rank(
    workloads: Sequence[Workload],
    options: argparse.Namespace,
    on_row: Callable[[Row | str], None],
) -> None:
    world = World.join(launched=options.parent_pid is not None, timeout_s=options.timeout)
    world.open_groups([name for name in options.backends if name not in (*openmpi.NAMES, *_BESIDE)])
    for workload in workloads:
        for nbytes in options.sizes if getattr(workload, "sized", True) else options.sizes[:1]:
            for row in _measure(world, workload, nbytes, options):
                on_row(row)
    world.close()


def main(
    workloads: Workload | Sequence[Workload],
    argv: Sequence[str] | None = None,
    *,
    table: str | None = None,
    **defaults: str,
) -> int:
    """Run a table: as a rank where a launcher says so, else start the ranks and print the table.

    Args:
        workloads: What to measure, one after the other.
        argv: The command line's arguments.
        table: The table's name, that of a single workload by default.
        defaults: Of options, for make_parser().

    Returns:
        The exit status: 0, or 1 where a result was wrong or a rank failed.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    chosen = list(workloads) if isinstance(workloads, Sequence) else [workloads]
    table = chosen[0].name if table is None else table
    options = make_parser(table, [each.name for each in chosen], **defaults).parse_args(argv)
    only = getattr(options, "only", None)
    chosen = [each for each in chosen if only is None or each.name in only]
    if options.results_fd is not None or options.parent_pid is not None:
        die_with_parent(options.parent_pid)

        def send(row: Row | str) -> None:
            text = json.dumps(row) if isinstance(row, str) else row.to_json()
            os.write(options.results_fd, text.encode() + b"\n")

        _run_as_rank(chosen, options, send)
        return 0
    if "RANK" in os.environ:
        rank_zero = os.environ["RANK"] == "0"
        report = Report(header(table, argv)) if rank_zero else None
        _run_as_rank(chosen, options, report.add if report is not None else lambda row: None)
        return report.finish(options.out, options.json) if report is not None else 0

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    facts = header(table, argv)
    if any(name in options.backends for name in openmpi.NAMES):
        openmpi.build()
        facts["openmpi"] = openmpi.version()
    if "deepspeed" in options.backends:
        facts["deepspeed"] = importlib.import_module(_BESIDE["deepspeed"]).build()
    report = Report(facts)
    for ranks in options.ranks:
        try:
            run_ranks(ranks, argv, options.timeout, report.add_json)
        except RankFailedError as error:
            print(f"benchmark over {ranks} ranks failed: {error}", file=sys.stderr)
            return 1
    return report.finish(options.out, options.json)
