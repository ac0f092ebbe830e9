"""Point-to-point: send, recv, isend, irecv, batches, tags, any source, oneself, objects."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import rings
import torch
import torch.distributed as dist
from collective_calls import DTYPES
from ranks import mark, run_ranks, start_ranks

import pycomm

pytestmark = pytest.mark.needs_native


def pattern(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that any dtype can hold."""
    return ((torch.arange(numel) * 7 + seed) % 2).to(dtype)


def around_the_ring(rank: int, world_size: int) -> None:
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for dtype in DTYPES.values():
        for numel in (0, 1, 1000, 300_000):
            arriving = torch.empty(numel, dtype=dtype)
            works = [
                dist.irecv(arriving, left),
                dist.isend(pattern(numel, rank, dtype), right),
            ]
            for work in works:
                assert work is not None
                work.wait()
            assert torch.equal(
                arriving.view(torch.uint8), pattern(numel, left, dtype).view(torch.uint8)
            )
    # Blocking, even ranks first. Neighbours that both send first get on: small sends are buffered.
    value = torch.tensor([float(rank)])
    if rank % 2 == 0:
        dist.send(value, right)
    got = torch.empty(1)
    assert dist.recv(got, left) == left
    if rank % 2 == 1:
        dist.send(value, right)
    assert got.item() == left


@pytest.mark.parametrize("world_size", rings.first_of([3, 2]))
def test_around_the_ring(world_size: int) -> None:
    run_ranks(world_size, around_the_ring)


def tags_any_source_and_groups(rank: int, world_size: int) -> None:
    # Tags, received in the opposite order.
    if rank == 0:
        for tag in range(10):
            dist.send(torch.full((100 * tag,), float(tag)), 1, tag=tag)
    elif rank == 1:
        for tag in reversed(range(10)):
            got = torch.empty(100 * tag)
            dist.recv(got, 0, tag=tag)
            assert torch.equal(got, torch.full((100 * tag,), float(tag)))
    # From any rank: each once, and the return value says whose it was.
    if rank == 0:
        seen = []
        for _ in range(2 * (world_size - 1)):
            got = torch.empty(50_000)
            source = dist.recv(got, tag=5)
            assert torch.equal(got, torch.full((50_000,), float(source)))
            seen.append(source)
        assert sorted(seen) == sorted(2 * list(range(1, world_size)))
    else:
        for _ in range(2):
            dist.send(torch.full((50_000,), float(rank)), 0, tag=5)
    # A subgroup counts its own ranks; torch gives and takes global ones.
    pair = dist.new_group([1, 2])
    if rank == 2:
        dist.send(torch.tensor([7.0]), 1, group=pair)
    elif rank == 1:
        got = torch.empty(1)
        assert dist.recv(got, group=pair) == 2
        assert got.item() == 7.0


def test_tags_any_source_and_groups() -> None:
    run_ranks(3, tags_any_source_and_groups)


def to_oneself_and_batches(rank: int, world_size: int) -> None:
    for numel in (0, 3, 400_000):
        got = torch.empty(numel)
        works = [dist.isend(pattern(numel, 1), rank), dist.irecv(got, rank)]
        for work in works:
            assert work is not None
            work.wait()
        assert torch.equal(got, pattern(numel, 1))
    outgoing = [pattern(1000 + peer, rank) for peer in range(world_size)]
    arriving = [torch.empty(1000 + rank) for _ in range(world_size)]
    batch = [dist.P2POp(dist.isend, outgoing[peer], peer) for peer in range(world_size)]
    batch += [dist.P2POp(dist.irecv, arriving[peer], peer) for peer in range(world_size)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    for peer in range(world_size):
        assert torch.equal(arriving[peer], pattern(1000 + rank, peer))


@pytest.mark.parametrize("world_size", [1, 3])
def test_to_oneself_and_batches(world_size: int) -> None:
    run_ranks(world_size, to_oneself_and_batches)


def objects(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.send_object_list([{"step": 3}, "text", None], 1)
    else:
        got: list[object] = [0, 0, 0]
        assert dist.recv_object_list(got, src=0) == 0
        assert got == [{"step": 3}, "text", None]


def test_objects() -> None:
    run_ranks(2, objects)


def wrong_dtype(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.send(torch.zeros(8, dtype=torch.float32), 1, tag=3)
        dist.barrier()
    else:
        dist.recv(torch.zeros(4, dtype=torch.float64), 0, tag=3)  # as many bytes


def test_a_receive_of_another_dtype_is_a_mismatch_on_both_ranks() -> None:
    results = run_ranks(2, wrong_dtype, check=False)
    for result in results:
        assert result.error is not None and result.error.code == "COLLECTIVE_MISMATCH", (
            results.describe()
        )
        assert (
            "rank 0 (" in result.error.text
            and "send(float32 x 8, to rank 1, tag 3)" in result.error.text
        )
        assert "recv(float64 x 4, from rank 0, tag 3)" in result.error.text
        assert result.error.record["op"] == ("send" if result.rank == 0 else "recv")


def never_sends(rank: int, world_size: int) -> None:
    # A group of its own, as the limit is also that of making it: here both ranks begin together.
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=3))
    if rank == 0:
        dist.recv(torch.zeros(4), tag=11, group=group)
    while pycomm.last_error(group) is None:
        threading.Event().wait(0.02)


def test_a_receive_that_nobody_answers_says_so_at_the_deadline() -> None:
    results = run_ranks(2, never_sends, check=False)
    error = results[0].error
    assert error is not None and error.code == "TIMEOUT", results.describe()
    assert "recv from any rank (tag 11)" in error.text and "no rank has sent" in error.text


def waits_for_a_message(rank: int, world_size: int) -> None:
    if rank == 0:
        mark("waiting")
        dist.recv(torch.zeros(4), 1)
    else:
        mark("waiting")
        dist.recv(torch.zeros(4), 0, tag=1)


def test_a_killed_sender_is_named() -> None:
    with start_ranks(2, waits_for_a_message) as running:
        running.wait_for_mark(0, "waiting")
        running.wait_for_mark(1, "waiting")
        running.kill(1)
        results = running.collect(60)
    error = results[0].error
    assert error is not None and error.code == "PEER_DEAD", results.describe()
    assert error.record["peer"] == 1 and error.record["op"] == "recv"


def futures_after_waiting(rank: int, world_size: int) -> list[str]:
    from pycomm.errors import PycommError

    told = []
    if rank == 1:
        dist.barrier()
        dist.send(torch.ones(3), 0)
        dist.barrier()
        return told
    good, lost = dist.irecv(torch.empty(3), 1), dist.irecv(torch.empty(3), 1)
    assert good is not None and lost is not None
    with pytest.raises(PycommError):
        good._source_rank()  # which needs what a future needs, before the wait
    dist.barrier()  # nothing was sent before
    good.wait()
    assert good.get_future().done(), "who has waited takes the value at once"
    assert good.get_future().value()[0].tolist() == [1.0] * 3
    dist.barrier()
    with pytest.raises(PycommError) as left:
        lost.wait()
    future = lost.get_future()
    assert future.done(), "an error that was raised is there at once, too"
    with pytest.raises(PycommError) as again:
        future.wait()
    assert str(again.value) == str(left.value)
    return [str(left.value)]


def test_a_messages_future_is_complete_after_its_wait() -> None:
    for _ in range(3):  # a pool completes a future that was not waited for, soon
        told = run_ranks(2, futures_after_waiting).values()[0]
        assert "PEER_LEFT" in told[0]
