"""What docs/errors.md promises under "How fast", asserted at its value. `make nightly` runs it.

The bounds are the table's last column, on a machine that does nothing else: of the median for what
takes milliseconds, of the slowest for what takes seconds.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import fault_figures
import pytest
import torch
import torch.distributed as dist
from rank_child import describe_exception, mark
from ranks import RankResults, start_ranks
from time_bound import assert_within

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.nightly,
    pytest.mark.alone,
    pytest.mark.time_bound,
]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "errors.md"
KILLS = 30


def promised_s(what: str) -> float:
    """The last column of a row of the table, in seconds."""
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {what} |")]
    found = re.search(r"([\d.]+) (ms|s)\b", row.rsplit("|", 2)[1])
    assert found is not None, row
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


def reduce_until_it_fails(rank: int, world_size: int, megabytes: int) -> Any:
    ballast = torch.ones(megabytes * 250_000)
    error = fault_figures.reduce_until_it_fails(rank, world_size)
    assert float(ballast[:1].sum()) == min(megabytes, 1)
    return error


def send_until_it_fails(rank: int, world_size: int, megabytes: int) -> Any:
    return fault_figures.send_until_it_fails(rank, world_size)


def strike(
    victim: int, number: int, ranks_do: Any = reduce_until_it_fails, megabytes: int = 0
) -> tuple[float, RankResults]:
    """Signals one of three ranks in the middle; the moment, and what all did."""
    with start_ranks(3, ranks_do, args=(megabytes,)) as running:
        for rank in range(3):
            running.wait_for_mark(rank, "in the middle")
        struck_s = running.kill(victim, number)
        if number == signal.SIGSTOP:
            for rank in {0, 1, 2} - {victim}:
                running.processes[rank].wait(60)
            running.kill(victim, signal.SIGKILL)
        return struck_s, running.collect(60)


def exceptions(results: RankResults, victim: int, code: str, since_s: float) -> list[float]:
    """How long each of the others waited for its exception, which must name the victim."""
    took = []
    for result in results:
        if result.rank != victim:
            assert result.value is not None, results.describe()
            error = result.value
            assert (error.code, error.record["peer"]) == (code, victim), error.text
            took.append(error.monotonic_s - since_s)
    return took


@pytest.mark.parametrize(
    ("ranks_do", "megabytes"),
    [(reduce_until_it_fails, 0), (reduce_until_it_fails, 500), (send_until_it_fails, 0)],
    ids=["all_reduce", "0.5 GB resident", "messages"],
)
@pytest.mark.timeout(900)
def test_a_killed_process_with_another_rank_on_its_host(ranks_do: Any, megabytes: int) -> None:
    took = []
    for attempt in range(KILLS):
        struck_s, results = strike(attempt % 3, signal.SIGKILL, ranks_do, megabytes)
        took += exceptions(results, attempt % 3, "PEER_DEAD", struck_s)
    said = f"of {len(took)}: {figures(took)}"
    print(said)
    bound_s = promised_s("a process that is killed, with another rank on its host")
    assert_within(statistics.median(took), bound_s, said)


def test_a_stopped_process() -> None:
    took = []
    for victim in range(3):
        struck_s, results = strike(victim, signal.SIGSTOP)
        took += exceptions(results, victim, "PEER_UNRESPONSIVE", struck_s)
    print(figures(took))
    # A rank sends a heartbeat every sixth of that, so its last may be half a second old.
    assert min(took) > 2.4
    bound_s = promised_s("a rank that is stopped, a host or network that is gone")
    assert_within(max(took), bound_s, figures(took))


def differ(rank: int, world_size: int, nbytes: int) -> Any:
    """The ranks meet first, so that all enter the mismatch at once."""
    tensor = torch.ones(nbytes // 4 + (rank == 1))
    dist.all_reduce(torch.ones(4))
    dist.barrier()
    began_s = time.monotonic()
    try:
        dist.all_reduce(tensor)
    except Exception as error:
        return describe_exception(error), time.monotonic() - began_s
    return None


@pytest.mark.parametrize("nbytes", [64, 8 << 20])
def test_different_operations(nbytes: int) -> None:
    took = []
    for _ in range(KILLS):
        with start_ranks(3, differ, args=(nbytes,)) as running:
            results = running.collect(60)
        for result in results:
            assert result.value is not None, results.describe()
            error, seconds = result.value
            assert error.code == "COLLECTIVE_MISMATCH", error.text
            took.append(seconds)
    print(figures(took))
    assert_within(statistics.median(took), promised_s("different operations"), figures(took))


def come_late(rank: int, world_size: int) -> Any:
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=2))
    dist.barrier(group)
    if rank == 1:
        mark("late")
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        signal.sigtimedwait([signal.SIGTERM], 60)
        return None
    began_s = time.monotonic()
    try:
        dist.all_reduce(torch.ones(10), group=group)
    except Exception as error:
        mark("failed")
        return describe_exception(error), time.monotonic() - began_s
    return None


def test_a_late_rank() -> None:
    with start_ranks(3, come_late) as running:
        for rank in (0, 2):
            running.wait_for_mark(rank, "failed")
        running.kill(1, signal.SIGTERM)
        results = running.collect(60)
    took = []
    for rank in (0, 2):
        error, seconds = results[rank].value
        assert (error.code, error.record["peer"]) == ("TIMEOUT", 1), error.text
        took.append(seconds)
    print(figures(took))
    assert min(took) > 1.9
    assert_within(max(took), 2.0 + promised_s("a rank that is alive and late"), figures(took))


def figures(took: list[float]) -> str:
    """For the log."""
    took = sorted(took)
    parts: list[tuple[str, Callable[[list[float]], float]]] = [
        ("p50", statistics.median),
        ("p90", lambda values: values[int(0.9 * len(values))]),
        ("longest", max),
    ]
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return ", ".join(f"{name} {1e3 * of(took):.1f} ms" for name, of in parts) + f"; {load}"
