"""Ranks end at any moment, and those who are left commit the same steps with the same sums.

Without the wrapper: each process sums buckets in a loop of begin() and end(). Every sum says who is
in it (elastic_steps.py).
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fault_ranks
import pytest
import rings
import torch.distributed as dist
from elastic_steps import Plan, bucket, check, open_steps, trains
from ranks import RankResults, mark, start_ranks
from time_bound import assert_within

from pycomm._native import loader

pytestmark = [pytest.mark.needs_native, pytest.mark.faults, pytest.mark.ci, pytest.mark.time_bound]

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


@pytest.mark.parametrize("options", rings.first_of([SHARED, TCP]), ids=["shm", "tcp"])
@pytest.mark.parametrize(
    ("world_size", "dead"), rings.ends([(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 2)])
)
def test_a_rank_is_killed_in_the_middle_of_a_step(
    world_size: int, dead: int, options: dict[str, Any]
) -> None:
    plan = Plan(steps=60, options=options, held=((dead, 30),))
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


@pytest.mark.parametrize("options", rings.first_of([SHARED, TCP]), ids=["shm", "tcp"])
def test_two_ranks_are_killed_at_once(options: dict[str, Any]) -> None:
    plan = Plan(steps=60, options=options, held=((1, 30), (2, 30)))
    with start_ranks(4, trains, args=(plan,), destroy=False) as running:
        killed_s = kill_after(running, 1, "step 10")
        running.kill(2)
        results = running.collect(60)
    values = survivors(results, [1, 2])
    assert values[0]["members"][-1] == [0, 3] == values[0]["left"]
    assert_within(returned_after(values, killed_s) - killed_s, 4.0, results.describe())


@pytest.mark.parametrize("turn", rings.first_of(range(4)))
def test_another_rank_is_killed_while_the_others_agree(turn: int) -> None:
    """Some milliseconds later: during the agreement, the meeting of the next epoch, or the redo."""
    plan = Plan(steps=60, held=((0, 30), (2, 30)))
    with start_ranks(4, trains, args=(plan,), destroy=False) as running:
        kill_after(running, 0, "step 10")
        time.sleep(0.005 + 0.03 * turn + random.random() * 0.03)
        killed_s = running.kill(2)
        results = running.collect(60)
    values = survivors(results, [0, 2])
    assert values[0]["members"][-1] == [1, 3]
    assert_within(returned_after(values, killed_s) - killed_s, 4.0, results.describe())


def test_down_to_one(tmp_path: Any) -> None:
    plan = Plan(steps=80, held=((0, 20), (3, 40), (1, 60)))
    with start_ranks(4, trains, args=(plan,), destroy=False) as running:
        for number, dead in enumerate((0, 3, 1)):
            kill_after(running, dead, f"step {10 + 20 * number}")
        results = running.collect(60)
    (value,) = survivors(results, [0, 1, 3])
    assert value["members"][-1] == [2] and value["size"] == 1


def test_a_rank_that_is_busy_holds_up_nothing_but_its_sums() -> None:
    """The others have the next group long before it comes back to it."""
    plan = Plan(steps=30, late=(1, 10, 3.0), held=((2, 20),))
    with start_ranks(3, trains, args=(plan,), destroy=False) as running:
        running.wait_for_mark(1, "late")
        time.sleep(0.3)
        killed_s = running.kill(2)
        results = running.collect(60)
    values = survivors(results, [2])
    assert_within(returned_after(values, killed_s) - killed_s, 4.0, results.describe())


@pytest.mark.parametrize("options", rings.first_of([SHARED, TCP]), ids=["shm", "tcp"])
def test_a_rank_that_was_stopped_is_left_behind(options: dict[str, Any]) -> None:
    plan = Plan(steps=40, options=options, held=((0, 20),))
    with start_ranks(3, trains, args=(plan,), destroy=False) as running:
        running.wait_for_mark(0, "step 10")
        running.kill(0, signal.SIGSTOP)
        for rank in (1, 2):
            running.wait_for_mark(rank, "step 25")
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
    plan = Plan(steps=40, quorum_wait_s=4.0, held=((0, 20), (1, 20)))
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
    assert took_s > 6.0  # they are found silent after 3
    assert_within(took_s, 10.0, error.text)


def test_too_few_ranks() -> None:
    plan = Plan(steps=40, min_ranks=2, quorum_wait_s=1.0, held=((0, 20),))
    with start_ranks(2, trains, args=(plan,), destroy=False) as running:
        kill_after(running, 0, "step 10")
        results = running.collect(60)
    error = results[1].value["error"]
    assert error is not None and error.is_a("QuorumLostError"), results.describe()
    assert "min_ranks is 2" in error.text, error.text


# --- which steps count ----------------------------------------------------------------------------


def steps_at(rank: int, world_size: int, finished: bool) -> tuple[list[list[int]], int]:
    """Rank 2 dies in step 1, which rank 0 has finished; rank 1 only if ``finished``."""
    own, steps = open_steps(world_size, Plan())
    members: list[list[int]] = []
    redone = 0
    for number in range(3):
        steps.begin()
        while True:
            raised: Exception | None = None
            total = bucket(rank, number, 0, 64)
            try:
                if number != 1 or redone or finished:
                    dist.all_reduce(total, group=own)
                elif rank == 1:  # rank 0 has nothing to wait for
                    dist.recv(total, group=own, group_src=2)
            except Exception as caught:
                raised = caught
            if number == 1 and rank == 2:
                mark("late")
                time.sleep(100)
            mark(f"ends {number}")
            if not steps.end(raised):
                break
            redone += 1
        members.append(check(total, number, 0))
    steps.close()
    return members, redone


@pytest.mark.parametrize("finished", [False, True], ids=["some", "all"])
def test_a_step_counts_if_all_survivors_have_finished_it(finished: bool) -> None:
    with start_ranks(3, steps_at, args=(finished,), destroy=False) as running:
        running.wait_for_mark(2, "late")
        running.wait_for_mark(0, "ends 1")
        if finished:
            running.wait_for_mark(1, "ends 1")
            running.wait_until_asleep(1)
        running.wait_until_asleep(0)
        running.kill(2)
        results = running.collect(60)
    for rank in (0, 1):
        assert results[rank].ok, results.describe()
        members, redone = results[rank].value
        assert members == [[0, 1, 2], [0, 1, 2] if finished else [0, 1], [0, 1]]
        assert redone == (0 if finished else 1)


# --- deaths at one place --------------------------------------------------------------------------


def trains_with_faults(rank: int, world_size: int, path: str, plan: Plan) -> dict[str, Any]:
    fault_ranks.use_fault_build()
    dist.init_process_group(
        "pycomm", init_method=f"file://{path}", rank=rank, world_size=world_size
    )
    return trains(rank, world_size, plan)


def start_with_faults(
    ranks: int, folder: Path, plan: Plan, target: Any = trains_with_faults
) -> Any:
    """Ranks that load the build with fault points, and make their group themselves."""
    args = (str(folder / "store"), plan)
    return start_ranks(ranks, target, args=args, destroy=False, init="none", only_pycomm=True)


@pytest.mark.usefixtures("fault_build")
@pytest.mark.parametrize("struck", rings.first_of([0, 1]))
@pytest.mark.parametrize(
    "point",
    [
        "survive.seal:1:kill",
        "survive.meet:1:kill",
        "reconfigure.call:1:kill",
        "reconfigure.ready:1:kill",
        "group.joined:1:kill",
        "endpoint.answer:1:kill",
        "endpoint.dial:1:kill",
    ],
)
def test_one_more_dies_at_any_place_of_the_change(tmp_path: Path, point: str, struck: int) -> None:
    if point.startswith("endpoint.answer") and struck == 1:
        pytest.skip("the members meet at another endpoint")
    if point.startswith("endpoint.dial") and struck == 0:
        pytest.skip("it connects to no endpoint")
    plan = Plan(steps=40, struck=(struck, point), held=((3, 20),))
    with start_with_faults(4, tmp_path, plan) as running:
        killed_s = kill_after(running, 3, "step 5")
        results = running.collect(60)
    values = survivors(results, [struck, 3])
    assert values[0]["left"] == [rank for rank in (0, 1, 2) if rank != struck]
    assert_within(returned_after(values, killed_s) - killed_s, 4.0, results.describe())


@pytest.mark.usefixtures("fault_build")
@pytest.mark.parametrize(
    "point", rings.first_of(["survive.seal:1:delay=700", "survive.meet:1:delay=700"])
)
def test_a_slow_survivor_is_waited_for(tmp_path: Path, point: str) -> None:
    plan = Plan(steps=40, struck=(1, point), held=((2, 20),))
    with start_with_faults(3, tmp_path, plan) as running:
        kill_after(running, 2, "step 5")
        results = running.collect(60)
    values = survivors(results, [2])
    assert values[0]["left"] == [0, 1]
    assert values[1]["strikes"] == [1]


@pytest.mark.usefixtures("fault_build")
@pytest.mark.parametrize("struck", rings.first_of([0, 2]))
@pytest.mark.parametrize(("point", "with_it"), [("finished", (8, 9)), ("committed", (9,))])
def test_a_rank_dies_at_an_end_of_its_commit_round(
    tmp_path: Path, point: str, with_it: tuple[int, ...], struck: int
) -> None:
    """Of its ninth step: after the round all commit it; before it, if all others have the sums."""
    plan = Plan(steps=30, struck=(struck, f"survive.{point}:9:kill"))
    with start_with_faults(3, tmp_path, plan) as running:
        results = running.collect(60)
    left = [rank for rank in range(3) if rank != struck]
    members = survivors(results, [struck])[0]["members"]
    whole = members.count([0, 1, 2])
    assert whole in with_it
    assert members == [[0, 1, 2]] * whole + [left] * (30 - whole)


# --- a member's own trouble -----------------------------------------------------------------------


def first_meets_then_leaves(rank: int, world_size: int, path: str, plan: Plan) -> Any:
    """Rank 1 ends in good order while it is in the meeting of the next epoch."""
    if rank != 1:
        return trains_with_faults(rank, world_size, path, plan)
    fault_ranks.use_fault_build()
    dist.init_process_group(
        "pycomm", init_method=f"file://{path}", rank=rank, world_size=world_size
    )
    own, steps = open_steps(world_size, plan)
    loader.load().arm_fault_points("group.joined:1:delay=1500")
    mark("trains")
    for step in range(plan.steps):
        steps.begin()
        works = [
            dist.all_reduce(bucket(rank, step, i, n), group=own, async_op=True)
            for i, n in enumerate(plan.numels)
        ]
        mark(f"issued {step}")
        try:
            for work in works:
                work.wait()
        except Exception:
            break
        assert not steps.end(None)
        mark(f"step {step}")
    time.sleep(0.5)
    dist.destroy_process_group()
    sys.exit(0)


@pytest.mark.usefixtures("fault_build")
@pytest.mark.parametrize("point", ["call:1:nomem", "call:1:errno=EMFILE", "ready:1:nomem"])
def test_a_member_that_cannot_come_ends_nobody_else(tmp_path: Path, point: str) -> None:
    """It has no memory for the next group, say: its own error, and the others go on."""
    plan = Plan(steps=40, struck=(1, f"reconfigure.{point}"), held=((3, 20),))
    with start_with_faults(4, tmp_path, plan) as running:
        killed_s = kill_after(running, 3, "step 5")
        results = running.collect(60)
    assert results[1].value["strikes"] == [1]
    own = results[1].value["error"]  # none if the others tried again before it gave up
    assert own is None or own.code in ("INTERNAL", "SYSTEM_ERROR"), results.describe()
    left = [0, 1, 2] if own is None else [0, 2]
    values = [results[rank].value for rank in (0, 2)]
    for value in values:
        assert value["error"] is None, (value["error"], results.describe())
        assert value["left"] == left
    assert_within(returned_after(values, killed_s) - killed_s, 4.0, results.describe())


@pytest.mark.usefixtures("fault_build")
def test_a_member_that_ends_in_the_meeting_ends_nobody_else(tmp_path: Path) -> None:
    plan = Plan(steps=40, held=((3, 20),))
    with start_with_faults(4, tmp_path, plan, first_meets_then_leaves) as running:
        running.wait_for_mark(1, "issued 20")  # so its own sum fails, and no end() or begin()
        killed_s = running.kill(3)
        results = running.collect(60)
    assert results[1].exit_code == 0, results.describe()
    values = [results[rank].value for rank in (0, 2)]
    for value in values:
        assert value["error"] is None, (value["error"], results.describe())
        assert value["left"] == [0, 2]
    assert_within(returned_after(values, killed_s) - killed_s, 6.0, results.describe())


@pytest.mark.usefixtures("fault_build")
def test_members_that_meet_slowly_get_more_time(tmp_path: Path) -> None:
    """One of them needs longer for a meeting than others wait at first, and answers meanwhile."""
    options = {"heartbeat_timeout": 1.0}
    struck = (1, "reconfigure.call:1+:delay=4000")
    plan = Plan(steps=20, options=options, struck=struck, held=((2, 12),))
    with start_with_faults(3, tmp_path, plan) as running:
        killed_s = kill_after(running, 2, "step 5")
        results = running.collect(100)
    values = survivors(results, [2])
    assert values[0]["left"] == [0, 1]
    assert_within(returned_after(values, killed_s) - killed_s, 40.0, results.describe())
