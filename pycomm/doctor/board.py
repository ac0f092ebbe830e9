"""What the hosts exchange: texts by topic and rank, in the store that the job itself would use."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

_PIECE = 800
"""Characters that are written at once: a packet of them passes where full packets vanish, which
the doctor is to find out."""


class Board:
    """One rank's view. Everything on it is JSON."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank

    def put(self, topic: str, content: Any) -> None:
        """Writes this rank's entry. Raises DistError if the store is gone."""
        text = json.dumps(content)
        pieces = [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{topic}/{self._rank}/{number}", piece)
        self._store.set(f"{topic}/{self._rank}", str(len(pieces)))

    def collect(self, topic: str, ranks: Iterable[int], timeout_s: float) -> dict[int, Any]:
        """The entries of these ranks, by rank; those that are not there in time are left out."""
        deadline = time.monotonic() + timeout_s
        found = {}
        for rank in ranks:
            key = f"{topic}/{rank}"
            if self._is_there(key, deadline - time.monotonic()):
                count = int(self._store.get(key))
                pieces = [self._store.get(f"{key}/{number}") for number in range(count)]
                found[rank] = json.loads(b"".join(pieces))
        return found

    def get(self, topic: str, rank: int, timeout_s: float) -> Any:
        """One rank's entry. Raises TimeoutError if it is not there in time."""
        found = self.collect(topic, [rank], timeout_s)
        if rank not in found:
            raise TimeoutError(f"rank {rank} did not write {topic!r} within {timeout_s:g} s")
        return found[rank]

    def _is_there(self, key: str, left_s: float) -> bool:
        """Polls: a store's wait() that ends without the key prints warnings of torch's own."""
        deadline, pause_s = time.monotonic() + left_s, 0.01
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.2)
        return True
