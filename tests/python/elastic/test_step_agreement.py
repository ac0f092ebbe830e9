"""Ranks end at any moment, and those who are left commit the same steps with the same sums.

Without the wrapper: each process sums buckets in a loop of begin() and end(). Every sum says who is
in it (elastic_steps.py).
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
from elastic_steps import Plan, trains
from ranks import RankResults, start_ranks
from time_bound import assert_within

pytestmark = [pytest.mark.needs_native, pytest.mark.faults]

SHARED, TCP = {}, {"transport": "tcp"}


def survivors(results: RankResults, dead: Sequence[int]) -> list[dict[str, Any]]:
    """What they did; raises AssertionError unless they did it alike and ended well."""
    for result in results:
        if result.rank in dead:
            assert result.exit_code == -signal.SIGKILL, results.describe()
        else:
            assert result.ok, results.describe()
            assert result.value["error"] is None, (result.value["error"], results.describe())
    values = [result.value for result in results if result.rank not in dead]
    for value in values:
        assert value["members"] == values[0]["members"]
    left = [result.rank for result in results if result.rank not in dead]
    before = list(range(len(results)))
    for members in values[0]["members"]:
        assert set(left) <= set(members) <= set(before)  # nobody comes back
        before = members
    return values


def returned_after(values: Sequence[dict[str, Any]], killed_s: float) -> float:
    """Until when every survivor's first step after that moment had returned."""
    return max(min(each for each in value["ended_s"] if each > killed_s) for value in values)


def test_steps_without_a_death() -> None:
    with start_ranks(3, trains, args=(Plan(steps=30),), destroy=False) as running:
        results = running.collect(60)
    values = survivors(results, dead=())
    assert [len(value["members"]) for value in values] == [30] * 3
    assert all(members == [0, 1, 2] for members in values[0]["members"])
    assert all(value["redone"] == 0 for value in values)


@pytest.mark.parametrize("options", [SHARED, TCP], ids=["shm", "tcp"])
@pytest.mark.parametrize(("world_size", "dead"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 2)])
def test_a_rank_is_killed_in_the_middle_of_a_step(
    world_size: int, dead: int, options: dict[str, Any]
) -> None:
    plan = Plan(steps=60, options=options)
    with start_ranks(world_size, trains, args=(plan,), destroy=False) as running:
        running.wait_for_mark(dead, "step 10")
        time.sleep(random.random() * 0.02)
        killed_s = running.kill(dead)
        results = running.collect(60)
    values = survivors(results, [dead])
    assert all(len(value["members"]) == plan.steps for value in values)
    assert values[0]["members"][-1] == [rank for rank in range(world_size) if rank != dead]
    assert all(value["size"] == world_size - 1 for value in values)
    assert_within(returned_after(values, killed_s) - killed_s, 3.0, results.describe())


def kill_after(running: Any, rank: int, name: str) -> float:
    """Kills a rank at a random moment after it has reached a mark."""
    running.wait_for_mark(rank, name)
    time.sleep(random.random() * 0.02)
    return float(running.kill(rank))


@pytest.mark.parametrize("options", [SHARED, TCP], ids=["shm", "tcp"])
def test_two_ranks_are_killed_at_once(options: dict[str, Any]) -> None:
    plan = Plan(steps=60, options=options)
    with start_ranks(4, trains, args=(plan,), destroy=False) as running:
        killed_s = kill_after(running, 1, "step 10")
        running.kill(2)
        results = running.collect(60)
    values = survivors(results, [1, 2])
    assert values[0]["members"][-1] == [0, 3] == values[0]["left"]
    assert_within(returned_after(values, killed_s) - killed_s, 4.0, results.describe())


@pytest.mark.parametrize("turn", range(4))
def test_another_rank_is_killed_while_the_others_agree(turn: int) -> None:
    """Some milliseconds later: during the agreement, the meeting of the next epoch, or the redo."""
    plan = Plan(steps=60)
    with start_ranks(4, trains, args=(plan,), destroy=False) as running:
        kill_after(running, 0, "step 10")
        time.sleep(0.005 + 0.03 * turn + random.random() * 0.03)
        killed_s = running.kill(2)
        results = running.collect(60)
    values = survivors(results, [0, 2])
    assert values[0]["members"][-1] == [1, 3]
    assert_within(returned_after(values, killed_s) - killed_s, 4.0, results.describe())


def test_down_to_one(tmp_path: Any) -> None:
    plan = Plan(steps=80)
    with start_ranks(4, trains, args=(plan,), destroy=False) as running:
        for number, dead in enumerate((0, 3, 1)):
            kill_after(running, dead, f"step {10 + 20 * number}")
        results = running.collect(60)
    (value,) = survivors(results, [0, 1, 3])
    assert value["members"][-1] == [2] and value["size"] == 1


def test_a_rank_that_is_busy_holds_up_nothing_but_its_sums() -> None:
    """The others have the next group long before it comes back to it."""
    plan = Plan(steps=30, late=(1, 10, 3.0))
    with start_ranks(3, trains, args=(plan,), destroy=False) as running:
        running.wait_for_mark(1, "late")
        time.sleep(0.3)
        killed_s = running.kill(2)
        results = running.collect(60)
    values = survivors(results, [2])
    assert_within(returned_after(values, killed_s) - killed_s, 4.0, results.describe())


@pytest.mark.parametrize("options", [SHARED, TCP], ids=["shm", "tcp"])
def test_a_rank_that_was_stopped_is_left_behind(options: dict[str, Any]) -> None:
    plan = Plan(steps=40, options={**options, "heartbeat_timeout": 1.0})
    with start_ranks(3, trains, args=(plan,), destroy=False) as running:
        running.wait_for_mark(0, "step 10")
        running.kill(0, signal.SIGSTOP)
        for rank in (1, 2):
            running.wait_for_mark(rank, "step 20")
        running.kill(0, signal.SIGCONT)
        results = running.collect(60)
    assert all(result.ok for result in results), results.describe()
    stopped, *others = [result.value for result in results]
    assert stopped["error"] is not None, results.describe()
    assert stopped["error"].is_a("LeftBehindError"), stopped["error"]
    for value in others:
        assert value["error"] is None, results.describe()
        assert value["members"] == others[0]["members"]
        assert value["members"][-1] == [1, 2]
    step = len(stopped["members"])
    assert stopped["members"] == others[0]["members"][:step]  # what it committed, they did


def test_without_a_quorum_the_error_says_who_is_missing() -> None:
    """Of 3 ranks two are stopped: no process has ended, so the third may not go on."""
    plan = Plan(steps=40, quorum_wait_s=2.0, options={"heartbeat_timeout": 1.0})
    with start_ranks(3, trains, args=(plan,), destroy=False) as running:
        running.wait_for_mark(0, "step 10")
        for rank in (0, 1):
            running.kill(rank, signal.SIGSTOP)
        stopped_s = time.monotonic()
        running.wait_until(
            2, lambda: (running.folder / "2.result").exists(), "does not give up", 30
        )
        took_s = time.monotonic() - stopped_s
        for rank in (0, 1):
            running.kill(rank, signal.SIGKILL)
        results = running.collect(60)
    error = results[2].value["error"]
    assert error is not None and error.is_a("QuorumLostError"), results.describe()
    assert error.code == "QUORUM_LOST"
    for rank in (0, 1):
        assert f"rank {rank} (host" in error.text, error.text
    assert_within(took_s, 6.0, error.text)


def test_too_few_ranks() -> None:
    plan = Plan(steps=40, min_ranks=2, quorum_wait_s=1.0)
    with start_ranks(2, trains, args=(plan,), destroy=False) as running:
        kill_after(running, 0, "step 10")
        results = running.collect(60)
    error = results[1].value["error"]
    assert error is not None and error.is_a("QuorumLostError"), results.describe()
    assert "min_ranks is 2" in error.text, error.text
