"""Counts the operations of a group from readings of its flight record, which forgets old ones."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

UNKNOWN = "unknown"
"""The kind of operations that the record had forgotten before they were read."""
_ENDED = ("done", "failed")
_NS_PER_S = 1e9


class OperationCounts:
    """The counts of one group on one rank, by kind of operation.

    A record holds the last operations only. They are numbered (tickets), so the number of those
    that came and went between two readings is known, but not their kind. A number may be missing:
    the record passes over a slot whose operation still runs, and a slot may be just being written.
    """

    def __init__(self) -> None:
        self.issued: collections.Counter[str] = collections.Counter()
        self.completed: collections.Counter[str] = collections.Counter()
        self.failed: collections.Counter[str] = collections.Counter()
        self.received_nbytes: collections.Counter[str] = collections.Counter()
        self.oldest_age_s = 0.0
        self._pending: dict[int, str] = {}
        self._last = 0
        self._missing: set[int] = set()

    @property
    def pending(self) -> int:
        """Operations that have not ended."""
        return len(self._pending)

    def wants(self, ticket: int) -> bool:
        """Whether ``update`` needs this operation, and not only its number."""
        return ticket > self._last or ticket in self._pending or ticket in self._missing

    def update(
        self,
        tickets: Iterable[int],
        operations: Iterable[Mapping[str, Any]],
        slots: int,
        now_ns: int,
    ) -> None:
        """Takes a reading.

        Args:
            tickets: Of all operations that the record has.
            operations: Those that are wanted, as the JSON of the record has them.
            slots: How many the record keeps.
            now_ns: By the clock of the record's times.
        """
        present = set(tickets)
        by_ticket = {one["ticket"]: one for one in operations}
        last = max(present | {self._last})  # the newest slots may be just being written
        forgotten = max(last - slots, self._last)
        lost = forgotten - self._last
        for ticket, one in by_ticket.items():
            if self._last < ticket <= forgotten:
                lost -= 1  # it runs, so its slot was passed over
            if ticket > self._last or ticket in self._missing:
                self.issued[one["op"]] += 1
                self._pending[ticket] = one["op"]
        if lost:
            self.issued[UNKNOWN] += lost
            self.completed[UNKNOWN] += lost
        # Looked for once more, next time: what is not there then was passed over.
        self._missing = set(range(forgotten + 1, last + 1)) - present
        self._last = last
        self._settle(by_ticket)
        issued_ns = min((by_ticket[one]["issued_ns"] for one in self._pending), default=now_ns)
        self.oldest_age_s = max(now_ns - issued_ns, 0) / _NS_PER_S

    def _settle(self, by_ticket: Mapping[int, Mapping[str, Any]]) -> None:
        for ticket, op in list(self._pending.items()):
            one = by_ticket.get(ticket)
            if one is None:  # it has ended, or the record has passed over it too often
                self.completed[op] += 1
            elif one["state"] in _ENDED:
                self.received_nbytes[op] += one["bytes_done"]
                (self.failed if one["state"] == "failed" else self.completed)[op] += 1
            else:
                continue
            del self._pending[ticket]
