"""Which connections a server greets, and when: any process can write where workers arrive."""

from __future__ import annotations

import threading
import time
from typing import Any

from pycomm.service.notices import RareWarnings
from pycomm.service.session import MOST_NUMBERS, PREFIX, SESSIONS

_HELLO_S = 30.0
"""From the number that a worker takes to its hello, and to the thread that greets it."""
_MOST_WAITING = 1024
_MOST_GREETED = 64
"""Connections at once that have written a hello, and have not joined yet."""


class Door:
    """Finds the hellos that have come. On the thread of serve(), but for greeted()."""

    def __init__(self, address: str, warnings: RareWarnings) -> None:
        self._address, self._warnings = address, warnings
        self._seen = 0
        self._waiting: dict[int, float] = {}  # numbers, and until when their hellos may come
        self._lock = threading.Lock()
        self._greeting: set[int] = set()  # guarded by it

    def arrived(self, store: Any) -> list[int]:
        """Numbers whose hello is in the store. Call greeted() for each of them afterwards."""
        now = time.monotonic()
        self._list_new(store, now)
        with self._lock:
            busy = frozenset(self._greeting)
        found: list[int] = []
        for number, until in list(self._waiting.items()):
            if now > until:
                del self._waiting[number]
            elif len(busy) + len(found) == _MOST_GREETED:
                break
            elif number not in busy and store.check([f"{PREFIX}/{number}/hello"]):
                del self._waiting[number]
                found.append(number)
        with self._lock:
            self._greeting.update(found)
        return found

    def greeted(self, number: int) -> None:
        """It has joined, or was sent away. On any thread."""
        with self._lock:
            self._greeting.discard(number)

    def _list_new(self, store: Any, now: float) -> None:
        taken = self._numbers_taken(store)
        first = self._seen if self._seen <= taken else 0  # another process has set it back
        for number in range(max(first, taken - _MOST_WAITING) + 1, taken + 1):
            self._waiting[number] = now + _HELLO_S
        for number in list(self._waiting)[:-_MOST_WAITING]:
            del self._waiting[number]
        self._seen = taken

    def _numbers_taken(self, store: Any) -> int:
        """How many numbers workers have taken. Anybody who reaches the store can write there."""
        value = value_now(store, SESSIONS)
        if value is None:
            return 0
        # Not add(): where there is no number, the store closes this process's connection to it.
        if len(value) < len(str(MOST_NUMBERS)) and value.isdigit():
            return int(value)
        self._warnings.add(
            "another process has written %r where the parameter service at %s counts connections; "
            "it begins again from 0",
            value[: len(str(MOST_NUMBERS))],
            self._address,
        )
        store.set(SESSIONS, "0")  # and not what it was: that may be as large as it can be
        return 0


def value_now(store: Any, key: str) -> bytes | None:
    """What the store holds under ``key``, or None. Never waits, as get() does for a missing key."""
    for no_value in (b"-", b"+"):  # a value is at most one of the two
        value: bytes = store.compare_set(key, no_value.decode(), no_value.decode())
        if value != no_value:
            return value
    return None
