"""Shares in a simulated world, beside the best whole shares for the true times.

A rank takes ``fixed + per_sample * samples`` seconds, and noise. Times are in units of what the
samples of an equal share take on a fast rank.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from step_logs import Job

from pycomm.balance import share_plan, step_times, whole_shares
from pycomm.balance.share_plan import SharePlan
from pycomm.balance.step_log import StepRecord
from pycomm.balance.step_times import Fit
from pycomm.balance.whole_shares import Limits, batch_seconds, best_shares

LOOKAHEAD = 12
EACH = 32  # samples of an equal share
SEEDS = range(8)


def world(ranks: int, slowed: int = 0, by: float = 1.0, fixed: float = 0.0, how: str = "") -> Any:
    """The first ranks are slower, in forward only or, if ``how`` is "all", in the fixed part, too.

    fixed: That part of a fast rank, beside the time of its equal share.
    """
    return [
        Fit(
            fixed * (by if rank < slowed and how == "all" else 1.0),
            (by if rank < slowed else 1.0) / EACH,
        )
        for rank in range(ranks)
    ]


class Run:
    """A job whose world changes at some steps, and how good each step's shares were."""

    def __init__(
        self,
        worlds: Sequence[tuple[int, list[Fit]]],
        steps: int,
        *,
        noise: float,
        seed: int,
        lookahead: int = LOOKAHEAD,
        unit: int = 1,
    ) -> None:
        random_ = random.Random(seed)
        ranks = len(worlds[0][1])
        limits = Limits.of(EACH * ranks, unit=unit, fewest=1, most=[None] * ranks)
        self.plan = SharePlan(limits, lookahead)
        self.shares: list[tuple[int, ...]] = []
        self.quality: list[float] = []
        job = Job(ranks)
        for step in range(steps):
            true = next(each for begin, each in reversed(worlds) if step >= begin)
            change = self.plan.shares_of(step)
            assert change is not None
            shares = change.shares
            best = batch_seconds(true, best_shares(true, limits))
            self.shares.append(shares)
            self.quality.append(best / batch_seconds(true, shares))
            took = [
                fit.seconds(share) * max(0.5, random_.gauss(1.0, noise))
                for fit, share in zip(true, shares, strict=True)
            ]
            job.train(shares, took)
            self.plan.add(job.records[-1])


WORLDS = [
    pytest.param(ranks, slowed, by, fixed, how, id=f"{slowed} of {ranks}, 1/{by}, {fixed} {how}")
    for ranks, slowed in ((2, 1), (4, 2))
    for by in (2, 4)
    for fixed, how in ((0, "forward"), (1, "all"), (4, "forward"), (4, "all"))
]


@pytest.mark.parametrize(("ranks", "slowed", "by", "fixed", "how"), WORLDS)
def test_shares_are_nearly_best_within_thirty_steps_behind_the_lookahead(
    ranks: int, slowed: int, by: int, fixed: int, how: str
) -> None:
    slow = world(ranks, slowed, by, fixed, how)
    begin, end = LOOKAHEAD + 30, 101
    for seed in SEEDS:
        assert min(Run([(0, slow)], end, noise=0.01, seed=seed).quality[begin:]) >= 0.95
    noisy = [Run([(0, slow)], end, noise=0.05, seed=seed).quality[begin:] for seed in SEEDS]
    for step, qualities in enumerate(zip(*noisy, strict=True), begin):
        assert statistics.median(qualities) >= 0.95, (step, qualities)
        assert min(qualities) >= 0.9, (step, qualities)
    settled = Run([(0, slow)], 300, noise=0.05, seed=99)
    assert statistics.fmean(settled.quality[100:]) >= 0.97


@pytest.mark.parametrize(("ranks", "slowed", "by", "fixed", "how"), WORLDS)
def test_a_rank_that_changes_its_speed_is_followed_within_twenty(
    ranks: int, slowed: int, by: int, fixed: int, how: str
) -> None:
    slow, equal = world(ranks, slowed, by, fixed, how), world(ranks, fixed=fixed)
    # Where the samples are a fifth of the time, 5 % of noise hide what a share changes for longer.
    hidden = fixed == 4 and how == "forward"
    for begin, then in ((equal, slow), (slow, equal)):
        for noise, after, least in (
            (0.01, 20, 0.95),
            (0.05, 20, 0.88 if hidden else 0.95),
            (0.05, 50, 0.95),
        ):
            at = 60 + LOOKAHEAD + after
            quality = [
                Run([(0, begin), (60, then)], at + 20, noise=noise, seed=seed).quality[at:]
                for seed in SEEDS
            ]
            for step, qualities in enumerate(zip(*quality, strict=True), at):
                assert statistics.median(qualities) >= least, (step, qualities, noise)


@pytest.mark.ci
@pytest.mark.parametrize(("ranks", "slowed", "by", "fixed", "how"), WORLDS)
def test_a_change_of_speeds_at_any_step_is_followed(
    ranks: int, slowed: int, by: int, fixed: int, how: str
) -> None:
    """Shares change first in step 14: speeds change before, at the same time and right after it."""
    slow, equal = world(ranks, slowed, by, fixed, how), world(ranks, fixed=fixed)
    for begin, then in ((slow, slow[::-1]), (slow, equal), (equal, slow)):
        for at in range(5, 41):
            least, behind = 0.9 if fixed == 4 and how == "forward" else 0.95, 24
            if fixed > 0 and 12 < at < 18:  # a new speed looks like another fixed part
                least, behind = 0.8, 30
            after = at + LOOKAHEAD + behind
            quality = Run([(0, begin), (at, then)], after + 20, noise=0.01, seed=at).quality
            assert min(quality[after:]) >= least, (at, begin, then, quality[at:])


class Kneed(Fit):
    """Not of the formula: samples above so many of a batch take twice as long, as of a batch that
    outgrows a cache."""

    KNEE = 36

    def seconds(self, samples: float) -> float:
        return super().seconds(samples) + self.per_sample * max(0.0, samples - self.KNEE)


@pytest.mark.parametrize("fixed", [0, 1])
@pytest.mark.parametrize("by", [2, 4])
def test_times_with_a_knee(by: int, fixed: int) -> None:
    true = [Kneed(*fit) for fit in world(2, 1, by, fixed)]
    best = min(batch_seconds(true, (share, 2 * EACH - share)) for share in range(1, 2 * EACH))
    for seed in SEEDS:
        shares = Run([(0, true)], 200, noise=0.01, seed=seed).shares
        quality = [best / batch_seconds(true, each) for each in shares]
        assert min(quality[LOOKAHEAD + 30 :]) >= 0.92, (by, fixed, quality)
        assert min(quality[100:]) >= 0.95, (by, fixed, quality)


@pytest.mark.parametrize("fixed", [0, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_shares_of_equal_ranks_change_at_most_once(ranks: int, fixed: int) -> None:
    for seed in SEEDS:
        run = Run([(0, world(ranks, fixed=fixed))], 400, noise=0.05, seed=seed)
        assert run.plan.changes <= 1
        assert statistics.fmean(run.quality) >= 0.99


def test_without_noise_shares_of_equal_ranks_never_change() -> None:
    run = Run([(0, world(3))], 100, noise=0.0, seed=0)
    assert set(run.shares) == {(32, 32, 32)}


def test_a_step_decides_no_batch_before_its_lookahead() -> None:
    run = Run([(0, world(2, 1, 4))], 60, noise=0.0, seed=0)
    first = next(step for step, shares in enumerate(run.shares) if shares != (32, 32))
    # Three steps make the first fit: the last of them, number 2, decides batch 2 + lookahead.
    assert first == 2 + LOOKAHEAD
    assert run.shares[first][0] < 32


@pytest.mark.parametrize("unit", [4, 8])
def test_shares_are_multiples(unit: int) -> None:
    run = Run([(0, world(2, 1, 4))], 60, noise=0.05, seed=0, unit=unit)
    assert all(share % unit == 0 for shares in run.shares for share in shares)
    assert run.quality[-1] >= 0.95


def steps_of(plan: SharePlan, steps: int) -> Iterator[StepRecord]:
    """Of a job whose ranks change their speeds, in numbers that every Python computes alike."""
    job, value = Job(2), 1
    for step in range(steps):
        change = plan.shares_of(plan.trained)
        assert change is not None
        took, shares = [], change.shares
        for share, speed in zip(shares, (1, 3) if step < 100 else (2, 1), strict=True):
            value = value * 1103515245 % 2**31
            took.append((7 + speed * share) * (1 + value / 2**31 / 8))
        job.train(shares, took)
        yield job.records[-1]


def test_a_saved_state_continues_alike() -> None:
    plan = plan_of()
    others: list[SharePlan] = []
    for step, record in enumerate(steps_of(plan, 200)):
        for each in (plan, *others):
            each.add(record)
            assert each.state() == plan.state()
        if step % 9 == 0:
            state = json.loads(json.dumps(plan.state()))
            others.append(SharePlan.load(state, plan._limits, plan._lookahead))
    assert plan.changes > 2


def no_float(numbers: Iterable[Any]) -> int:
    numbers = list(numbers)
    assert all(isinstance(number, int) for number in numbers)
    return sum(numbers)


def test_no_sum_of_floats_is_one_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may have different Pythons, and sum() of floats is another one since 3.12."""
    for module in (share_plan, whole_shares, step_times):
        monkeypatch.setattr(module, "sum", no_float, raising=False)
    plan = plan_of()
    for record in steps_of(plan, 200):
        plan.add(record)
    assert plan.changes > 2


def plan_of(lookahead: int = 4) -> SharePlan:
    return SharePlan(Limits.of(64, unit=1, fewest=1, most=[None, None]), lookahead)


def test_shares_are_not_known_before_the_steps_that_decide_them() -> None:
    plan, job = plan_of(), Job(2)
    assert [plan.shares_of(batch) is None for batch in (0, 3, 4)] == [False, False, True]
    for steps in range(1, 10):
        job.train([32, 32], [1.0, 2.0])
        plan.add(job.records[-1])  # with the seconds of the step before it
        assert plan.shares_of(steps + 2) is not None
        assert plan.shares_of(steps + 3) is None


def test_several_passes_of_a_step_are_as_many_batches() -> None:
    plan, job = plan_of(), Job(2)
    for _ in range(5):
        job.train([3 * 32, 3 * 32], [3.0, 12.0], passes=3)
        plan.add(job.records[-1])
    assert (plan.trained, plan.timed) == (15, 12)
    fits = plan.fits()
    assert [fit.seconds(32) for fit in fits] == pytest.approx([1.0, 4.0])
    assert plan.newest.batch == 8 + 4  # the third step ends with batch 8
    assert plan.newest.shares[1] < 20


def test_samples_of_another_unit_are_not_taken_for_samples() -> None:
    """Of a model that counts tokens: the batches' own sizes are what times are fitted to."""
    plan, job = plan_of(), Job(2)
    for _ in range(6):
        job.train([32 * 900.0, 32 * 700.0], [1.0, 2.0])
        plan.add(job.records[-1])
    fits = plan.fits()
    assert [fit.seconds(32) for fit in fits] == pytest.approx([1.0, 2.0])
    assert sum(plan.newest.shares) == 64


@pytest.mark.parametrize("unknown", [float("nan"), float("inf"), 0.0, -1.0])
def test_unknown_seconds_and_empty_batches_are_left_out(unknown: float) -> None:
    plan, job = plan_of(), Job(2)
    for step in range(12):
        job.train([32, 0 if step % 2 else 32], [1.0, unknown if step % 4 == 0 else 3.0])
        plan.add(job.records[-1])
    fits = plan.fits()
    # The second rank's are of its steps 2, 6 and 10.
    assert [fit.seconds(32) for fit in fits] == pytest.approx([1.0, 3.0])
