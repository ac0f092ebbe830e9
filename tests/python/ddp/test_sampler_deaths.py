"""BalancedSampler when ranks die: each index once, equal steps, and whole batches again.

The model is a stand-in, see step_logs.py. Random deaths are in test_sampler_joins.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from step_logs import Job

from pycomm.balance.balanced_sampler import BalancedSampler


def samplers_of(job: Job, length: int, **options: Any) -> list[BalancedSampler]:
    return [BalancedSampler(range(length), model=log, **options) for log in job.logs]


def train(job: Job, sizes: Sequence[int], seconds: float = 1.0) -> None:
    job.train(sizes, [seconds] * len(sizes))
    job.returned()


def test_what_a_dead_rank_was_dealt_is_dealt_again() -> None:
    """The example of pycomm/balance/deal.py, with two more batches."""
    job = Job(2)
    mine, theirs = (
        iter(each) for each in samplers_of(job, 20, global_batch=4, lookahead=2, shuffle=False)
    )
    assert (next(mine), next(theirs)) == ([0, 1], [2, 3])
    train(job, [2, 2])
    assert (next(mine), next(theirs)) == ([4, 5], [6, 7])
    job.members.remove(1)
    train(job, [2, 0])
    dealt = []
    for batch in mine:
        train(job, [2, 0])
        dealt.append(batch)
    assert dealt == [[8, 9], [6, 7, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]


def test_what_comes_back_too_late_comes_in_the_next_epoch() -> None:
    job = Job(2)
    samplers = samplers_of(job, 8, global_batch=4, lookahead=3, shuffle=False)
    epochs = []
    for epoch in range(3):
        samplers[0].set_epoch(epoch)
        epochs.append([])
        for batch in samplers[0]:
            epochs[-1].append(batch)
            if epoch == 0 and batch == [4, 5]:
                job.members.remove(1)
            train(job, [2, 2])
    assert epochs == [
        [[0, 1], [4, 5]],
        [[0, 1], [4, 5], [6, 7, 2, 3]],  # the first two had been dealt by halves
        [[6, 7, 0, 1], [2, 3, 4, 5]],  # and the rest of these two came too late again
    ]
    assert samplers[0].stats().members == (0,)


@pytest.mark.parametrize("trained", [1, 2])
def test_a_job_that_is_resumed_deals_it_at_once_or_in_the_next_epoch(trained: int) -> None:
    """The rank dies in the first batch. After the second one the epoch is complete."""
    job = Job(2)
    sampler, _ = samplers_of(job, 8, global_batch=4, lookahead=4, shuffle=False)
    job.members.remove(1)
    for _ in zip(range(trained), sampler, strict=False):
        train(job, [2, 2])
    state = json.loads(json.dumps(sampler.state_dict()))
    job = Job(1)
    (resumed,) = samplers_of(job, 8, global_batch=4, lookahead=4, shuffle=False)
    resumed.load_state_dict(state)
    epochs: list[list[list[int]]] = [[], [], []]
    for epoch, dealt in enumerate(epochs):
        resumed.set_epoch(epoch)
        for batch in resumed:
            dealt.append(batch)
            train(job, [4])
    whole = [[0, 1, 2, 3], [4, 5, 6, 7]]
    first = [[[2, 3, 4, 5]], whole] if trained == 1 else [[], [[2, 3, 6, 7], *whole]]
    assert epochs == [*first, whole]


@pytest.mark.parametrize("restarts", ["", "before set_epoch", "after set_epoch"])
def test_what_comes_back_and_fills_no_batch_comes_in_the_next_epoch(restarts: str) -> None:
    """Two of six samples, and the last one of the epoch's order does not."""
    job = Job(2)
    options: dict[str, Any] = {"global_batch": 4, "lookahead": 3, "shuffle": False}
    sampler, _ = samplers_of(job, 13, **options)
    job.members.remove(1)
    epochs: list[list[list[int]]] = [[], []]
    for epoch, dealt in enumerate(epochs):
        if restarts == "after set_epoch":
            sampler.set_epoch(epoch)
        if epoch == 1 and restarts:
            state = json.loads(json.dumps(sampler.state_dict()))
            job = Job(1)
            (sampler,) = samplers_of(job, 13, **options)
            sampler.load_state_dict(state)
        sampler.set_epoch(epoch)
        for batch in sampler:
            dealt.append(batch)
            train(job, [4, 0])
    assert epochs == [
        [[0, 1], [4, 5], [8, 9], [2, 3, 6, 7]],
        [[10, 11, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]],
    ]


def test_what_comes_back_is_in_another_epoch_than_the_one_that_was_saved() -> None:
    """A pass that waited is not loaded."""
    job = Job(2)
    options: dict[str, Any] = {"global_batch": 4, "lookahead": 3, "shuffle": False}
    sampler, _ = samplers_of(job, 8, **options)
    for batch in sampler:
        if batch == [4, 5]:
            job.members.remove(1)
        train(job, [2, 2])
    job.logs[0].pending_passes = 1
    sampler.set_epoch(1)
    state = json.loads(json.dumps(sampler.state_dict()))
    (resumed,) = samplers_of(Job(1), 8, **options)
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert list(resumed) == [[6, 7, 0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize("how", ["after a death", "without one"])
@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("loads", [1, 2])
def test_passes_that_wait_do_not_go_with_a_state_of_other_ranks(
    how: str, waiting: int, loads: int
) -> None:
    """Two passes a step, and one waits: the part of a rank that is gone is not in it. Nor is it in
    a state that is saved again before a step."""
    options: dict[str, Any] = {"global_batch": 4, "lookahead": 6, "shuffle": False}
    job, trained = Job(2), []
    samplers = samplers_of(job, 40, **options)
    for batch, parts in zip(range(5), zip(*samplers, strict=True), strict=False):
        for log in job.logs:
            log.pending_passes = 1
        if batch == 2 and how == "after a death":
            job.members.remove(1)
        if batch < 4:
            trained += [index for member in job.members for index in parts[member]]
        if batch % 2:
            job.train([2, 2], [1.0, 1.0], passes=2)
            job.returned()
    resumed = samplers[0]
    for _ in range(loads):
        state = json.loads(json.dumps(resumed.state_dict()))
        job = Job(1)
        (resumed,) = samplers_of(job, 40, **options)
        resumed.load_state_dict(state)
        job.logs[0].pending_passes = waiting
    resumed.set_epoch(0)
    if waiting:
        with pytest.raises(RuntimeError, match="of other ranks, and the model has 1 backward pass"):
            iter(resumed)
        return
    for batch in resumed:
        trained += batch
        train(job, [4])
    assert sorted(trained) == list(range(40))


SIX: dict[str, Any] = {"global_batch": 6, "lookahead": 4, "shuffle": False}
"""Of as many ranks: the last one has 5, 11, 17, 23 and 29 of an epoch of five batches."""


def first_of_next_epoch(job: Job, samplers: Sequence[BalancedSampler]) -> tuple[list[int], Any]:
    """The first batch, and that of a run that is resumed here without the passes that wait."""
    for sampler in samplers:
        sampler.set_epoch(1)
    state = json.loads(json.dumps(samplers[0].state_dict()))
    (resumed,) = samplers_of(Job(1), 30, **SIX)
    resumed.load_state_dict(state)
    return [index for each in samplers for index in next(iter(each))], next(iter(resumed))


@pytest.mark.parametrize(("dies", "waiting"), [(1, 0), (1, 1), (1, 2), (2, 1), (2, 2)])
def test_what_comes_back_between_two_epochs_comes_in_the_next_one(dies: int, waiting: int) -> None:
    """At one of the passes of another loader, which wait for a reduction."""
    job = Job(6)
    samplers = samplers_of(job, 30, **SIX)[:-1]
    for batch, _ in enumerate(zip(*samplers, strict=True)):
        if batch == dies:
            job.members.remove(5)
        train(job, [1] * 6)
    for log in job.logs:
        log.pending_passes = waiting
    lost = [5 + 6 * batch for batch in range(dies, 5)]
    wanted = [*lost, *range(6 - len(lost))]
    assert first_of_next_epoch(job, samplers) == (wanted, wanted)


def test_what_comes_back_in_a_step_of_two_loaders_comes_in_the_next_epoch() -> None:
    """Its first pass is the epoch's last one; a step of the other loader alone follows."""
    job = Job(6)
    samplers = samplers_of(job, 30, **SIX)[:-1]
    job.members.remove(5)
    for batch, _ in enumerate(zip(*samplers, strict=True)):
        for log in job.logs:
            log.pending_passes = 1
        if batch % 2:
            job.train([2] * 6, [1.0] * 6, passes=2)
            job.returned()
    for _ in range(2):
        job.train([2] * 6, [1.0] * 6, passes=2)
        job.returned()
    wanted = [5, 11, 17, 23, 29, 0]
    assert first_of_next_epoch(job, samplers) == (wanted, wanted)


def test_shares_are_those_of_the_ranks_that_are_left() -> None:
    """Each is as large as its rank's speed, and the seconds of one rank stay its own."""
    job, speeds = Job(3), (4.0, 1.0, 2.0)
    samplers = samplers_of(job, 10_000, global_batch=60, lookahead=4)
    iterators = [iter(each) for each in samplers]
    sizes = [0] * 3
    for step in range(80):
        if step == 40:
            job.members.remove(1)
        for member in job.members:
            sizes[member] = len(next(iterators[member]))
        seconds = [size * speed for size, speed in zip(sizes, speeds, strict=True)]
        job.train(sizes, seconds)
        job.returned()
        if step == 39:
            assert sizes == pytest.approx([60 / 7, 240 / 7, 120 / 7], abs=1)
        if step in (44, 79):
            assert (sizes[0], sizes[2]) == (20, 40)
    stats = samplers[2].stats()
    assert (stats.members, stats.shares) == ((0, 2), (20, 40))
    assert stats.seconds_per_sample == pytest.approx((4.0, 2.0), rel=0.1)


def test_ranks_whose_memory_is_too_small_train_on_less(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(3, lambda rank, numbers: [[*numbers[:-1], 10] for _ in range(3)])
    samplers = samplers_of(job, 200, global_batch=24, lookahead=2)
    with caplog.at_level(logging.INFO, "pycomm"):
        sizes = []
        job.members.remove(0)
        for batches in zip(*samplers[1:], strict=True):
            sizes.append(sum(map(len, batches)))
            train(job, [0, *map(len, batches)])
    assert sizes[:3] == [16, 16, 20] and set(sizes[2:]) == {20}
    assert len(sizes) == 2 + (200 - 2 * 16) // 20
    (line,) = [each for each in caplog.records if "before: ranks" in each.getMessage()]
    assert line.levelno == logging.WARNING and line.getMessage() == (
        "from batch 2 on ranks 1, 2 train on 10, 10 samples (before: ranks 0, 1, 2 on 8, 8, 8): "
        "max_batch of these ranks allows no more"
    )
