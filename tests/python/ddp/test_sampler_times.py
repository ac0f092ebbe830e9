"""The fit of a rank's time beside numpy's least squares, and what noise and changes do to it."""

from __future__ import annotations

import json
import random

import numpy
import pytest

from pycomm.balance.step_times import StepTimes


def fitted(steps: list[tuple[float, float]]) -> StepTimes:
    times = StepTimes()
    for samples, seconds in steps:
        times.add(samples, seconds)
        times.refit()
    return times


def both_parts(times: StepTimes) -> tuple[float, float]:
    fit = times.fit()
    assert fit is not None
    return fit.fixed, fit.per_sample


def test_there_is_no_fit_before_three_steps() -> None:
    assert fitted([]).fit() is None
    assert fitted([(8, 1.0), (8, 1.0)]).fit() is None
    assert fitted([(8, 1.0)] * 3).fit() is not None


@pytest.mark.parametrize("fixed", [0.0, 1.0, 16.0])
@pytest.mark.parametrize("sizes", [(16, 32), (10, 20, 40), (30, 34)])
def test_exact_times_give_both_parts(fixed: float, sizes: tuple[int, ...]) -> None:
    steps = [(size, fixed + 0.25 * size) for size in sizes for _ in range(6)]
    found = both_parts(fitted(steps))
    matrix = numpy.array([[1.0, size] for size, _ in steps])
    wanted, *_ = numpy.linalg.lstsq(matrix, numpy.array([seconds for _, seconds in steps]))
    assert found == pytest.approx(wanted, abs=0.03 * (fixed + 0.25 * sizes[-1]))


def test_noise_of_a_twentieth_leaves_the_time_right() -> None:
    random_ = random.Random(1)
    noisy = lambda size: (size, (4 + size / 8) * random_.gauss(1, 0.05))  # noqa: E731
    fit = fitted([noisy(size) for size in [32] * 20 + [16] * 20]).fit()
    assert fit is not None
    for size in (12, 16, 24, 32, 40):
        assert fit.seconds(size) == pytest.approx(4 + size / 8, rel=0.04)
    assert 0.005 < fit.error < 0.012  # 0.05 / sqrt(40), and a little more for so few


def test_times_of_one_size_keep_the_ratio_that_was_measured() -> None:
    times = fitted([(size, 8 + size / 4) for size in [32] * 5 + [16] * 5])  # 8 s are 32 samples
    assert both_parts(times) == pytest.approx((8, 0.25), rel=0.02)
    for _ in range(60):  # the other size is forgotten, and the rank is half as fast
        times.add(16, 2 * (8 + 16 / 4))
        times.refit()
    assert both_parts(times) == pytest.approx((16, 0.5), rel=0.02)


def test_one_slow_step_changes_nothing_much() -> None:
    fit = fitted([(16, 50.0), *[(16, 1.0)] * 8, (16, 20.0), *[(16, 1.0)] * 8]).fit()
    assert fit is not None and fit.seconds(16) == pytest.approx(1.0, rel=0.01)
    assert fit.error < 0.02


def test_a_quota_that_stops_every_third_step_counts() -> None:
    """The rank is two times slower on average, although most of its steps are not."""
    fit = fitted([(16, seconds) for _ in range(13) for seconds in (1.0, 1.0, 4.0)]).fit()
    assert fit is not None and 1.5 < fit.seconds(16) < 2.1


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.8, 1.25, 2.0, 4.0])
def test_another_speed_is_noticed_within_five_steps(ratio: float) -> None:
    random_ = random.Random(3)
    times = fitted([(16, random_.gauss(1, 0.02)) for _ in range(40)])
    for _ in range(5):
        times.add(16, ratio * random_.gauss(1, 0.02))
        times.refit()
    fit = times.fit()
    assert fit is not None and fit.seconds(16) == pytest.approx(ratio, rel=0.05)


def test_a_time_that_does_not_depend_on_samples_is_no_division_by_zero() -> None:
    fixed, per_sample = both_parts(fitted([(size, 1.0) for size in [8, 16, 32] * 8]))
    assert fixed > 0.8 and per_sample > 0
    fixed, per_sample = both_parts(fitted([(size, 9 - size / 8) for size in [8, 16, 32] * 8]))
    assert fixed > 0 and per_sample > 0  # slower with fewer samples: noise


def test_a_saved_state_continues_alike() -> None:
    random_ = random.Random(4)
    times = StepTimes()
    steps = [(random_.choice([8, 16]), random_.gauss(1, 0.1)) for _ in range(80)]
    steps += [(16, random_.gauss(1, 0.1)) for _ in range(60)]  # the ratio is only remembered
    others: list[StepTimes] = []
    for number, step in enumerate(steps):
        for each in (times, *others):
            each.add(*step)
            if number % 3:
                each.refit()
            assert each.state() == times.state()
            assert each.fit() == times.fit()
        if number % 10 == 1:
            others.append(StepTimes.load(json.loads(json.dumps(times.state()))))
