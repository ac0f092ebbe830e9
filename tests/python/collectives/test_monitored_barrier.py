"""pycomm.monitored_barrier: who is missing, where, and that the group survives it."""

from __future__ import annotations

import math
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from ranks import describe_exception, mark, run_ranks, start_ranks
from time_bound import assert_within

pytestmark = pytest.mark.needs_native

SHORT = timedelta(seconds=2)
LONG = timedelta(seconds=60)


def all_come(rank: int, size: int) -> None:
    import pycomm

    group = dist.new_group(list(range(size)))
    for _ in range(3):
        pycomm.monitored_barrier()
        pycomm.monitored_barrier(group, timeout=LONG, wait_all_ranks=True)
        tensor = torch.ones(5)
        dist.all_reduce(tensor)
        assert tensor.eq(size).all()
    for seconds in (60, 45.5):
        pycomm.monitored_barrier(timeout=seconds)
    for wrong in (timedelta(0), timedelta(seconds=-1), 0, -2.5, True, math.nan, math.inf, "60"):
        with pytest.raises(ValueError, match=r"timeout=.* is not allowed: use seconds above 0"):
            pycomm.monitored_barrier(timeout=wrong)  # type: ignore[arg-type]
    pycomm.monitored_barrier(timeout=LONG)  # a refused call does not count as one


def some_stay_away(rank: int, size: int, absent: list[int]) -> dict[str, Any] | None:
    import pycomm

    caught: dict[str, Any] | None = None
    dist.barrier()  # a rank that is slow to start is not absent
    if rank not in absent:
        try:
            pycomm.monitored_barrier(timeout=SHORT.total_seconds())
        except pycomm.errors.CollectiveTimeoutError as error:
            caught = {"text": str(error), **error.record}
    # The group has not failed: late ranks learn of it, and all can go on.
    dist.barrier()
    if rank in absent:
        with pytest.raises(pycomm.errors.CollectiveTimeoutError, match=f"rank {rank}: it came too"):
            pycomm.monitored_barrier(timeout=SHORT)
    pycomm.monitored_barrier(timeout=LONG)
    return caught


@pytest.mark.parametrize("world_size", rings.first_of([3, 2]))
def test_all_come(world_size: int) -> None:
    run_ranks(world_size, all_come)


@pytest.mark.parametrize("absent", rings.first_of([[2, 3], [1]]))
@pytest.mark.ci
def test_the_missing_are_named_on_all_ranks_that_waited(absent: list[int]) -> None:
    results = run_ranks(4, some_stay_away, args=(absent,)).values()
    for rank, record in enumerate(results):
        if rank in absent:
            assert record is None
            continue
        assert record is not None
        assert record["missing"] == absent
        assert (record["code"], record["op"]) == ("TIMEOUT", "monitored_barrier")
        for each in absent:
            assert f"{each} (on {socket.gethostname()})" in record["text"]


def rank_0_stays_away(rank: int, size: int) -> str:
    import pycomm

    text = ""
    if rank != 0:
        with pytest.raises(pycomm.errors.CollectiveTimeoutError) as caught:
            pycomm.monitored_barrier(timeout=SHORT)
        text = str(caught.value)
    dist.barrier()
    if rank == 0:
        with pytest.raises(pycomm.errors.CollectiveTimeoutError, match="it came too late"):
            pycomm.monitored_barrier(timeout=SHORT)
    return text


def test_rank_0_missing() -> None:
    texts = run_ranks(2, rank_0_stays_away).values()
    assert "rank 0" in texts[1]


def test_rank_0_and_another_are_named_on_all_ranks_that_waited() -> None:
    results = run_ranks(4, some_stay_away, args=([0, 2],)).values()
    assert [record and record["missing"] for record in results] == [None, [0, 2], None, [0, 2]]


def one_is_two_rounds_late(rank: int, size: int) -> None:
    import pycomm

    seen = []
    if rank == 1:
        dist.barrier()
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(pycomm.errors.CollectiveTimeoutError) as caught:
            pycomm.monitored_barrier(timeout=0.5 if rank == 0 else 5)
        missing = caught.value.record.missing
        seen.append((list(missing), time.monotonic() - began < 4))
    assert seen == [([1], True), ([1], True)]
    if rank == 0:
        dist.barrier()
    pycomm.monitored_barrier(timeout=LONG)
    dist.barrier()
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    run = pycomm._native.loader.native.group_run(pycomm._group.creation.native_backend())
    pycomm.monitored_barrier(timeout=LONG)
    dist.barrier()
    for number in (1, 2, 3):  # a complete round deletes what all earlier ones have left
        for key in ("came/0", "came/1", "verdict"):
            assert not store.check([f"pycomm/monitored_barrier/{run}/{number}/{key}"])


def test_a_rank_that_is_two_rounds_late_reads_both_verdicts() -> None:
    run_ranks(2, one_is_two_rounds_late)


def one_dies(rank: int, size: int) -> Any:
    import pycomm

    dist.barrier()
    mark("ready")
    if rank == 1:
        import signal

        signal.pause()
    with pytest.raises(pycomm.errors.PycommError) as caught:
        pycomm.monitored_barrier(timeout=LONG)
    return describe_exception(caught.value)


@pytest.mark.faults
@pytest.mark.time_bound
@pytest.mark.ci
def test_a_dead_rank_ends_it_at_once() -> None:
    with start_ranks(3, one_dies) as running:
        for rank in range(3):
            running.wait_for_mark(rank, "ready")
        killed_s = running.kill(1)
        results = running.collect(30)
    errors = [results[rank].value for rank in (0, 2) if results[rank].ok]
    assert len(errors) == 2, results.describe()
    for error in errors:
        assert (error.record["code"], error.record["peer"]) == ("PEER_DEAD", 1), error.text
        assert "monitored_barrier" in error.text
    for error in errors:
        assert_within(error.monotonic_s - killed_s, 5, error.text)
