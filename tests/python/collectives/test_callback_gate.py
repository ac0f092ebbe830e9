"""csrc/c10d/callback_gate.h: a future that could complete waits for callbacks to be hung on it.

Each work has ended before its future is asked for, and nobody has waited for it. So without the
gate `.then()` would run the callback in place if this thread loses the processor for a moment, and
an operation that is issued there would take another number than on a slower rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from time_bound import assert_within

pytestmark = pytest.mark.needs_native

LONGEST_S = 0.5
"""The gate opens after this time in any case."""
TIMES = 20


def ended() -> Any:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    end_s = time.monotonic() + 60
    while not work.is_completed():  # wait() would say that nobody hangs anything on it
        assert time.monotonic() < end_s
        time.sleep(0.0005)
    return work


def callbacks(rank: int, world_size: int) -> list[bool]:
    """Whether each callback ran on the thread that hung it on."""
    in_place = []

    def again(done: Any) -> torch.Tensor:
        in_place.append(threading.get_ident() == main)
        tensor = done.value()[0].clone()
        dist.all_reduce(tensor)
        return tensor

    def hang_on() -> Any:
        future = ended().get_future()
        end_s = time.thread_time() + 0.0003  # of the 2 ms that the gate allows
        while time.thread_time() < end_s:
            pass
        return future.then(again)

    main = threading.get_ident()
    for _ in range(TIMES):
        future = hang_on()
        mine = torch.full((3,), 2.0)
        dist.all_reduce(mine)  # between the callback's operation and its result
        assert mine.eq(2.0 * world_size).all()
        assert future.wait().eq(world_size * world_size).all()
    return in_place


def test_a_callback_runs_on_a_thread_of_its_own_although_its_work_has_ended() -> None:
    assert run_ranks(2, callbacks).values() == [[False] * TIMES] * 2


def seconds_until(complete: Callable[[Any], Any]) -> float:
    """In all, for futures whose function neither returns nor hangs a callback on them."""
    began_s = time.monotonic()
    for _ in range(TIMES):
        future = ended().get_future()
        complete(future)
        assert future.done()
    return time.monotonic() - began_s


def wait_for_it(rank: int, world_size: int) -> float:
    return seconds_until(lambda future: future.wait())


def compute(rank: int, world_size: int) -> float:
    def spin(future: Any) -> None:
        while not future.done():
            pass

    return seconds_until(spin)


@pytest.mark.time_bound
@pytest.mark.parametrize("target", [wait_for_it, compute])
def test_a_function_that_does_not_return_is_not_waited_for(target: Any) -> None:
    for took_s in run_ranks(2, target).values():
        assert_within(took_s, 0.6 * TIMES * LONGEST_S)
