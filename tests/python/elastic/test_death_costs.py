"""The costs of faults that tests/soak/deaths.py prints, in trainings whose clocks are known."""

from __future__ import annotations

import random

import pytest
from death_accounts import Accounts, Step
from death_costs import Fault, Stretch, Timed, costs_of
from death_faults import CUT, KINDS, SPARED_FROM, planned

pytestmark = pytest.mark.ci

STEP_S = 0.1
SAMPLES = 256
STALL_S, STOP_S = 1.3, 0.4


def timed(spans: list[float]) -> Timed:
    """Steps of these durations, from 100 on."""
    accounts, at_s = Accounts(1536), 100.0
    for number, span in enumerate(spans):
        at_s += span
        step = Step(number, (0, 1), "", 0, (1 << SAMPLES) - 1)
        step.ended_s = at_s
        accounts.steps[number] = step
        accounts.newest = number
    return Timed(accounts, [Stretch(100.0, at_s)])


def test_a_fault_costs_its_stall_and_its_stop() -> None:
    spans = [STEP_S] * 100
    spans[40] += STALL_S  # step 40 begins at 104.0 and would have ended at 104.1
    spans[50] += STOP_S
    fault = Fault("SIGKILL", 0, 104.05, [1], gone_step=40, come_s=105.6, whole_step=50)
    fault.over_step = 60
    (cost,) = costs_of([fault], timed(spans), timed([STEP_S] * 120))
    assert cost.goes_on == pytest.approx(STALL_S + 0.05)
    assert cost.lost == pytest.approx(STALL_S)
    assert cost.stop == pytest.approx(STOP_S)
    assert cost.debt == pytest.approx(STALL_S + STOP_S, abs=STEP_S)


def test_a_step_that_ends_as_ever_costs_nothing() -> None:
    """The victim dies after the step was summed: the next one is the first without it."""
    fault = Fault("SIGKILL", 0, 104.05, [1], gone_step=41, come_s=104.3, whole_step=44)
    fault.over_step = 54
    (cost,) = costs_of([fault], timed([STEP_S] * 100), timed([STEP_S] * 100))
    assert cost.goes_on == pytest.approx(0.15)
    assert cost.lost == pytest.approx(0.0, abs=1e-6)
    assert cost.stop == pytest.approx(0.0, abs=1e-6)


def test_without_a_quiet_moment_the_other_training_says_what_is_usual() -> None:
    spans = [STEP_S] * 30
    spans[5] += STALL_S
    fault = Fault("SIGKILL", 0, 100.55, [1], gone_step=5, come_s=101.95, whole_step=8)
    fault.over_step = 29
    (cost,) = costs_of([fault], timed(spans), timed([2 * STEP_S] * 40))
    assert cost.lost == pytest.approx(STALL_S + STEP_S - 2 * STEP_S)


def test_kept_samples() -> None:
    assert timed([STEP_S] * 50).rate() == pytest.approx(SAMPLES / STEP_S)
    assert timed([2 * STEP_S] * 50).rate(0) == pytest.approx(SAMPLES / STEP_S / 2)


@pytest.mark.parametrize("count", [1, 7, 20, 100])
@pytest.mark.parametrize("cuts", [False, True])
def test_the_plan_of_faults(count: int, cuts: bool) -> None:
    kinds = planned(count, random.Random(4), cuts=cuts, only=None)
    assert len(kinds) == count
    if count >= 20:
        assert set(kinds) == {*KINDS, *([CUT] if cuts else [])}
    late = kinds[int(SPARED_FROM * count) + 1 :]
    assert not [kind for kind in late if "rank 0" in kind]
