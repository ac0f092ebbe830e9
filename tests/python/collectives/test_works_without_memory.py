"""One allocation of the extension fails while an operation begins or ends, in a group for each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import failing_memory
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

pytestmark = [pytest.mark.needs_native, pytest.mark.ci]

LONG_S = 20.0  # far above what any of these takes, and far below the group's timeout
MOST = 200  # allocations


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)


def rounds(rank: int, size: int, folder: str) -> Iterator[int]:
    """The number of the allocation that fails, each with a group of its own, until none has failed
    on rank 0: it sets "struck".
    """
    struck = True
    nth = 0
    while struck:
        nth += 1
        assert nth < MOST
        store = dist.FileStore(f"{folder}/{nth}", size)
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=size)
        dist.barrier()
        yield nth
        struck = the_store().get("struck") == b"True"
        dist.destroy_process_group()


def the_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def a_sum(rank: int, tensor: torch.Tensor) -> Callable[[], bool]:
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return lambda: bool(future.done())


def a_message(rank: int, tensor: torch.Tensor) -> Callable[[], bool]:
    work: Any = dist.irecv(tensor, src=1) if rank == 0 else dist.isend(tensor, dst=0)
    future = work.get_future()
    return lambda: bool(future.done())


def a_sparse_sum(rank: int, tensor: torch.Tensor) -> Callable[[], bool]:
    work: Any = dist.all_reduce(tensor.to_sparse(), async_op=True)
    return lambda: bool(work.is_completed())


def ends_in_any_case(
    rank: int, size: int, folder: str, begin: Any, thread: str, least: int | None
) -> None:
    """Rank 0 has begun before rank 1 does. A native thread ends what it waits for. At least so many
    of its allocations fail; None: it may have none.
    """
    failing = failing_memory.Failing()
    nth = 0
    for nth in rounds(rank, size, folder):
        tensor = torch.ones(1000)
        if rank == 0:
            done = begin(rank, tensor)
            failing.fail(nth, thread)
            the_store().set("begun", "")
            until(done, f"allocation {nth}: it never ended")
            the_store().set("struck", str(failing.stop()))
        else:
            the_store().wait(["begun"])
            with contextlib.suppress(dist.DistBackendError):  # the group has failed
                until(begin(rank, tensor), f"allocation {nth} of the other rank: it never ended")
    assert least is None or nth > least, "nearly nothing allocates there"


@pytest.mark.parametrize(
    ("begin", "thread", "least"),
    [
        (a_sum, "pycomm-host", None),  # which allocates nothing
        (a_message, "pycomm-data", 10),
        (a_sparse_sum, "pycomm-host", None),
        (a_sparse_sum, "pycomm-data", None),  # often the callback's thread does all of it
        (a_sparse_sum, "pycomm-callback", 10),
    ],
)
def test_an_operation_ends_whatever_memory_is_lacking(
    begin: Any, thread: str, least: int | None, tmp_path: Path
) -> None:
    environment = failing_memory.preloading(failing_memory.build(tmp_path))
    args = (str(tmp_path), begin, thread, least)
    run_ranks(
        2, ends_in_any_case, args=args, init="none", env=environment, fresh=True, timeout_s=200
    )


def receive_that_fails(rank: int, size: int, folder: str) -> None:
    """Where irecv() raises nothing is received, so the next one gets the message."""
    failing = failing_memory.Failing()
    for nth in rounds(rank, size, folder):
        message = torch.full((1000,), float(nth))
        if rank == 1:
            the_store().wait(["struck"])
            with contextlib.suppress(dist.DistBackendError):  # the group has failed
                dist.isend(message, dst=0).wait()  # type: ignore[union-attr]
            the_store().wait(["over"])
            continue
        first, second = torch.zeros(1000), torch.zeros(1000)
        failing.fail(nth)
        try:
            work: Any = dist.irecv(first, src=1)
        except Exception:
            work = None
        struck = failing.stop()
        the_store().set("struck", str(struck))
        begun = first if work else second
        try:
            work = work or dist.irecv(second, src=1)
            until(work.is_completed, f"allocation {nth}: the message has gone elsewhere")
            work.wait()
            assert begun.equal(message)
        except dist.DistBackendError:  # the group has failed
            assert struck
        the_store().set("over", "")


def test_an_irecv_that_raises_receives_nothing(tmp_path: Path) -> None:
    environment = failing_memory.preloading(failing_memory.build(tmp_path))
    run_ranks(
        2,
        receive_that_fails,
        args=(str(tmp_path),),
        init="none",
        env=environment,
        fresh=True,
        timeout_s=200,
    )
