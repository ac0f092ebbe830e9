"""What faults take, in seconds, from the ends of steps of a training and of one without faults."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

from death_accounts import Accounts

_FEWEST = 10
"""Steps without a fault in a stretch, else the other training says what is usual."""


@dataclasses.dataclass
class Fault:
    """Something that was done to some ranks."""

    kind: str
    stretch: int
    at_s: float
    victims: Sequence[int]
    gone_step: int = -1
    """The first step without them."""
    come_s: float = 0.0
    """When the processes in their place were started."""
    whole_step: int = -1
    """The first step with all places taken."""
    over_step: int = -1


@dataclasses.dataclass
class Stretch:
    """A time in which one of the trainings ran."""

    begin_s: float
    end_s: float = 0.0


class Ends:
    """When steps ended, and with how many samples."""

    def __init__(self, accounts: Accounts) -> None:
        self._steps = [accounts.steps[number] for number in sorted(accounts.steps)]

    def samples(self, begin_s: float, end_s: float) -> int:
        return sum(each.samples for each in self._steps if begin_s < each.ended_s <= end_s)

    def spans(self, begin_s: float, end_s: float) -> list[float]:
        """Durations of the steps that ended in this time; the first one also began in it."""
        ends = [each.ended_s for each in self._steps if begin_s <= each.ended_s <= end_s]
        return [b - a for a, b in itertools.pairwise(ends)]

    def last_before(self, at_s: float) -> tuple[int, float]:
        found = max((each for each in self._steps if each.ended_s <= at_s), key=lambda e: e.number)
        return found.number, found.ended_s

    def end_of(self, number: int) -> float:
        return next(each.ended_s for each in self._steps if each.number == number)


@dataclasses.dataclass
class Cost:
    """What a fault took, in seconds."""

    kind: str
    goes_on: float
    """Until all others had committed a step without the victims."""
    lost: float
    """Of that, what steps do not take anyway."""
    stop: float
    """The longest step as newcomers came, less a usual one."""
    whole: float
    """From the start of the processes in their place until these were members."""
    window: float
    debt: float
    """What the samples that are missing in the whole window take at the usual pace."""


@dataclasses.dataclass
class Timed:
    """A training and when it ran."""

    accounts: Accounts
    stretches: list[Stretch] = dataclasses.field(default_factory=list)

    def rate(self, number: int | None = None) -> float:
        """Samples per second, in a stretch or in all."""
        ends = Ends(self.accounts)
        chosen = self.stretches if number is None else [self.stretches[number]]
        samples = sum(ends.samples(each.begin_s, each.end_s) for each in chosen)
        return samples / sum(each.end_s - each.begin_s for each in chosen)


def costs_of(faults: Sequence[Fault], struck: Timed, quiet: Timed) -> list[Cost]:
    """In the order of the faults."""
    ends = Ends(struck.accounts)
    found = []
    for fault in faults:
        stretch = struck.stretches[fault.stretch]
        over_s = ends.end_of(fault.over_step)
        others = [each for each in faults if each.stretch == fault.stretch]
        windows = sorted((each.at_s, ends.end_of(each.over_step)) for each in others)
        usual, rate = usual_of(ends, stretch, windows)
        if math.isnan(usual):  # no quiet moment in it
            usual, rate = usual_of(Ends(quiet.accounts), quiet.stretches[fault.stretch], [])
        before, before_s = ends.last_before(fault.at_s)
        gone_s = ends.end_of(fault.gone_step)
        joining = ends.spans(fault.come_s, over_s)
        found.append(
            Cost(
                fault.kind,
                gone_s - fault.at_s,
                gone_s - before_s - usual * (fault.gone_step - before),
                max(joining, default=0.0) - usual,
                ends.end_of(fault.whole_step) - fault.come_s,
                over_s - fault.at_s,
                over_s - fault.at_s - ends.samples(fault.at_s, over_s) / rate,
            )
        )
    return found


def usual_of(
    ends: Ends, stretch: Stretch, windows: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Seconds of a step, and samples per second, outside of these windows of a stretch."""
    spans: list[float] = []
    samples, seconds, at_s = 0, 0.0, stretch.begin_s
    for begin_s, end_s in [*windows, (stretch.end_s, stretch.end_s)]:
        if begin_s > at_s:
            spans += ends.spans(at_s, begin_s)
            samples += ends.samples(at_s, begin_s)
            seconds += begin_s - at_s
        at_s = max(at_s, end_s)
    if len(spans) < _FEWEST:
        return math.nan, math.nan
    return statistics.mean(spans), samples / seconds
