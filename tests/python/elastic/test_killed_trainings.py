"""Ranks are killed at any moment of a training, and the others go on with the same bits.

The step of a death has the average over those who live, as float64 has it; so have all others.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import rings
from elastic_training import SHARED, TCP, Plan, check_feedback, start
from ranks import TORCH_DDP, RankResults, start_ranks
from signals import interrupt_main_thread
from time_bound import assert_within

pytestmark = [
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.ci,
    pytest.mark.time_bound,
    pytest.mark.timeout(200),
]


def kill_after(running: Any, rank: int, name: str, within_s: float = 0.03) -> float:
    """Kills a rank at a random moment after it has reached a mark."""
    running.wait_for_mark(rank, name)
    time.sleep(random.random() * within_s)
    return float(running.kill(rank))


def survivors(results: RankResults, dead: Sequence[int]) -> list[dict[str, Any]]:
    """What they did; raises AssertionError unless they did it alike, rightly, and to the end."""
    for result in results:
        if result.rank in dead:
            assert result.exit_code == -signal.SIGKILL, results.describe()
        else:
            assert result.ok, results.describe()
            assert result.value["error"] is None, results.describe()
            assert result.value["wrong"] == "", results.describe()
    left = [result.rank for result in results if result.rank not in dead]
    values = [results[rank].value for rank in left]
    for value in values:
        assert value["bits"] == values[0]["bits"]
        assert value["members"] == values[0]["members"]
        assert value["stats"]["lost_ranks"] == len(results) - len(value["members"][-1])
        assert value["stats"]["agreeing_seconds"] > 0
        redone = value["stats"]["redone_steps"]
        assert (value["stats"]["redoing_seconds"] > 0) == (redone > 0)
    if all(value["fed_back"] for value in values):
        check_feedback(values)
    before = tuple(range(len(results)))
    for members in values[0]["members"]:
        assert set(left) <= set(members) <= set(before)  # nobody comes back
        before = members
    assert before == tuple(left)
    return values


def went_on_after(values: Sequence[dict[str, Any]], killed_s: float) -> float:
    """From then until every survivor had committed the first step among those who are left."""
    first = values[0]["members"].index(values[0]["members"][-1])
    return max(value["ended_s"][first] for value in values) - killed_s


KILLS = [
    (2, 0, Plan()),
    (2, 1, Plan("int8")),
    (3, 0, Plan("fp16", left=2)),
    (3, 1, Plan("int8", left=2, passes=2)),
    (3, 2, Plan(left=2, samples=True)),
    (3, 0, Plan("int8", left=2, samples=True)),
    (4, 3, Plan("bf16", left=3)),
]


@pytest.mark.parametrize("options", rings.first_of([SHARED, TCP]), ids=["shm", "tcp"])
@pytest.mark.parametrize(("world_size", "dead", "plan"), rings.ends(KILLS))
def test_a_rank_is_killed(world_size: int, dead: int, plan: Plan, options: dict[str, Any]) -> None:
    with start(world_size, plan, options) as running:
        killed_s = kill_after(running, dead, "step 20")
        results = running.collect(90)
    values = survivors(results, [dead])
    assert_within(went_on_after(values, killed_s), 3.0, results.describe())


@pytest.mark.parametrize("where", rings.ends(["forward", "backward", "step"]))
@pytest.mark.parametrize("dead", rings.first_of([0, 2]))
def test_a_rank_dies_at_a_known_place(dead: int, where: str) -> None:
    plan = Plan("int8", left=2, dies=((dead, 9, where),))
    with start(3, plan, SHARED) as running:
        results = running.collect(90)
    values = survivors(results, [dead])
    with_it = 10 if where == "step" else 9
    members = values[0]["members"]
    assert members.index(members[-1]) == with_it


def test_two_ranks_are_killed_at_once() -> None:
    plan = Plan("fp16", left=2)
    with start(4, plan, SHARED) as running:
        kill_after(running, 0, "step 20")
        running.kill(2)
        results = running.collect(90)
    survivors(results, [0, 2])


@pytest.mark.parametrize("turn", rings.first_of(range(3)))
def test_another_rank_is_killed_while_the_others_sum_again(turn: int) -> None:
    plan = Plan("int8", left=2)
    with start(4, plan, SHARED) as running:
        kill_after(running, 1, "step 20")
        time.sleep(0.02 * turn + random.random() * 0.02)
        running.kill(3)
        results = running.collect(90)
    survivors(results, [1, 3])


def test_a_rank_that_evaluates_for_three_seconds_stays() -> None:
    """Meanwhile the others have agreed: the next sum comes soon after it is back."""
    plan = Plan(left=2, evaluates=(1, 20, 3.0))
    with start(3, plan, SHARED) as running:
        running.wait_for_mark(1, "evaluates")
        time.sleep(0.5)
        killed_s = running.kill(2)
        results = running.collect(90)
    values = survivors(results, [2])
    assert_within(went_on_after(values, killed_s), 5.0, results.describe())


def test_a_rank_that_was_stopped_raises_and_the_others_go_on() -> None:
    plan = Plan(left=2)
    with start(3, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        running.kill(0, signal.SIGSTOP)
        lasts = [int(running.marks(rank)[-1].removeprefix("step ")) for rank in (1, 2)]
        for rank, last in zip((1, 2), lasts, strict=True):  # more than it can have taken part in
            running.wait_for_mark(rank, f"step {last + 5}")
        running.kill(0, signal.SIGCONT)
        results = running.collect(90)
    stopped, *others = [result.value for result in results]
    assert stopped["error"] is not None and stopped["error"].is_a("LeftBehindError"), (
        results.describe()
    )
    for value in others:
        assert (value["error"], value["wrong"]) == (None, ""), results.describe()
        assert value["bits"] == others[0]["bits"]
        assert value["members"][-1] == (1, 2)
    step = len(stopped["bits"])
    assert stopped["bits"] == others[0]["bits"][:step]  # what it committed, they did


def test_too_few_ranks() -> None:
    plan = Plan(settings=(("min_ranks", 2), ("quorum_wait", 1.0)))
    with start(2, plan, SHARED) as running:
        kill_after(running, 1, "step 10")
        results = running.collect(90)
    error = results[0].value["error"]
    assert error is not None and error.is_a("QuorumLostError"), results.describe()
    assert "min_ranks is 2" in error.text, error.text  # at once, if the death fell into a step


def test_an_error_of_the_program_is_raised_as_ever() -> None:
    with start_ranks(2, mismatched, preload=TORCH_DDP) as running:
        results = running.collect(60)
    for result in results:
        assert result.ok, results.describe()
        assert result.value.is_a("CollectiveMismatchError"), result.value


def mismatched(rank: int, world_size: int) -> Any:
    """Rank 1 alone freezes a parameter."""
    from elastic_rig import Net, batch_of
    from rank_child import describe_exception

    import pycomm

    model = pycomm.DistributedDataParallel(Net(), elastic=pycomm.Elastic())
    model(batch_of(rank, 0)).square().mean().backward()
    model.module.left.weight.requires_grad_(rank != 1)
    try:
        model(batch_of(rank, 1)).square().mean().backward()
    except Exception as error:
        assert model.elastic.size == world_size
        assert model.elastic.step == 1
        return describe_exception(error)
    return None


class Alarmed(Exception):
    """What a signal handler of the program raises."""


def interrupted(rank: int, world_size: int) -> float:
    """Rank 0 waits for rank 1 in backward, and its program has had enough of that."""
    from elastic_rig import Net, announce, await_ranks, batch_of

    import pycomm

    def raise_alarmed(*_: object) -> None:
        raise Alarmed

    model = pycomm.DistributedDataParallel(Net(), elastic=pycomm.Elastic())
    model(batch_of(rank, 0)).square().mean().backward()
    if rank == 1:
        await_ranks("interrupted", [0])
        return 0.0
    signal.signal(signal.SIGALRM, raise_alarmed)
    begun = threading.Event()
    model.module.wide.weight.register_hook(lambda _: begun.set())
    sent_s = interrupt_main_thread(signal.SIGALRM, begun)
    with pytest.raises(Alarmed):
        model(batch_of(rank, 1)).square().mean().backward()
    took_s = time.monotonic() - sent_s[0]
    assert model.elastic.members == (0, 1)
    announce("interrupted", rank)
    return took_s


def test_a_signal_handler_ends_the_wait() -> None:
    with start_ranks(2, interrupted, preload=TORCH_DDP) as running:
        results = running.collect(60)
    assert all(result.ok for result in results), results.describe()
    assert_within(results[0].value, 2.5, results.describe())
