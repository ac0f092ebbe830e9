"""Ranks leave in order, on SIGTERM: with a step that counts, and no step is summed again for it.

Each rank trains as in test_killed_trainings.py. Wherever the signal comes, the one that leaves has
the bits of the others up to its last step, and they have its part in that step and none later.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import fault_ranks
import pytest
import rings
import torch
import torch.distributed as dist
from ddp_rig import wrap
from elastic_rig import Net, batch_of
from elastic_training import SHARED, TCP, Plan, start
from ranks import TORCH_DDP, RankResults, mark, start_ranks
from time_bound import assert_within

from pycomm._native import loader

pytestmark = [
    pytest.mark.ci,
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.timeout(200),
]


def judge(results: RankResults, dead: Collection[int], leavers: Collection[int]) -> dict[int, Any]:
    """What the living did; raises AssertionError unless they did it alike, rightly and in order."""
    for result in results:
        if result.rank in dead:
            assert result.exit_code == -signal.SIGKILL, results.describe()
        else:
            assert result.ok, results.describe()
            assert result.value["error"] is None, results.describe()
            assert result.value["wrong"] == "", results.describe()
            assert result.value["left"] == (result.rank in leavers), results.describe()
    values = {result.rank: result.value for result in results if result.rank not in dead}
    longest = max(values.values(), key=lambda value: len(value["bits"]))
    for rank, value in values.items():
        steps = len(value["bits"])
        assert value["bits"] == longest["bits"][:steps], rank
        assert value["members"] == longest["members"][:steps], rank
        assert rank in value["members"][-1]
        if rank in leavers and steps < len(longest["members"]):
            assert rank not in longest["members"][steps]
        if not dead:
            assert value["stats"]["redone_steps"] == 0, results.describe()
            assert value["stats"]["lost_ranks"] == 0, results.describe()
    before = tuple(range(len(results)))
    for members in longest["members"]:
        assert set(members) <= set(before)  # nobody comes back
        before = members
    for rank in set(values) - set(leavers):
        stats = values[rank]["stats"]
        assert len(values[rank]["bits"]) == len(longest["bits"])
        gone = len(results) - len(values[rank]["members"][-1])
        assert stats["lost_ranks"] + stats["left_ranks"] == gone
        assert stats["left_ranks"] == len(leavers), results.describe()
    return values


def term_after(running: Any, rank: int, name: str, within_s: float = 0.03) -> None:
    """Sends SIGTERM to a rank at a random moment after it has reached a mark."""
    running.wait_for_mark(rank, name)
    time.sleep(random.random() * within_s)
    running.kill(rank, signal.SIGTERM)


LEAVERS = [
    (2, 0, Plan()),
    (2, 1, Plan("int8")),
    (3, 0, Plan("fp16", left=2)),
    (3, 1, Plan("int8", left=2, passes=2)),
    (3, 2, Plan(left=2, samples=True)),
    (4, 0, Plan("bf16", left=3)),
]


@pytest.mark.parametrize("options", rings.first_of([SHARED, TCP]), ids=["shm", "tcp"])
@pytest.mark.parametrize(("world_size", "leaver", "plan"), rings.ends(LEAVERS))
def test_a_rank_leaves(world_size: int, leaver: int, plan: Plan, options: dict[str, Any]) -> None:
    with start(world_size, plan, options) as running:
        term_after(running, leaver, "step 20")
        results = running.collect(90)
    judge(results, [], [leaver])


PLACES = ["loader", "forward", "backward", "step"]


@pytest.mark.parametrize("passes", rings.first_of([2, 1]))
@pytest.mark.parametrize("where", rings.ends(PLACES))
def test_a_signal_at_a_known_place(where: str, passes: int) -> None:
    """It leaves with the step that is under way; with ``accumulate``, as that is reduced."""
    plan = Plan(left=1, passes=passes, terms=((0, 5, where), (2, 9, where), (2, 9, "step")))
    with start(3, plan, SHARED) as running:
        results = running.collect(90)
    values = judge(results, [], [0, 2])
    later = 1 if where == "step" else 0
    assert [len(values[rank]["bits"]) for rank in (0, 2)] == [6 + later, 10 + later]


def test_a_signal_before_the_first_step() -> None:
    plan = Plan(left=1, terms=((0, 0, "loader"),))
    with start(2, plan, SHARED) as running:
        results = running.collect(90)
    values = judge(results, [], [0])
    assert len(values[0]["bits"]) == 1


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_leave_at_once(world_size: int) -> None:
    terms = tuple((rank, 5, "backward") for rank in range(world_size))
    with start(world_size, Plan(left=0, terms=terms), SHARED) as running:
        results = running.collect(90)
    values = judge(results, [], range(world_size))
    assert all(len(value["bits"]) == 6 for value in values.values())


@pytest.mark.parametrize("turn", rings.first_of(range(4)))
def test_a_rank_leaves_while_another_dies(turn: int) -> None:
    plan = Plan("int8", left=2)
    leaver, dead = random.sample(range(4), 2)
    with start(4, plan, SHARED if turn % 2 else TCP) as running:
        term_after(running, leaver, "step 20")
        time.sleep(0.004 * turn + random.random() * 0.02)
        running.kill(dead)
        results = running.collect(90)
    judge(results, [dead], [leaver])


@pytest.mark.parametrize(("where", "later"), [("forward", 0), ("backward", 0), ("step", 1)])
def test_a_rank_leaves_in_the_step_of_a_death(where: str, later: int) -> None:
    """The others cannot finish that step, so it is summed again, with the one that leaves."""
    plan = Plan(left=2, dies=((3, 9, "backward"),), terms=((0, 9, where),))
    with start(4, plan, SHARED) as running:
        results = running.collect(90)
    values = judge(results, [3], [0])
    assert len(values[0]["bits"]) == 10 + later
    assert values[0]["members"][9] == (0, 1, 2)


def test_too_few_ranks_are_left() -> None:
    plan = Plan(settings=(("min_ranks", 2), ("quorum_wait", 1.0)), terms=((0, 5, "loader"),))
    with start(2, plan, SHARED) as running:
        results = running.collect(90)
    assert results[0].value["error"] is None and results[0].value["left"], results.describe()
    error = results[1].value["error"]
    assert error is not None and error.is_a("QuorumLostError"), results.describe()
    assert "min_ranks is 2" in error.text, error.text
    assert len(results[1].value["bits"]) == 6
    assert results[1].value["raised_s"] - results[1].value["ended_s"][-1] > 0.9


def leaves_and_stays(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 0 leaves with step 3, and goes on with other things."""
    import pycomm

    model = wrap(Net(), weight="samples", elastic=pycomm.Elastic())
    told: dict[str, Any] = {"seen": []}
    longest_s = 0.0
    for step in range(12):
        if rank == 0 and step == 3:
            model.elastic.leave()
            model.elastic.leave()
        began_s = time.monotonic()
        model.zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        longest_s = max(longest_s, time.monotonic() - began_s)
        elastic = model.elastic
        told["seen"].append((elastic.members, elastic.rank, elastic.leader, elastic.left))
        if elastic.left:
            break
    if rank == 0:
        told["forward"] = _raised(lambda: model(batch_of(rank, 4)))
        told["batch"] = _raised(model.no_batch)
        with torch.no_grad():
            model(batch_of(rank, 4))
        model.module(batch_of(rank, 4)).mean().backward()
        model.elastic.leave()
        mark("has left")
        time.sleep(4.0)
    told["took_s"] = longest_s
    told["stats"] = (model.stats().lost_ranks, model.stats().left_ranks, model.stats().redone_steps)
    return told


def _raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def leads_after(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Whether it leads after the step with which rank 0 leaves, and after a confirmation.

    Rank 3 ends before the commit round of that step, which all have finished.
    """
    fault_ranks.use_fault_build()
    dist.init_process_group(
        "pycomm", init_method=f"file://{path}", rank=rank, world_size=world_size
    )
    import pycomm

    model = wrap(Net(), elastic=pycomm.Elastic())
    if rank == 3:
        loader.load().arm_fault_points("survive.finished:3:kill")
    for step in range(3):
        if rank == 0 and step == 2:
            model.elastic.leave()
        model.zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
    leads = model.elastic.leader
    return {"leads": leads, "left": model.elastic.left, "confirms": model.elastic.confirm()}


@pytest.mark.usefixtures("fault_build")
def test_one_rank_leads_after_the_step_with_which_rank_0_leaves(tmp_path: Path) -> None:
    with start_ranks(
        4,
        leads_after,
        args=(str(tmp_path / "store"),),
        destroy=False,
        init="none",
        only_pycomm=True,
    ) as running:
        results = running.collect(60)
    assert all(result.ok for result in results if result.rank != 3), results.describe()
    values = [results[rank].value for rank in range(3)]
    assert [value["leads"] for value in values] == [True, False, False]
    assert [value["left"] for value in values] == [True, False, False]
    assert [value["confirms"] for value in values] == [False, True, False]


@pytest.mark.time_bound
def test_who_has_left_holds_up_nobody_and_may_go_on_living() -> None:
    with start_ranks(
        3, leaves_and_stays, preload=TORCH_DDP, env={"PYCOMM_DEBUG": "INFO"}
    ) as running:
        results = running.collect(60).check()
    leaver, *others = [result.value for result in results]
    all_ranks = ((0, 1, 2), 0, True, False)
    assert leaver["seen"] == [all_ranks] * 3 + [((0, 1, 2), 0, True, True)]
    for rank, value in enumerate(others, 1):
        assert value["seen"][:4] == [((0, 1, 2), rank, False, False)] * 4
        assert value["seen"][4:] == [((1, 2), rank - 1, rank == 1, False)] * 8
        assert value["stats"] == (0, 1, 0)
    for what in ("forward", "batch"):
        assert leaver[what].startswith("ShutDownError"), leaver
        assert "has left the elastic group in order" in leaver[what]
        assert "model.elastic.left" in leaver[what]
    for result in results[1:]:
        assert "epoch 2: without rank 0" in result.stderr, results.describe()
        assert ", which has left in order. 2 of 3 members go on" in result.stderr
    for result in results:
        warned = [line for line in result.stderr.splitlines() if "WARN" in line]
        assert all("elastic=: steps of the wrapped" in line for line in warned), warned
    for value in others:
        assert_within(value["took_s"], 2.0, results.describe())
