"""The rig itself: a test that leans on it is only worth something if the rig can fail."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import mark, other_backends_threads, run_ranks, start_ranks


def double(rank: int, world_size: int, start: float) -> float:
    tensor = torch.full((3,), start + rank)
    dist.all_reduce(tensor)
    return float(tensor[0])


def fail_on_one(rank: int, world_size: int) -> None:
    print(f"rank {rank} was here")
    if rank == 1:
        raise ValueError("wanted")


def hang(rank: int, world_size: int) -> None:
    mark("hanging")
    while True:
        time.sleep(1)


def make_gloo_group(rank: int, world_size: int) -> list[str]:
    dist.new_group(backend="gloo")
    return other_backends_threads()


def killed(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("init", ["file", "tcp", "env"])
def test_values_come_back_in_rank_order(init: str) -> None:
    results = run_ranks(2, double, args=(1.0,), backend="gloo", init=init, import_pycomm=False)
    assert results.values() == [3.0, 3.0]


def test_an_exception_is_reported_with_its_text_and_output() -> None:
    with pytest.raises(AssertionError, match="ValueError: wanted"):
        run_ranks(2, fail_on_one, init="none")
    results = run_ranks(2, "test_ranks:fail_on_one", init="none", check=False)
    assert [result.exit_code for result in results] == [0, 1]
    (error,) = results.errors()
    assert (error.type_name, error.text) == ("ValueError", "wanted")
    assert "rank 1 was here" in results[1].stdout


def test_a_gloo_group_is_noticed() -> None:
    options: dict[str, Any] = {"backend": "gloo", "import_pycomm": False}
    (value,) = run_ranks(1, make_gloo_group, **options).values()
    assert value, "gloo's threads have other names now: other_backends_threads sees nothing"
    (error,) = run_ranks(1, make_gloo_group, check=False, only_pycomm=True, **options).errors()
    assert "ProcessGroupGloo" in error.text


def test_a_signal_is_seen_as_such() -> None:
    results = run_ranks(2, killed, init="none", check=False)
    assert [result.exit_code for result in results] == [0, -signal.SIGKILL]


def test_what_hangs_is_killed_and_shows_its_stack() -> None:
    with start_ranks(1, hang, init="none") as running:
        running.wait_for_mark(0, "hanging")
        started_s = time.monotonic()
        (result,) = running.collect(0.5)
    assert result.timed_out and not result.ok
    assert "in hang" in result.stderr
    assert time.monotonic() - started_s < 10


def test_leaving_the_block_kills() -> None:
    with start_ranks(1, hang, init="none") as running:
        running.wait_for_mark(0, "hanging")
        pid = running.pid(0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_mark_never_reached_is_an_error() -> None:
    with (
        start_ranks(1, fail_on_one, init="none") as running,
        pytest.raises(AssertionError, match="'never'"),
    ):
        running.wait_for_mark(0, "never")
