"""Which shares each batch is dealt by, from the steps that all ranks have on record.

Batches and passes have one number: the model's n-th backward pass trains the n-th batch. A step
that was made of batches up to x decides the shares of batch x + lookahead and later ones, never of
earlier ones. So ranks whose loaders run ahead by different numbers of batches deal alike, as long
as none runs ahead further than lookahead allows; one that does gets an error, and no shares.

Worked example, lookahead 4, batches 0, 1, 2 …, one per step. Batches 0 to 3 have even shares. Step
0 decides batch 4, and its seconds are on record with step 1. A loader that is two batches ahead
pulls batch 4 before batch 2 is trained: step 1 is on record, so that is early enough.

A rank that is missing from a step is gone. Like all that a step decides, this holds from
``lookahead`` batches later on: until then batches are dealt to the rank that is gone as well, and
nobody trains its part of them (``Departure``). A rank that is new in a step has joined. It has a
share from the same batch on: until then batches are dealt to the others alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pycomm.balance.step_log import StepRecord
from pycomm.balance.step_times import Fit, StepTimes
from pycomm.balance.whole_shares import Limits, batch_seconds, best_shares, can_end, even_shares

LEAST_GAIN = 0.02
"""Shares change for a predicted gain above this, so that each batch size is met rarely."""
_ERRORS = 0.8
"""And above this many standard errors of the times, and about sqrt(2 ln N) more: of N equal ranks,
the one that seems slowest is expected to be that far off."""


_BUSY = 16
_QUIET = 3
"""Shares are decided in every third step, as that takes 25 µs per rank. But in every step from a
change of speeds or shares on, until so many steps with these shares are known; and at first."""


class Change(NamedTuple):
    """Shares, the first batch that has them, and whose they are."""

    batch: int
    shares: tuple[int, ...]
    members: tuple[int, ...]
    """In the order of the shares: see ``StepRecord.members``."""


class Departure(NamedTuple):
    """Ranks that are gone: they train no batch from ``since`` on, and are dealt none from ``until``
    on."""

    members: tuple[int, ...]
    since: int
    until: int


class SharePlan:
    """Pure: its state depends only on the records that it was given.

    Args:
        limits: Which shares are allowed.
        lookahead: How many batches later a step decides.
    """

    def __init__(self, limits: Limits, lookahead: int) -> None:
        self._limits = limits
        self._lookahead = lookahead
        members = tuple(range(len(limits.most)))
        self._times = {member: StepTimes() for member in members}
        self._history = [Change(0, even_shares(limits), members)]
        self._departures: list[Departure] = []
        self._has_all = True
        self._changes = 0
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
        return self._changes

    @property
    def newest(self) -> Change:
        """The last change that was decided, for a batch that may be still to come."""
        return self._history[-1]

    @property
    def limits(self) -> Limits:
        """Which shares are allowed to the newest members."""
        return self._limits

    @property
    def has_all(self) -> bool:
        """Whether the members are those that it was made for, as they always were."""
        return self._has_all

    @property
    def departures(self) -> list[Departure]:
        """Those whose ranks may still be dealt a batch that is not on record, the oldest first."""
        return self._departures

    def fits(self) -> list[Fit]:
        """The fit of each of the newest members; empty before all have one."""
        fits = [times.fit() for times in self._times.values()]
        known = [fit for fit in fits if fit is not None]
        return known if len(known) == len(fits) else []

    def add(self, record: StepRecord) -> None:
        """Takes the next record: it has the seconds of the step before it."""
        if self._open is not None:
            self._close(self._open, dict(zip(record.members, record.last_seconds, strict=True)))
            # Not in interrupt(), whose step may reach beyond an epoch: the next one begins with
            # what came back since.
            self._departures = [each for each in self._departures if each.until >= self._timed]
        self._open = record
        if list(record.members) != list(self._times):
            self._change_members(record)
        self._trained += record.batches

    def keep_within_limits(self, batch: int) -> None:
        """If its limits allow the shares of this batch or of later ones no more: finds others."""
        coming = [self.decided(batch), *(each for each in self._history if each.batch > batch)]
        if not all(self._limits.allow(each.shares) for each in coming):
            self._history = [each for each in self._history if each.batch < batch]
            self._history.append(Change(batch, self._likely_shares(), tuple(self._times)))
            self._changes += 1
            self._busy = self._lookahead + _BUSY

    def interrupt(self) -> None:
        """Steps follow that are not of these batches: how long the last one took is not known."""
        if self._open is not None:
            self._close(self._open, dict.fromkeys(self._open.members, math.nan))
            self._open = None

    def shares_of(self, batch: int) -> Change | None:
        """The shares of a batch; None if a step that may decide them is not on record yet."""
        if batch - self._lookahead >= self._timed:
            return None
        return self.decided(batch)

    def decided(self, batch: int) -> Change:
        """The shares of a batch, if no step decides others that is not on record yet. Of a batch
        before all changes that are kept: the oldest ones."""
        for each in reversed(self._history):
            if each.batch <= batch:
                return each
        return self._history[0]

    def state(self) -> dict[str, Any]:
        """What ``load`` continues from: plain numbers, strings, lists and dicts."""
        opened = self._open
        return {
            "members": list(self._times),
            "most": list(self._limits.most),
            "has_all": self._has_all,
            "trained": self._trained,
            "timed": self._timed,
            "busy": self._busy,
            "changes": self._changes,
            "history": [
                [each.batch, list(each.shares), list(each.members)] for each in self._history
            ],
            "departures": [
                [list(each.members), each.since, each.until] for each in self._departures
            ],
            "times": [times.state() for times in self._times.values()],
            "open": None
            if opened is None
            else [opened.batches, list(opened.samples), list(opened.members)],
        }

    @classmethod
    def load(cls, state: Mapping[str, Any], limits: Limits, lookahead: int) -> SharePlan:
        """The plan whose ``state()`` it was, made with the same arguments."""
        plan = cls(limits.of_ranks(state["most"]), lookahead)
        plan._has_all = bool(state["has_all"])
        plan._trained, plan._timed = int(state["trained"]), int(state["timed"])
        plan._changes, plan._busy = int(state["changes"]), int(state["busy"])
        plan._history = [
            Change(int(batch), tuple(map(int, shares)), tuple(map(int, members)))
            for batch, shares, members in state["history"]
        ]
        plan._departures = [
            Departure(tuple(map(int, members)), int(since), int(until))
            for members, since, until in state["departures"]
        ]
        times = map(StepTimes.load, state["times"])
        plan._times = dict(zip(map(int, state["members"]), times, strict=True))
        if (opened := state["open"]) is not None:
            batches, samples, members = opened
            plan._open = StepRecord(
                int(batches), [float(each) for each in samples], (), list(map(int, members)), ()
            )
        return plan

    def _close(self, record: StepRecord, seconds: Mapping[int, float]) -> None:
        # One that has joined has no part of the batches before its first.
        sizes = dict.fromkeys(record.members, 0)
        for batch in range(self._timed, self._timed + record.batches):
            change = self.decided(batch)
            for member, share in zip(change.members, change.shares, strict=True):
                if member in sizes:
                    sizes[member] += share
        self._timed += record.batches
        in_samples = math.isclose(math.fsum(record.samples), sum(sizes.values()))
        for member, samples in zip(record.members, record.samples, strict=True):
            # Samples of another unit, such as tokens, say nothing about what is dealt.
            size = samples if in_samples else sizes[member]
            took = seconds.get(member, math.nan)  # of a rank that is gone nobody knows
            if samples > 0 and math.isfinite(took) and took > 0:
                self._times[member].add(size / record.batches, took / record.batches)
        self._busy -= 1
        if self._busy >= 0 or self._busy % _QUIET == 0:
            self._decide(self._timed - 1 + self._lookahead)
        while len(self._history) > 1 and self._history[1].batch <= self._timed:
            self._history.pop(0)

    def _change_members(self, record: StepRecord) -> None:
        """Shares the samples out among those who have this step on record."""
        most: dict[int, int | None] = dict(zip(self._times, self._limits.most, strict=True))
        gone = tuple(each for each in most if each not in record.members)
        until = self._trained + record.batches - 1 + self._lookahead
        if gone:
            self._departures.append(Departure(gone, self._trained, until))
        for member, largest in zip(record.members, record.largest, strict=True):
            most.setdefault(member, largest or None)
        self._has_all = False
        self._limits = self._limits.of_ranks([most[member] for member in record.members])
        self._times = {each: self._times.get(each, StepTimes()) for each in record.members}
        self._history.append(Change(until, self._likely_shares(), tuple(self._times)))
        self._changes += 1
        self._busy = self._lookahead + _BUSY

    def _likely_shares(self) -> tuple[int, ...]:
        """The best ones. A rank that is not timed yet is taken for the mean of the others."""
        fits = [times.fit() for times in self._times.values()]
        known = [fit for fit in fits if fit is not None]
        if not known:
            return even_shares(self._limits)
        mean = Fit(
            math.fsum(fit.fixed for fit in known) / len(known),
            math.fsum(fit.per_sample for fit in known) / len(known),
        )
        return best_shares([fit or mean for fit in fits], self._limits)

    def _decide(self, batch: int) -> None:
        # Of all, so no any() around it.
        changed = [times.refit() for times in self._times.values()]
        if any(changed):
            self._busy = self._lookahead + _BUSY
        fits = self.fits()
        if not fits:
            return
        now = batch_seconds(fits, self.newest.shares)
        # 2 ln N is 1.4 log2 N, which needs no logarithm that another C library may round otherwise.
        errors = _ERRORS + math.sqrt(1.4 * (len(fits) - 1).bit_length())
        least = LEAST_GAIN + errors * max(fit.error for fit in fits)
        if not can_end(fits, self._limits, (1.0 - least) * now):
            return  # as nearly always, and the best shares take longer to find
        shares = best_shares(fits, self._reachable(fits))
        if 1.0 - batch_seconds(fits, shares) / now > least:
            self._history.append(Change(batch, shares, tuple(self._times)))
            self._changes += 1
            self._busy = self._lookahead + _BUSY

    def _reachable(self, fits: Sequence[Fit]) -> Limits:
        """The limits, and how far each fit is to be trusted."""
        unit, allowed = self._limits.unit, self._limits
        reached = [math.ceil(fit.reach / unit) * unit for fit in fits]
        most = tuple(min(pair) for pair in zip(allowed.most, reached, strict=True))
        # The newest shares were possible, and may not be measured yet.
        most = tuple(max(pair) for pair in zip(most, self.newest.shares, strict=True))
        return dataclasses.replace(allowed, most=most)
