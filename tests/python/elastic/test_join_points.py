"""With ``join_pause=None`` processes join where the program calls ``join_point()`` only."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import rings
import torch
from ddp_rig import wrap
from elastic_joining import Plan, start
from elastic_rig import Net, batch_of
from elastic_training import SHARED, TCP
from ranks import TORCH_DDP, run_ranks
from test_joined_trainings import check, joining, start_with_faults

import pycomm

pytestmark = [
    pytest.mark.ci,
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.timeout(200),
]

EVERY = 40
"""Steps."""


def at_points(tmp_path: Path, last: int, **changes: Any) -> Plan:
    plan = Plan(
        str(tmp_path / "peers"), last, points=EVERY, check=False, settings=(("join_pause", None),)
    )
    return dataclasses.replace(plan, **changes)


@pytest.mark.parametrize("options", rings.first_of([SHARED, TCP]), ids=["shm", "tcp"])
def test_processes_join_where_the_program_says(options: dict[str, Any], tmp_path: Path) -> None:
    plan = at_points(tmp_path, 3)
    with start(2, plan, options) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), options) as second, start(1, joining(plan), options) as third:
            results = [*running.collect(90), *second.collect(90), *third.collect(90)]
    values = check(results)
    assert values[0]["steps"][-1]["members"] == (0, 1, 2, 3)
    for value in values[2:]:
        assert value["steps"][0]["step"] % EVERY == 0, value["steps"][0]
    sizes = [len(step["members"]) for step in values[0]["steps"]]
    changes = [step for step, (a, b) in enumerate(itertools.pairwise(sizes), 1) if a != b]
    assert changes and all(step % EVERY == 0 for step in changes), changes


def test_two_behind_one_step_let_a_process_in_at_the_first(tmp_path: Path) -> None:
    """It has passed neither, and the members call the second one behind its state."""
    plan = at_points(tmp_path, 2, point_times=(-1, 2))
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), SHARED) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    values = check(results)
    assert values[2]["steps"][0]["step"] % EVERY == 0


def test_a_state_takes_three_times_as_long_as_a_pause_would(tmp_path: Path) -> None:
    """With that join_pause it is refused, and at a join_point() it joins."""
    pause_s = 0.3
    plan = at_points(tmp_path, 2, reads_for=3 * pause_s)
    brief = dataclasses.replace(
        plan, peers=str(tmp_path / "brief"), points=0, settings=(("join_pause", pause_s),)
    )
    with start(1, brief, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(brief), SHARED) as newcomer:
            refused = newcomer.collect(90)[0].value["error"]
        running.kill(0)
        running.collect(30)
    assert refused.is_a("JoinRefusedError"), refused.text
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), SHARED) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    values = check(results)
    assert values[0]["steps"][-1]["members"] == (0, 1, 2)
    assert values[0]["asked_s"] > 3 * pause_s  # in join_point()
    assert values[2]["steps"][0]["step"] % EVERY == 0


def test_a_newcomer_dies_within_it(tmp_path: Path) -> None:
    plan = at_points(tmp_path, 2)
    dies = dataclasses.replace(joining(plan), dies=(-1, "loads"))
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, dies, SHARED) as first:
            (gone,) = first.collect(60)
        with start(1, joining(plan), SHARED) as second:
            results = [*running.collect(90), *second.collect(90)]
    assert gone.exit_code == -signal.SIGKILL, gone.describe()
    values = check(results)
    assert values[0]["stats"]["lost_ranks"] == 0


@pytest.mark.parametrize(("who", "least"), [(0, 1), (1, 1), (0, 2), (1, 2)])
def test_a_member_dies_within_it(who: int, least: int, tmp_path: Path) -> None:
    """The one that gives the state, or one that waits: the process joins at the next one, or at
    this one if the members are too few.

    A process that is started then ends the training, so that no kill comes too late.
    """
    settings = (("join_pause", None), ("min_ranks", least))
    plan = at_points(tmp_path, 3, reads_for=0.5, settings=settings)
    if who == 0:
        plan = dataclasses.replace(plan, dies=(0, "gives"))
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), SHARED) as newcomer:
            if who == 1:
                running.wait_for_mark(0, "gives")
                running.kill(1)
            newcomer.wait_for_mark(0, "trains")
            with start(1, joining(plan), SHARED) as last:
                results = [*running.collect(90), *newcomer.collect(90), *last.collect(90)]
    values = check([result for result in results if result.ok])
    assert len(values) == 3
    assert values[0]["steps"][-1]["members"] == ((1, 2, 3) if who == 0 else (0, 2, 3))
    assert values[1]["steps"][0]["step"] % EVERY == 0


@pytest.mark.usefixtures("fault_build")
def test_members_that_wait_for_it_at_other_places_have_called_it_as_often(tmp_path: Path) -> None:
    """A death leaves too few. Rank 0 waits in it for a process that joins. Rank 1 comes later: it
    learns from the next members only that the step before counts."""
    settings = (("join_pause", None), ("min_ranks", 3), ("quorum_wait", 60.0))
    plan = at_points(tmp_path, 3, points=10, settings=settings, late=1)
    with start_with_faults(3, tmp_path / "store", plan) as running:
        running.wait_for_mark(0, "point 9")
        running.kill(2)
        with start_with_faults(1, tmp_path / "first", joining(plan)) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    assert results.pop(2).exit_code == -signal.SIGKILL
    values = check(results)
    assert [value["steps"][-1]["members"] for value in values] == [(0, 1, 3)] * 3
    assert values[2]["steps"][0]["step"] == 10


def behind_forgotten_passes(rank: int, world_size: int, folder: str) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    elastic = pycomm.Elastic(peers=f"{folder}/peers", state=[optimizer], join_pause=None)
    model = wrap(net, elastic=elastic)
    for step in range(2):
        model(batch_of(rank, step)).square().mean().backward()
        model.elastic.join_point()
        model.zero_grad()
        with model.no_sync():
            model(batch_of(rank, step)).square().mean().backward()
        with pytest.raises(
            pycomm.errors.InvalidArgumentError, match="between the passes of a step"
        ):
            model.elastic.join_point()
        model.zero_grad()
        model.elastic.join_point()
        batch = batch_of(rank, step).requires_grad_()
        with model.no_sync():
            torch.autograd.grad(model(batch).sum(), batch)
        model.elastic.join_point()


def test_passes_in_no_sync_that_left_no_gradient_are_of_no_step(tmp_path: Path) -> None:
    """Those that zero_grad() has forgotten, and a derivative by the batch alone."""
    run_ranks(
        2, behind_forgotten_passes, args=(str(tmp_path),), timeout_s=60, preload=TORCH_DDP
    ).check()


def test_members_that_call_it_at_other_steps_raise(tmp_path: Path) -> None:
    plan = at_points(tmp_path, 2, point_times=(1, 2))
    with start(2, plan, SHARED) as running:
        errors = [result.value["error"] for result in running.collect(60)]
    for rank, error in enumerate(errors):
        assert error.is_a("CollectiveMismatchError"), error.text
        assert "do not call join_point() at the same step" in error.text, error.text
        assert (
            f"called it {rank + 1} times since the last one, and others from 1 to 2" in error.text
        )


def calls(rank: int, world_size: int, peers: str) -> tuple[str, float, float]:
    """What it says of a wrapper that has a pause; and the seconds per call if nobody waits, and
    those of a commit round."""
    import pycomm

    def wrap(**settings: Any) -> Any:
        net = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        elastic = pycomm.Elastic(peers=peers, state=[optimizer], **settings)
        return pycomm.DistributedDataParallel(net, accumulate=2, elastic=elastic)

    def backward(model: Any) -> None:
        model(torch.ones(2, 3)).sum().backward()

    def step(model: Any) -> None:
        backward(model)
        backward(model)

    paused = wrap()
    with pytest.raises(pycomm.errors.UnsupportedError) as refused:
        paused.elastic.join_point()
    paused.elastic.leave()
    step(paused)
    model = wrap(join_pause=None)
    step(model)
    times, rounds = [], []
    for _ in range(20):
        began_s = time.perf_counter()
        for _ in range(100):
            model.elastic.join_point()
        times.append((time.perf_counter() - began_s) / 100)
        began_s = time.perf_counter()
        for _ in range(10):
            model.elastic.confirm()
        rounds.append((time.perf_counter() - began_s) / 10)
    step(model)
    backward(model)
    with pytest.raises(pycomm.errors.InvalidArgumentError, match="between the passes"):
        model.elastic.join_point()
    return str(refused.value), statistics.median(times), statistics.median(rounds)


def test_what_a_call_costs_and_where_it_is_refused(tmp_path: Path) -> None:
    ((text, call_s, round_s),) = run_ranks(
        1, calls, args=(str(tmp_path / "peers"),), preload=TORCH_DDP
    ).values()
    assert "join_pause=None" in text
    print(f"{1e6 * call_s:.1f} µs per call, {1e6 * round_s:.1f} per commit round")
    assert call_s < round_s / 2  # no round, also not with one rank


def deals(rank: int, world_size: int, peers: str) -> None:
    import pycomm

    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    elastic = pycomm.Elastic(peers=peers, state=[optimizer], join_pause=None)
    model = pycomm.DistributedDataParallel(net, weight="samples", elastic=elastic)
    with pytest.raises(pycomm.errors.UnsupportedError, match="join_pause=None"):
        pycomm.BalancedSampler(range(64), global_batch=8, model=model)


def test_no_sampler_where_processes_join_between_epochs(tmp_path: Path) -> None:
    run_ranks(1, deals, args=(str(tmp_path / "peers"),), preload=TORCH_DDP).check()
