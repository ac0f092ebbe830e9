"""Which samples of a dataset each rank trains on: an epoch's order, cut by the shares of batches.

A batch takes the next indices of the epoch's list, and its shares cut them among the ranks. If a
rank is gone, nobody trains its part of the batches that had been dealt to it as well. From the
first batch that is not, these indices are at the front of what is left of the list. So an epoch of
which a rank is lost has more batches. If that batch is one of the next epoch, they come there, and
so do those that the epoch's last batch has not taken.

Worked example: 12 samples in order, batches of 4, and two ranks with 2 each. Batch 0 is [0 1 |
2 3]. The second rank dies in batch 1, [4 5 | 6 7], and is dealt batch 2, [8 9 | 10 11], as well.
The list is at its end, and has then [6 7 10 11]: batch 3 of the first rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pycomm.balance.share_plan import Change, Departure


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """The indices of a dataset in the order of an epoch: (length,) int64, on the CPU.

    The generator's seed is a hash, since epoch 1 of seed 0 must not be epoch 0 of seed 1.
    """
    if not shuffle:
        return torch.arange(length)
    hashed = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(hashed, "little") >> 1)
    return torch.randperm(length, generator=generator)


class Rest(NamedTuple):
    """Of an epoch's list."""

    first: tuple[int, ...] = ()
    """Indices that had been dealt to ranks that are gone."""
    skipped: int = 0
    """Then the epoch's order, without as many at its begin."""


class Dealt(NamedTuple):
    """One batch: the begin of a list, cut by its shares. Which indices these are is looked up when
    they are asked for, since a rank needs only its own, unless others die."""

    change: Change
    rest: Rest
    order: Any
    """Of the epoch: an array of numpy's, of which a slice takes a third of a tensor's time."""

    def part(self, member: int) -> list[int]:
        """Of this member; nothing if it has no share."""
        _, shares, members = self.change
        if member not in members:
            return []
        at = members.index(member)
        return self.indices(sum(shares[:at]), sum(shares[: at + 1]))

    def indices(self, begin: int, end: int) -> list[int]:
        """Those from ``begin`` to ``end`` of the whole batch's."""
        first, skipped = self.rest
        back = len(first)
        new = self.order[skipped + max(0, begin - back) : skipped + max(0, end - back)]
        return [*first[begin:end], *new.tolist()]


class Deals:
    """The batches of one rank's loader: what each rank has of them, also of those to come.

    Pure. A batch's deal depends on the order, and on the ``Change`` and ``Departure`` records up to
    it. So ranks that deal a batch at different times deal alike.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._order: Any = None
        self._carried: tuple[int, ...] = ()
        self._rests: dict[int, Rest] = {0: Rest()}  # before each batch
        self._dealt: dict[int, Dealt] = {}
        self._next = 0

    @property
    def next_batch(self) -> int:
        """The batch after the one that was dealt last."""
        return self._next

    def start(self, batch: int, order: torch.Tensor, departures: Sequence[Departure]) -> None:
        """This batch is the first of another epoch. It begins with indices that came back, and
        that no batch of the last one has taken; also those that came back at one of the passes
        between them, of which there is no batch."""
        back = self.next_first(batch, [each for each in departures if each.until < batch])
        self._order = order.numpy()
        self._put(batch, Rest(back))
        self._carried = ()

    def resume(self, batch: int, order: torch.Tensor, rest: Rest, carried: Sequence[int]) -> None:
        """This batch is the next one of an epoch of which so much is left.

        Args:
            batch: Its number.
            order: Of the epoch.
            rest: As ``rest()`` returned it.
            carried: The same: it comes back in the next epoch.
        """
        self._order = order.numpy()
        self._rests, self._dealt = {}, {}
        self._put(batch, rest)
        self._carried = tuple(carried)

    def has(self, batch: int, change: Change, departures: Sequence[Departure]) -> bool:
        """Whether the epoch has this batch."""
        return sum(change.shares) <= self._count(self._before(batch, departures))

    def deal(self, batch: int, change: Change, departures: Sequence[Departure]) -> Dealt | None:
        """Deals a batch to the change's members; None if the epoch is at its end.

        Args:
            batch: ``next_batch``, or one before: then that and later ones are dealt anew.
            change: Its shares.
            departures: All that are kept; of those whose ``until`` this is, it has the parts back.
        """
        rest, total = self._before(batch, departures), sum(change.shares)
        if total > self._count(rest):
            return None
        new = max(0, total - len(rest.first))
        self._put(batch + 1, Rest(rest.first[total:], rest.skipped + new))
        dealt = self._dealt[batch] = Dealt(change, rest, self._order)
        return dealt

    def members_of(self, batch: int) -> Collection[int] | None:
        """The members that have a part of this batch; None if it was not dealt."""
        return self._dealt[batch].change.members if batch in self._dealt else None

    def state(self, batch: int, departures: Sequence[Departure]) -> dict[str, Any]:
        """What ``load()`` continues from, before this batch: plain numbers, lists and dicts."""
        first, skipped = self._rests[batch]
        untrained = {
            number: [
                [member, dealt.part(member)]
                for each in departures
                if each.since <= number
                for member in each.members
                if member in dealt.change.members
            ]
            for number, dealt in self._dealt.items()
            if number < batch
        }
        return {
            "batch": batch,
            "carried": list(self._carried),
            "first": list(first),
            "skipped": skipped,
            "parts": [[number, parts] for number, parts in untrained.items() if parts],
        }

    def load(self, order: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Continues as the ``Deals`` whose ``state()`` it was, in an epoch of this order."""
        self.resume(
            int(state["batch"]),
            order,
            Rest(tuple(state["first"]), int(state["skipped"])),
            state["carried"],
        )
        for number, parts in state["parts"]:
            members = tuple(member for member, _ in parts)
            shares = tuple(len(part) for _, part in parts)
            indices = tuple(index for _, part in parts for index in part)
            self._dealt[number] = Dealt(Change(number, shares, members), Rest(indices), self._order)

    def rest(self, batch: int, departures: Sequence[Departure]) -> tuple[Rest, list[int]]:
        """What ``resume()`` continues from before this batch, and parts of earlier batches that
        nobody has trained, and that are not back in the list yet."""
        return self._before(batch, departures), [
            *self._carried,
            *self._to_return(batch, departures),
        ]

    def next_first(self, batch: int, departures: Sequence[Departure]) -> tuple[int, ...]:
        """What a next epoch begins with that ``start()`` would begin at this batch, or later."""
        batch = min(batch, self._next)
        first = self._before(batch, departures).first
        return (*self._to_return(batch, departures), *first, *self._carried)

    def forget(self, batch: int) -> None:
        """Nobody asks for what was dealt before this batch, but for the position."""
        batch = min(batch, self._next)
        for kept in (self._rests, self._dealt):
            for earlier in [each for each in kept if each < batch]:
                del kept[earlier]

    def _count(self, rest: Rest) -> int:
        return len(rest.first) + self._length - rest.skipped

    def _put(self, batch: int, rest: Rest) -> None:
        self._rests[batch] = rest
        self._next = batch

    def _before(self, batch: int, departures: Sequence[Departure]) -> Rest:
        rest = self._rests[batch]
        for each in reversed(departures):
            if each.until == batch:
                rest = Rest((*self._untrained(each, batch), *rest.first), rest.skipped)
        return rest

    def _to_return(self, batch: int, departures: Sequence[Departure]) -> list[int]:
        return [
            index
            for departure in departures
            if departure.until > batch
            for index in self._untrained(departure, batch)
        ]

    def _untrained(self, departure: Departure, until: int) -> list[int]:
        """Their parts of the batches before ``until``, which nobody has trained."""
        return [
            index
            for batch in range(departure.since, until)
            if batch in self._dealt
            for member in departure.members
            for index in self._dealt[batch].part(member)
        ]
