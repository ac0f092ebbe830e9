"""Which shares each batch is dealt by, from the steps that all ranks have on record.

Batches and passes have one number: the model's n-th backward pass trains the n-th batch. A step
that was made of batches up to x decides the shares of batch x + lookahead and later ones, never of
earlier ones. So ranks whose loaders run ahead by different numbers of batches deal alike, as long
as none runs ahead further than lookahead allows; one that does gets an error, and no shares.

Worked example, lookahead 4, batches 0, 1, 2 …, one per step. Batches 0 to 3 have even shares. Step
0 decides batch 4, and its seconds are on record with step 1. A loader that is two batches ahead
pulls batch 4 before batch 2 is trained: step 1 is on record, so that is early enough.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pycomm.balance.step_log import StepRecord
from pycomm.balance.step_times import Fit, StepTimes
from pycomm.balance.whole_shares import Limits, best_shares, even_shares, step_seconds

LEAST_GAIN = 0.02
"""Shares change for a predicted gain above this, so that each batch size is met rarely."""
_ERRORS = 0.8
"""And above this many standard errors of the times, and about sqrt(2 ln N) more: of N equal ranks,
the one that seems slowest is expected to be that far off."""


_BUSY = 16
_QUIET = 3
"""Shares are decided in every third step, as that takes 50 µs per rank. But in every step from a
change of speeds or shares on, until so many steps with these shares are known; and at first."""


class Change(NamedTuple):
    """Shares, and the first batch that has them."""

    batch: int
    shares: tuple[int, ...]


class SharePlan:
    """Pure: its state depends only on the records that it was given.

    Args:
        limits: Which shares are allowed.
        lookahead: How many batches later a step decides.
    """

    def __init__(self, limits: Limits, lookahead: int) -> None:
        self._limits = limits
        self._lookahead = lookahead
        self._times = [StepTimes() for _ in limits.most]
        self._changes = [Change(0, even_shares(limits))]
        self._count = 0
        self._busy = _BUSY
        self._trained = 0
        self._timed = 0
        self._open: StepRecord | None = None

    @property
    def trained(self) -> int:
        """How many batches are on record."""
        return self._trained

    @property
    def timed(self) -> int:
        """How many of them have all that is to be known of them."""
        return self._timed

    @property
    def changes(self) -> int:
        """How often shares have changed."""
        return self._count

    @property
    def newest(self) -> Change:
        """The last change that was decided, for a batch that may be still to come."""
        return self._changes[-1]

    def fits(self) -> list[Fit] | None:
        """Each rank's fit; None before all have one."""
        fits = [times.fit() for times in self._times]
        known = [fit for fit in fits if fit is not None]
        return known if len(known) == len(fits) else None

    def add(self, record: StepRecord) -> None:
        """Takes the next record: it has the seconds of the step before it."""
        if self._open is not None:
            self._close(self._open, record.last_seconds)
        self._open = record
        self._trained += record.passes

    def interrupt(self) -> None:
        """Steps follow that are not of these batches: how long the last one took is not known."""
        if self._open is not None:
            self._close(self._open, [math.nan] * len(self._times))
            self._open = None

    def shares_of(self, batch: int) -> tuple[int, ...] | None:
        """The shares of a batch; None if a step that may decide them is not on record yet."""
        if batch - self._lookahead >= self._timed:
            return None
        return self._in_effect(batch)

    def _in_effect(self, batch: int) -> tuple[int, ...]:
        return next(each.shares for each in reversed(self._changes) if each.batch <= batch)

    def state(self) -> dict[str, Any]:
        """What ``load`` continues from: plain numbers, strings, lists and dicts."""
        opened = self._open
        return {
            "trained": self._trained,
            "timed": self._timed,
            "busy": self._busy,
            "count": self._count,
            "changes": [[each.batch, list(each.shares)] for each in self._changes],
            "times": [times.state() for times in self._times],
            "open": None if opened is None else [opened.passes, list(opened.samples)],
        }

    @classmethod
    def load(cls, state: Mapping[str, Any], limits: Limits, lookahead: int) -> SharePlan:
        """The plan whose ``state()`` it was; its limits and lookahead must be equal, too."""
        plan = cls(limits, lookahead)
        plan._trained, plan._timed = int(state["trained"]), int(state["timed"])
        plan._count, plan._busy = int(state["count"]), int(state["busy"])
        plan._changes = [
            Change(int(batch), tuple(int(share) for share in shares))
            for batch, shares in state["changes"]
        ]
        plan._times = [StepTimes.load(each) for each in state["times"]]
        if (opened := state["open"]) is not None:
            passes, samples = opened
            plan._open = StepRecord(int(passes), [float(each) for each in samples], ())
        return plan

    def _close(self, record: StepRecord, seconds: Sequence[float]) -> None:
        batches = range(self._timed, self._timed + record.passes)
        self._timed += record.passes
        dealt = [self._in_effect(batch) for batch in batches]
        in_samples = math.isclose(math.fsum(record.samples), len(batches) * self._limits.total)
        for rank, times in enumerate(self._times):
            # Samples of another unit, such as tokens, say nothing about what is dealt.
            size = record.samples[rank] if in_samples else sum(shares[rank] for shares in dealt)
            took = seconds[rank]
            if record.samples[rank] > 0 and math.isfinite(took) and took > 0:
                times.add(size / len(batches), took / len(batches))
        self._busy -= 1
        if self._busy >= 0 or self._busy % _QUIET == 0:
            self._decide(batches[-1] + self._lookahead)
        while len(self._changes) > 1 and self._changes[1].batch <= self._timed:
            self._changes.pop(0)

    def _decide(self, batch: int) -> None:
        changed = [times.refit() for times in self._times]  # of all, so no any() around it
        if any(changed):
            self._busy = self._lookahead + _BUSY
        fits = self.fits()
        if fits is None:
            return
        limits = self._reachable(fits)
        now = step_seconds(fits, self.newest.shares)
        shares = best_shares(fits, limits)
        gain = 1.0 - step_seconds(fits, shares) / now
        # 2 ln N is 1.4 log2 N, which needs no logarithm that another C library may round otherwise.
        errors = _ERRORS + math.sqrt(1.4 * (len(fits) - 1).bit_length())
        if gain > LEAST_GAIN + errors * max(fit.error for fit in fits):
            self._changes.append(Change(batch, shares))
            self._count += 1
            self._busy = self._lookahead + _BUSY

    def _reachable(self, fits: Sequence[Fit]) -> Limits:
        """The limits, and how far each fit is to be trusted."""
        unit, allowed = self._limits.unit, self._limits
        reached = [math.ceil(fit.reach / unit) * unit for fit in fits]
        most = tuple(min(pair) for pair in zip(allowed.most, reached, strict=True))
        # The newest shares were possible, and may not be measured yet.
        most = tuple(max(pair) for pair in zip(most, self.newest.shares, strict=True))
        return dataclasses.replace(allowed, most=most)
