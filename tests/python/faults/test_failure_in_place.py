"""A failure costs neither memory nor time that depends on the size of a tensor.

Ranks add up tensors of ``pycomm.empty`` in place, and one of them is killed, stopped or late. All
others have the error in time, and none of them takes memory.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import rings
import torch.distributed as dist
from memory_limit import join, memory_limit
from rank_child import describe_exception, mark
from ranks import RankError, Ranks, start_ranks
from signals import CaughtSignal
from time_bound import assert_within

import pycomm

GIB = 1 << 30
VICTIM = 1
AGREED_S = 0.05
"""A death is noticed within about a millisecond, and causes are merged for 5 ms."""
SILENCE_S = 4.2
"""What docs/errors.md promises for a rank that is stopped."""
LATE_S = 1.0
OWN_NBYTES = 32 << 20
"""What a rank may take for its error, and for the step that a stopped rank was in."""
ATTEMPTS = 5

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.ci,
    pytest.mark.alone,
    pytest.mark.time_bound,
]

sizes = pytest.mark.parametrize(
    ("size", "gib"),
    [
        (2, 1),
        (3, 1),
        rings.nightly((2, 2)),
        rings.nightly((2, 8)),
    ],
)


def nbytes_in(path: str, name: str) -> int:
    (line,) = [line for line in Path(path).read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def peak_nbytes(again: bool = False) -> int:
    """The most memory that this process has had since the last call with ``again``."""
    if again:
        Path("/proc/self/clear_refs").write_text("5")
    return nbytes_in("/proc/self/status", "VmHWM")


def reduce_until_it_fails(
    rank: int, world_size: int, gib: int, late: bool = False, limit: Path | None = None
) -> tuple[RankError, int, float]:
    """The error, how much memory the operation that failed took meanwhile, and how long it was."""
    go_on = CaughtSignal(signal.SIGTERM)
    if limit is not None:
        join(limit)
    tensor = pycomm.empty(max(1, gib * GIB // 4))
    options = dist.AllreduceOptions()
    options.asyncOp = False
    if late:  # of the operation alone: a group's is also that of making it
        options.timeout = timedelta(seconds=LATE_S)
    dist.barrier()
    for step in itertools.count(int(late)):
        if step == 1:
            mark("in the middle")
            if late and rank == VICTIM:
                go_on.wait()
        before, began_s = peak_nbytes(again=True), time.monotonic()
        try:
            dist.group.WORLD.allreduce([tensor], options).wait()  # type: ignore[union-attr]
        except pycomm.errors.PycommError as error:
            said, grown = describe_exception(error), peak_nbytes() - before
            break
    if rank != VICTIM:
        tensor.fill_(-1.0)
        mark("failed")
        go_on.wait()  # and the victim with it
        assert (float(tensor.min()), float(tensor.max())) == (-1.0, -1.0), "somebody wrote into it"
    return said, grown, said.monotonic_s - began_s


def needs(nbytes: int) -> None:
    free = nbytes_in("/proc/meminfo", "MemAvailable")
    if free < nbytes:
        pytest.skip(f"needs {nbytes >> 20} MiB of free memory, and {free >> 20} are")


def others(running: Ranks) -> list[int]:
    return [rank for rank in range(len(running.processes)) if rank != VICTIM]


def all_in_the_middle(running: Ranks) -> None:
    for rank in range(len(running.processes)):
        running.wait_for_mark(rank, "in the middle")


def wait_for_failures(running: Ranks) -> None:
    for rank in others(running):
        running.wait_for_mark(rank, "failed")


def check(running: Ranks, code: str) -> tuple[float, float]:
    """Of the ranks that were left: when the last knew, and the longest that its sum took."""
    for rank in others(running):
        running.kill(rank, signal.SIGTERM)
    results = running.collect(60)
    known_s = longest_s = 0.0
    for rank in others(running):
        assert results[rank].value is not None, results[rank].describe()
        error, grown, took_s = results[rank].value
        assert (error.code, error.record["peer"]) == (code, VICTIM), error.text
        assert grown < OWN_NBYTES, f"the error took {grown >> 20} MiB"
        known_s, longest_s = max(known_s, error.monotonic_s), max(longest_s, took_s)
    return known_s, longest_s


def running_elsewhere() -> float:
    """How many threads of other programs have or want a core, while no rank runs."""
    looks = []
    for _ in range(20):
        time.sleep(0.01)
        lines = Path("/proc/stat").read_text().splitlines()
        (line,) = [each for each in lines if each.startswith("procs_running ")]
        looks.append(int(line.split()[1]) - 1)  # without this one
    return statistics.mean(looks)


def assert_typically_within(attempt: Callable[[], float], limit_s: float) -> None:
    """Of the median. It is not judged if other programs have all cores, as they make it late."""
    elsewhere, took_s = zip(
        *((running_elsewhere(), attempt()) for _ in range(ATTEMPTS)), strict=True
    )
    middle_s, cores = statistics.median(took_s), len(os.sched_getaffinity(0))
    if middle_s >= limit_s and statistics.median(elsewhere) >= cores:
        pytest.skip(f"{middle_s:.3f} s, but threads of other programs take all {cores} cores")
    assert_within(middle_s, limit_s)


def seconds_until_known(size: int, gib: int) -> float:
    with start_ranks(size, reduce_until_it_fails, args=(gib,), destroy=False) as running:
        all_in_the_middle(running)
        killed_s = running.kill(VICTIM)
        wait_for_failures(running)
        known_s, _ = check(running, "PEER_DEAD")
    return known_s - killed_s


@sizes
def test_a_rank_is_killed(size: int, gib: int) -> None:
    needs(size * gib * GIB + GIB)
    assert_typically_within(lambda: seconds_until_known(size, gib), AGREED_S)


@sizes
def test_a_rank_is_stopped_and_goes_on(size: int, gib: int) -> None:
    needs(size * gib * GIB + GIB)
    with start_ranks(size, reduce_until_it_fails, args=(gib,), destroy=False) as running:
        all_in_the_middle(running)
        stopped_s = running.kill(VICTIM, signal.SIGSTOP)
        wait_for_failures(running)
        running.kill(VICTIM, signal.SIGCONT)
        running.processes[VICTIM].wait(60)
        known_s, _ = check(running, "PEER_UNRESPONSIVE")
    assert_within(known_s - stopped_s, SILENCE_S)


def seconds_until_late(size: int, gib: int) -> float:
    with start_ranks(size, reduce_until_it_fails, args=(gib, True), destroy=False) as running:
        all_in_the_middle(running)
        wait_for_failures(running)
        running.kill(VICTIM, signal.SIGTERM)
        running.processes[VICTIM].wait(60)
        _, took_s = check(running, "TIMEOUT")
    assert took_s > LATE_S - 0.1
    return took_s


@sizes
def test_a_rank_is_late(size: int, gib: int) -> None:
    """Beside one element: machines differ in how soon they report any deadline."""
    needs(size * gib * GIB + GIB)
    small_s = statistics.median(seconds_until_late(size, 0) for _ in range(ATTEMPTS))
    assert_typically_within(lambda: seconds_until_late(size, gib), small_s + AGREED_S)


def test_no_rank_dies_where_there_is_no_room_for_a_copy() -> None:
    """The two tensors and a fifth more: as a container with a limit that fits its program."""
    needs(3 * GIB)
    with memory_limit(12 * 2 * GIB // 10) as limit:
        if limit is None:
            pytest.skip("no control group with a memory limit can be made here")
        args = (1, False, limit)
        with start_ranks(2, reduce_until_it_fails, args=args, destroy=False) as running:
            all_in_the_middle(running)
            stopped_s = running.kill(VICTIM, signal.SIGSTOP)
            wait_for_failures(running)
            running.kill(VICTIM, signal.SIGCONT)
            running.processes[VICTIM].wait(60)
            known_s, _ = check(running, "PEER_UNRESPONSIVE")
    assert_within(known_s - stopped_s, SILENCE_S)
