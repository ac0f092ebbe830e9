"""How long a step takes on one rank, as a fixed part and a part per sample.

The fixed part (launches, the optimizer) does not shrink with a rank's share. Only steps with
different numbers of samples tell the two parts apart. Until there are some, the fit assumes that
they have the ratio that was measured before; at first, that the fixed part is a third of the time.
If that is wrong, the shares that follow from it are not the best ones, but different enough to
measure the ratio, and the next ones are.

Every rank computes the same bits, also with another Python or C library: no sum() of floats, which
is another one since Python 3.12, and no logarithm or power.
"""

from __future__ import annotations

import array
import collections
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_WINDOW = 40
"""Steps that the fit looks back. More hide slow drifts, fewer leave noise in."""
_FEWEST = 3
"""Steps before the first fit: their median survives one slow step, such as the first one."""
_USUAL_NOISE = 0.05
_USUAL_NOISE_COUNTS = 4
"""The noise of a step's time before it is known, and for how many steps that counts."""
_FIRST_RATIO = 0.5
"""The fixed part beside the part of the samples, before it is measured."""
_PRIOR = 0.01
"""How many steps the ratio known before counts for. Two shares a tenth apart outweigh it."""
_SPREAD = 0.1
"""Shares that differ by less than this part of their mean do not change the ratio known."""
_LEAST_SLOPE = 0.02
"""The part of a step's time that is taken to depend on its samples, at least."""
_FURTHEST = 2.0
"""The fit is trusted up to this many times the largest size that it knows."""
_JUMP = 0.1
_JUMP_NOISES = 3.0
"""A rank has changed its speed if steps differ by more than this part, and so many noises."""


class Fit(NamedTuple):
    """A rank's seconds per step: ``fixed + per_sample * samples``."""

    fixed: float
    per_sample: float
    error: float = 0.0
    """The standard error of these seconds, as a part of them; larger while steps are few."""
    reach: float = math.inf
    """The largest number of samples for which these seconds are to be trusted."""

    def seconds(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples


class StepTimes:
    """The last steps of one rank, and what they say about the next ones. Pure: no clock."""

    def __init__(self) -> None:
        # Arrays: after a step none of 80 objects would be in the processor's cache.
        self._samples = array.array("d")
        self._seconds = array.array("d")
        self._most = 0.0
        self._fixed_samples: float | None = None  # as many take as long as the fixed part
        self._fit: Fit | None = None

    def add(self, samples: float, seconds: float) -> None:
        """Takes one step: samples above 0, and a finite number of seconds above 0."""
        self._samples.append(samples)
        self._seconds.append(seconds)
        self._keep(_WINDOW)
        if samples > self._most:
            self._most = samples

    def refit(self) -> bool:
        """Lets ``fit()`` follow the steps that were added. Returns whether the speed changed."""
        if len(self._samples) < _FEWEST:
            return False
        by_size = self._by_size()
        if changed := self._has_changed(by_size):
            self._keep(_FEWEST)
            by_size = self._by_size()
        self._fit = self._computed(by_size)
        return changed

    def fit(self) -> Fit | None:
        """As of the last ``refit()``; None if there were not three steps."""
        return self._fit

    def state(self) -> dict[str, Any]:
        """What ``load`` continues from: plain numbers."""
        return {
            "steps": [list(step) for step in zip(self._samples, self._seconds, strict=True)],
            "fixed_samples": self._fixed_samples,
            "most": self._most,
            "fit": None if self._fit is None else list(self._fit),
        }

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> StepTimes:
        times = cls()
        for samples, seconds in state["steps"]:
            times.add(samples, seconds)
        times._fixed_samples = state["fixed_samples"]
        times._most = float(state["most"])
        times._fit = None if state["fit"] is None else Fit(*state["fit"])
        return times

    def _keep(self, most: int) -> None:
        """So many of the last steps."""
        del self._samples[:-most], self._seconds[:-most]

    def _by_size(self) -> dict[float, list[float]]:
        found: dict[float, list[float]] = collections.defaultdict(list)
        for samples, seconds in zip(self._samples, self._seconds, strict=True):
            found[samples].append(seconds)
        return found

    def _has_changed(self, by_size: Mapping[float, list[float]]) -> bool:
        """Whether the last three steps, of one size, are none that older ones let expect."""
        if len(set(self._samples[-_FEWEST:])) > 1:
            return False
        samples = self._samples[-1]
        older, last = by_size[samples][:-_FEWEST], by_size[samples][-_FEWEST:]
        return not _may_be(samples, statistics.median(last), {**by_size, samples: older})

    def _computed(self, by_size: Mapping[float, list[float]]) -> Fit:
        points = [(size, _middle(times), len(times)) for size, times in by_size.items()]
        mean, largest = _mean_size(points), max(by_size)
        if self._fixed_samples is None:
            self._fixed_samples = _FIRST_RATIO * mean
        fixed, slope = _line(points, mean, self._fixed_samples)
        if largest - min(by_size) > _SPREAD * mean:
            self._fixed_samples = fixed / slope
        noise = _noise(by_size, {size: fixed + slope * size for size in by_size})
        count = len(self._samples)
        error = noise / math.sqrt(count) * (1.0 + _FEWEST / count)
        return Fit(fixed, slope, error, max(self._most, _FURTHEST * largest))


Points = Sequence[tuple[float, float, int]]
"""Sizes, the seconds of each, and of how many steps."""


def _mean_size(points: Points) -> float:
    count = sum(each for _, _, each in points)
    return math.fsum(size * each for size, _, each in points) / count


def _may_be(samples: float, seconds: float, by_size: Mapping[float, Sequence[float]]) -> bool:
    """Whether batches of this size may take so long, if the speed is that of earlier ones.

    If there are none of this size, others tell. Whatever the fixed part is, a batch of twice the
    samples takes from one to two times as long. If there are several sizes, a line through them
    tells more, but less for sizes that are far from these.
    """
    if len(same := by_size[samples]) >= _FEWEST:
        middle = statistics.median(same)
        if _is_near(seconds, middle, middle, 0.0):
            return True  # as nearly always, and finding the noise takes longest
        noises = _JUMP_NOISES * _noise({samples: same}, {samples: middle})
        return _is_near(seconds, middle, middle, noises)
    known = {size: each for size, each in by_size.items() if len(each) >= _FEWEST}
    if not known:
        return True
    middles = {size: statistics.median(each) for size, each in known.items()}
    noises = _JUMP_NOISES * _noise(known, middles)
    least = max(middle * min(1.0, samples / size) for size, middle in middles.items())
    most = min(middle * max(1.0, samples / size) for size, middle in middles.items())
    near = _is_near(seconds, least, most, noises)
    if len(known) == 1 or not near:
        return near
    points = [(size, middle, len(known[size])) for size, middle in middles.items()]
    mean = _mean_size(points)
    spread = math.fsum(each * _square(size - mean) for size, _, each in points) / _FEWEST
    fixed, slope = _line(points, mean, 0.0)
    expected = fixed + slope * samples
    far = math.sqrt(1.0 + _square(samples - mean) / spread)
    return _is_near(seconds, expected, expected, noises * far)


def _is_near(seconds: float, least: float, most: float, noises: float) -> bool:
    limit = 1.0 + max(_JUMP, noises)
    return least / limit <= seconds <= most * limit


def _middle(times: list[float]) -> float:
    """The mean without the largest and smallest fifth.

    A median would take a rank that a quota stops in every third step for one that is never stopped.
    """
    times.sort()  # in place: the noise is then found in half the time
    cut = max(1, len(times) // 5) if len(times) > 2 else 0
    return statistics.fmean(times[cut : len(times) - cut])


def _noise(by_size: Mapping[float, Sequence[float]], expected: Mapping[float, float]) -> float:
    """The spread of measured to expected times: robust, and not taken for 0 while there are few."""
    off: list[float] = []
    for size, times in by_size.items():
        usual = expected[size]
        off += [abs(seconds / usual - 1.0) for seconds in times]
    spread = 1.4826 * statistics.median(off)
    squares = _USUAL_NOISE_COUNTS * _square(_USUAL_NOISE) + len(off) * _square(spread)
    return math.sqrt(squares / (_USUAL_NOISE_COUNTS + len(off)))


def _square(value: float) -> float:
    return value * value


def _line(points: Points, mean_samples: float, fixed_samples: float) -> tuple[float, float]:
    """The fixed part and the slope that fit (samples, seconds, count) best, neither negative.

    Least squares of fixed + slope * samples, and of fixed - slope * fixed_samples with a small
    weight, which decides if all points have the same number of samples.
    """
    count = sum(each for _, _, each in points)
    mean_seconds = math.fsum(seconds * each for _, seconds, each in points) / count
    spread = math.fsum(each * _square(samples - mean_samples) for samples, _, each in points)
    shared = math.fsum(
        each * (samples - mean_samples) * (seconds - mean_seconds)
        for samples, seconds, each in points
    )
    # fixed is mean_seconds - slope * mean_samples, but for a term of the order of the prior.
    reach = mean_samples + fixed_samples
    slope = (shared + _PRIOR * mean_seconds * reach) / (spread + _PRIOR * _square(reach))
    slope = min(max(slope, _LEAST_SLOPE * mean_seconds / mean_samples), mean_seconds / mean_samples)
    return max(0.0, mean_seconds - slope * mean_samples), slope
