"""How many samples of a batch each rank takes: whole numbers that add up to the global batch."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from pycomm.balance.step_times import Fit

_HALVINGS = 60


@dataclasses.dataclass(frozen=True)
class Limits:
    """Which shares are allowed. All of its numbers but ``unit`` are multiples of ``unit``."""

    whole: int
    """The samples of a batch, if the ranks can take them."""
    unit: int
    fewest: int
    """The least share of any rank."""
    most: tuple[int, ...]
    """Of each rank."""

    @property
    def total(self) -> int:
        """The samples of a batch."""
        return min(self.whole, sum(self.most))

    @classmethod
    def of(cls, total: int, *, unit: int, fewest: int, most: Sequence[int | None]) -> Limits:
        """Rounds each rank's limits to what its shares can be.

        Args:
            total: The samples of a batch.
            unit: Shares are multiples of it.
            fewest: The least share of any rank.
            most: The largest share of each rank; None: no limit.

        Raises:
            ValueError: No shares are allowed.
        """
        ranks = len(most)
        if total % unit:
            raise ValueError(
                f"global_batch={total} is not a multiple of multiple_of={unit}. Try: "
                f"global_batch={total - total % unit or unit}"
            )
        least = -(-fewest // unit) * unit
        if least * ranks > total:
            raise ValueError(
                f"global_batch={total} is too small for {ranks} ranks, each of which takes at "
                f"least {least}. Try: global_batch={least * ranks}"
            )
        limits = [total if each is None else each // unit * unit for each in most]
        for rank, limit in enumerate(limits):
            if limit < least:
                raise ValueError(
                    f"max_batch={most[rank]} of rank {rank} is below the least share, {least}. "
                    "Try: a larger max_batch there, or a smaller min_batch or multiple_of"
                )
        if sum(limits) < total:
            raise ValueError(
                f"max_batch of all ranks together is {sum(limits)}, less than "
                f"global_batch={total}. Try: a smaller global_batch, or a larger max_batch"
            )
        return cls(total, unit, least, tuple(min(each, total) for each in limits))

    def allow(self, shares: Sequence[int]) -> bool:
        """Whether a batch may have these shares."""
        return sum(shares) == self.total and all(
            self.fewest <= share <= most and share % self.unit == 0
            for share, most in zip(shares, self.most, strict=True)
        )

    def of_ranks(self, most: Sequence[int | None]) -> Limits:
        """The limits of other ranks, whose largest shares these are. None: no limit."""
        units = (self.whole if each is None else each // self.unit * self.unit for each in most)
        return dataclasses.replace(self, most=tuple(min(each, self.whole) for each in units))


def even_shares(limits: Limits) -> tuple[int, ...]:
    """As equal as the limits allow; of equal ranks, the first ones take more."""
    return best_shares([Fit(0.0, 1.0)] * len(limits.most), limits)


def batch_seconds(fits: Sequence[Fit], shares: Sequence[int]) -> float:
    """The time of a batch, which ends when the last rank has ended."""
    return max(fit.seconds(share) for fit, share in zip(fits, shares, strict=True))


def can_end(fits: Sequence[Fit], limits: Limits, seconds: float) -> bool:
    """Whether a batch may be so short. Never False if it may: it allows a billionth more."""
    return sum(_within(fits, limits, seconds * (1.0 + 1e-9))) >= limits.total


def best_shares(fits: Sequence[Fit], limits: Limits) -> tuple[int, ...]:
    """The shares with the shortest batch; of equally good ranks the first ones take more.

    One unit after the other, each to the rank that would end first with it, is best, since times
    grow with shares. To save most of these steps, it begins at the largest shares that are certain:
    those of the longest time in which not all units fit. Example: times 1·n and 3·n, 8 units: after
    5.9 there are 5 and 1, and the rest goes to times 6 (first) and 6 (second): 6 and 2.
    """
    unit = limits.unit
    shares = [limits.fewest] * len(fits)
    low, high = 0.0, max(fit.seconds(limits.total) for fit in fits)
    for _ in range(_HALVINGS):
        if limits.total - sum(shares) <= len(fits) * unit:
            break
        middle = (low + high) / 2
        tried = _within(fits, limits, middle)
        if sum(tried) <= limits.total:
            low, shares = middle, tried
        else:
            high = middle
    free = [
        (fit.seconds(share + unit), rank)
        for rank, (fit, share) in enumerate(zip(fits, shares, strict=True))
        if share + unit <= limits.most[rank]
    ]
    heapq.heapify(free)
    for _ in range((limits.total - sum(shares)) // unit):
        _, rank = heapq.heappop(free)
        shares[rank] += unit
        if shares[rank] + unit <= limits.most[rank]:
            heapq.heappush(free, (fits[rank].seconds(shares[rank] + unit), rank))
    return tuple(shares)


def _within(fits: Sequence[Fit], limits: Limits, seconds: float) -> list[int]:
    """The largest share that each rank ends in this time, between its limits."""
    unit = limits.unit
    return [
        min(max(int((seconds - fit.fixed) / (fit.per_sample * unit)) * unit, limits.fewest), most)
        for fit, most in zip(fits, limits.most, strict=True)
    ]


def why_leave_out(fits: Sequence[Fit], limits: Limits, gain: float, members: Sequence[int]) -> str:
    """A sentence that names a rank without which a batch is shorter by the part ``gain``; or "".

    ``members``: the numbers of the ranks, in the order of ``fits``.
    """
    if len(fits) < 2:
        return ""
    shares = best_shares(fits, limits)
    now = batch_seconds(fits, shares)
    worst = max(range(len(fits)), key=lambda rank: fits[rank].seconds(shares[rank]))
    rest = limits.of_ranks([most for rank, most in enumerate(limits.most) if rank != worst])
    if rest.total < limits.total:
        return ""
    without = [fit for rank, fit in enumerate(fits) if rank != worst]
    then = batch_seconds(without, best_shares(without, rest))
    if then > (1.0 - gain) * now:
        return ""
    return (
        f"rank {members[worst]} is better left out: with it a batch takes {now:.3g} s, and "
        f"{then:.3g} s without it"
    )
