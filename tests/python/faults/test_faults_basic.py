"""Ranks that die, and ranks that leave with work under way: named errors, no abort, no hang."""

from __future__ import annotations

import signal
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from ranks import describe_exception, mark, run_ranks, start_ranks
from time_bound import assert_within

import pycomm

pytestmark = [pytest.mark.needs_native, pytest.mark.faults, pytest.mark.ci]

MIB = 1 << 20


def reduce_until_it_fails(rank: int, world_size: int, numel: int) -> dict[str, Any]:
    tensor = torch.ones(numel)
    work = tensor.clone()
    for step in range(100_000):
        if step == 2:
            mark("in the middle")
        try:
            work.copy_(tensor)
            dist.all_reduce(work)
        except Exception as error:
            return second_look(error)
    raise AssertionError("nobody was killed")


def second_look(error: Exception) -> dict[str, Any]:
    seen: dict[str, Any] = {"error": describe_exception(error), "record": pycomm.last_error()}
    seen["types"] = (
        isinstance(error, pycomm.errors.PeerDeadError),
        isinstance(error, dist.DistNetworkError),
    )
    started_s = time.monotonic()
    try:
        dist.all_reduce(torch.ones(3))
    except pycomm.errors.PycommError as again:
        seen["again"] = describe_exception(again)
    seen["again_s"] = time.monotonic() - started_s
    return seen


@pytest.mark.alone
@pytest.mark.time_bound
@pytest.mark.parametrize("victim", rings.first_of([1, 0, 2]))
def test_a_killed_rank_is_named_by_all_others_at_once(victim: int) -> None:
    with start_ranks(3, reduce_until_it_fails, args=(100 * MIB // 4,)) as running:
        for rank in range(3):
            running.wait_for_mark(rank, "in the middle")
        killed_s = running.kill(victim)
        results = running.collect(60)
    for result in results:
        if result.rank == victim:
            assert result.exit_code == -signal.SIGKILL
            continue
        assert result.exit_code == 0, results.describe()
        seen = result.value
        error = seen["error"]
        assert seen["types"] == (True, True), error.traceback
        assert error.record["peer"] == victim
        assert error.record["peer_host"] == socket.gethostname()
        assert error.record["op"] == "all_reduce"
        for text in (f"ank {victim} on {socket.gethostname()}", "code=PEER_DEAD", f"peer={victim}"):
            assert text in error.text
        assert "\n" not in error.text
        assert seen["record"]["code"] == "PEER_DEAD" and seen["record"]["peer"] == victim
        assert seen["again"].code == "PEER_DEAD", "the first error sticks"
    for result in results:
        if result.rank != victim:
            # A silent rank would be noticed after 3 s. `make nightly` asserts the milliseconds.
            assert_within(result.value["error"].monotonic_s - killed_s, 2.5, "from SIGKILL")
            assert_within(result.value["again_s"], 2.5, "the group's limit is a minute")


def reduce_until_silence(rank: int, world_size: int) -> Any:
    for step in range(1_000_000):
        if step == 2:
            mark("in the middle")
        try:
            dist.all_reduce(torch.ones(1000))
        except pycomm.errors.PycommError as error:
            mark("failed")
            return describe_exception(error)
    raise AssertionError("nobody was stopped")


@pytest.mark.time_bound
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_stopped_rank_is_named_after_the_silence_that_was_asked_for(transport: str) -> None:
    # More than by default: a rank that nobody stopped is named, too, if it loses its cores so long.
    options = {"heartbeat_timeout": 5, "transport": transport}
    with start_ranks(3, reduce_until_silence, pg_options=options) as running:
        for rank in range(3):
            running.wait_for_mark(rank, "in the middle")
        running.kill(1, signal.SIGSTOP)
        for rank in (0, 2):
            running.wait_for_mark(rank, "failed")
        running.kill(1)
        results = running.collect(60)
    for rank in (0, 2):
        error = results[rank].value
        assert (error.code, error.record["peer"]) == ("PEER_UNRESPONSIVE", 1), error.text
        silence = int(error.text.split("has been silent for ")[1].split(" ms")[0])
        assert silence >= 5000
        assert_within(silence / 1000, 6.5)


def raise_while_others_reduce(rank: int, world_size: int) -> None:
    dist.all_reduce(torch.ones(10))
    if rank == 1:
        mark("leaving")
        raise ValueError("this rank's own mistake")
    for _ in range(100):
        dist.all_reduce(torch.ones(MIB))


@pytest.mark.time_bound
def test_a_rank_that_ends_with_an_exception_releases_the_others() -> None:
    with start_ranks(3, raise_while_others_reduce) as running:
        running.wait_for_mark(1, "leaving")
        left_s = time.monotonic()
        results = running.collect(60)
    for result in results:
        assert result.error is not None and result.exit_code == 1, results.describe()
        if result.rank != 1:
            assert result.error.code in ("PEER_LEFT", "PEER_DEAD"), results.describe()
            assert result.error.record["peer"] == 1
    for result in results:
        assert result.error is not None
        assert_within(result.error.monotonic_s - left_s, 30, result.error.text)


def one_rank_is_late(rank: int, world_size: int) -> None:
    dist.all_reduce(torch.ones(10))
    if rank == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        mark("late")
        signal.sigtimedwait([signal.SIGTERM], 60)
    # Of the operation alone: a group's is also that of making it.
    options = dist.AllreduceOptions()
    options.asyncOp = False
    options.timeout = timedelta(seconds=1)
    try:
        dist.group.WORLD.allreduce([torch.ones(10)], options).wait()  # type: ignore[union-attr]
    except Exception:
        mark("failed")
        raise


def test_a_rank_that_is_late_is_named_at_the_deadline() -> None:
    with start_ranks(3, one_rank_is_late) as running:
        running.wait_for_mark(1, "late")
        for rank in (0, 2):
            running.wait_for_mark(rank, "failed")
        running.kill(1, signal.SIGTERM)
        results = running.collect(60)
    for result in results:
        assert result.error is not None and not result.timed_out, results.describe()
        if result.rank != 1:
            assert result.error.code == "TIMEOUT", results.describe()
            assert result.error.record["peer"] == 1
            assert "CollectiveTimeoutError" in result.error.classes


def interrupted(rank: int, world_size: int) -> float | None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    dist.all_reduce(torch.ones(10))
    try:
        mark("waiting")
        if rank == 0:
            dist.all_reduce(torch.ones(10))  # rank 1 never enters
        else:
            threading.Event().wait(60)
    except KeyboardInterrupt:
        caught_s = time.monotonic()
        mark("interrupted")
        dist.group.WORLD.abort()  # type: ignore[union-attr]  # what it waited in is still under way
        return caught_s
    return None


@pytest.mark.alone
@pytest.mark.time_bound
def test_ctrl_c_ends_a_wait() -> None:
    with start_ranks(2, interrupted, init_timeout_s=60) as running:
        for rank in range(2):
            running.wait_for_mark(rank, "waiting")
            running.wait_until_asleep(rank)
        sent_s = running.kill(0, signal.SIGINT)
        running.wait_for_mark(0, "interrupted")  # before rank 1 goes, whose leaving is an error
        running.kill(1, signal.SIGINT)
        results = running.collect(60).check()
    assert_within(results[0].value - sent_s, 5.0, results.describe())


def leave_with_work_outstanding(rank: int, world_size: int, how: str) -> None:
    tensors = [torch.ones(1 + 100_000 * index) for index in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if how == "futures":
        for work in works:
            work.get_future().then(lambda done: done.value()[0] * 2)
    elif how == "never entered" and rank == 0:
        dist.all_reduce(torch.ones(MIB), async_op=True)  # the others never do
    elif how == "dropped":
        del works, tensors
    mark("leaving")


@pytest.mark.time_bound
@pytest.mark.parametrize("how", rings.ends(["works", "futures", "never entered", "dropped"]))
@pytest.mark.ci
def test_exits_with_work_outstanding(how: str, repeats: int) -> None:
    longest_s = 0.0
    for attempt in range(repeats):
        with start_ranks(
            2, leave_with_work_outstanding, args=(how,), destroy=False, fresh=attempt == 0
        ) as running:
            for rank in range(2):
                running.wait_for_mark(rank, "leaving")
            left_s = time.monotonic()
            results = running.collect(60)
            longest_s = max(longest_s, time.monotonic() - left_s)
        assert [result.exit_code for result in results] == [0, 0], (
            f"{attempt}\n{results.describe()}"
        )
        for result in results:
            assert "terminate" not in result.stderr and "Fatal" not in result.stderr
    assert_within(longest_s, 30)


def use_after_destroy(rank: int, world_size: int) -> tuple[str | None, str | None]:
    group = dist.group.WORLD
    assert group is not None
    backend = pycomm._group.creation.native_backend(group)
    dist.all_reduce(torch.ones(3))
    before = pycomm.last_error()
    dist.destroy_process_group()
    try:
        backend.barrier().wait()
    except pycomm.errors.PycommError as error:
        return (None if before is None else str(before), error.code)
    return (str(before), "nothing raised")


def test_use_after_destroy() -> None:
    assert run_ranks(2, use_after_destroy).values() == [(None, "SHUT_DOWN")] * 2
