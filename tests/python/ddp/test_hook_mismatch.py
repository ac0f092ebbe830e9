"""A mismatch between operations that comm hooks issue names the hook and its call.

Annotations are not postponed here: torch compares a hook's with its own classes.
"""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import RankResults, run_ranks, start_ranks
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from pycomm.comm_hooks import ordered

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]

TRANSPORTS = ["shm", "tcp"]


class Bucket:
    """What ``ordered`` and the hooks below ask of a bucket."""

    def buffer(self) -> torch.Tensor:
        return torch.ones(4)


BUCKET = cast(GradBucket, Bucket())


def value_of(future: Any) -> torch.Tensor:
    return cast(torch.Tensor, future.value()[0])


def sums(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Sums the bucket over the group in the state, or over the default group."""
    work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
    return work.get_future().then(value_of)


def another_size(rank: int, world_size: int) -> None:
    """In the second call of the second hook, and on one rank."""
    calls = 0

    def shortens(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        nonlocal calls
        calls += 1
        part = bucket.buffer()[: 3 if rank == 1 and calls == 2 else 4]
        return dist.all_reduce(part, async_op=True).get_future().then(value_of)

    first, second = ordered(sums), ordered(shortens)
    for hook in (first, second, first, second):
        hook(None, BUCKET).wait()


def another_operation(rank: int, world_size: int) -> None:
    """In a callback, over another group than the default one; torch's PowerSGD hook has such."""
    group = dist.new_group()

    def two_rounds(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        def again(future: Any) -> torch.Tensor:
            total = value_of(future)
            if rank == 1:
                dist.broadcast(total, src=0, group=group)
            else:
                dist.all_reduce(total, group=group)
            return total

        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(again)

    ordered(sums)(None, BUCKET).wait()
    ordered(two_rounds, group=group)(None, BUCKET).wait()


def check(results: RankResults, *wanted: str) -> None:
    assert len(results.errors()) == 2, results.describe()
    for error in results.errors():
        assert "CollectiveMismatchError" in error.text or error.code == "COLLECTIVE_MISMATCH"
        for each in wanted:
            assert each in error.text, error.text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_size_names_the_hook_and_its_call(transport: str) -> None:
    check(
        run_ranks(2, another_size, check=False, pg_options={"transport": transport}),
        "The ranks disagree about the operation issued in call 2 of comm hook 2 in group 1: ",
        " has all_reduce(SUM, float32 x 4, ",
        " has all_reduce(SUM, float32 x 3, ",
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_operation_in_a_callback_names_the_hook(transport: str) -> None:
    check(
        run_ranks(2, another_operation, check=False, pg_options={"transport": transport}),
        "The ranks disagree about the operation issued in callback 1 of all_reduce of call 1 of "
        "comm hook 1 in group 2: ",
        " has all_reduce(SUM, float32 x 4, ",
        " has broadcast(float32 x 4, ",
    )


def one_has_no_hook(rank: int, world_size: int) -> None:
    ordered(sums)(None, BUCKET).wait()
    if rank == 0:
        ordered(sums)(None, BUCKET).wait()
    else:
        dist.all_reduce(torch.ones(4))


def other_hooks(rank: int, world_size: int) -> None:
    """Rank 1 has wrapped one hook more, and called it."""
    hooks = [ordered(sums, group=dist.group.WORLD) for _ in range(2)]
    hooks[rank](None, BUCKET).wait()


def half_of(text: str, rank: int) -> str:
    """What the error calls that rank's operation."""
    mine, theirs = text.split("; that one waits in ")
    first = int(mine.split("Rank ")[1].split()[0])
    return mine.split(" waits in ")[1] if first == rank else theirs


def test_both_sides_are_named_where_the_other_rank_calls_something_else() -> None:
    """Two jobs at once, as the error takes 10 s to be certain."""
    with (
        start_ranks(2, one_has_no_hook, pg_options={"transport": "shm"}) as one,
        start_ranks(2, other_hooks, pg_options={"transport": "tcp"}) as other,
    ):
        without, crossed = one.collect(60), other.collect(60)
    check(without)
    text = without.errors()[0].text
    assert "issued in call 1 of comm hook 2 in group 1" in half_of(text, 0), text
    assert " #1" in half_of(text, 1) and "hook" not in half_of(text, 1), text

    check(crossed)
    text = crossed.errors()[0].text
    assert "issued in call 1 of comm hook 1 in group 1" in half_of(text, 0), text
    assert "issued in call 1 of comm hook 2 in group 1" in half_of(text, 1), text
