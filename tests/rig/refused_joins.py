"""How a rank's attempt to join ends where some rank is to be refused."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import pycomm

OTHER_VERSION = "OTHER_VERSION"
"""The wire version that a rank writes into the store in place of its own."""


_kept: list[dist.Store] = []
"""torch keeps a store's part in C++ only, which would have no functions then."""


class _OtherVersion(dist.Store):
    """A store into which every record of a rank comes with another version."""

    def __init__(self, store: Any, version: str) -> None:
        super().__init__()
        self._store, self._mark = store, f"pycomm {version}\n".encode()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(key, re.sub(rb"^pycomm \d+\n", self._mark, value))

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:  # type: ignore[override]
        self._store.wait(keys, *timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def deleteKey(self, key: str) -> bool:  # torch's name
        return bool(self._store.delete_key(key))


def _meeting(rank: int, world_size: int, timeout: timedelta) -> dict[str, Any]:
    place = os.environ["MEETING"]
    if (version := os.environ.get(OTHER_VERSION)) is None:
        return {"init_method": place}
    found, _, _ = next(dist.rendezvous(place, rank, world_size, timeout=timeout))
    _kept.append(_OtherVersion(found, version))
    return {"store": dist.PrefixStore("default_pg", _kept[-1])}  # torch's own prefix


def join(rank: int, world_size: int, timeout_s: float) -> dict[str, Any]:
    """Joins at the place in MEETING, and leaves: "type" of the error or "", "text", "peer" (None
    where it has none), the seconds that it "took" and when it "ended", by the machine's clock."""
    begin_s = time.monotonic()
    try:
        dist.init_process_group(
            "pycomm",
            **_meeting(rank, world_size, timedelta(seconds=timeout_s)),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (ValueError, pycomm.errors.PycommError) as error:
        name, text, peer = type(error).__name__, str(error), getattr(error, "peer", None)
    else:
        dist.destroy_process_group()
        name, text, peer = "", "", None
    end_s = time.monotonic()
    return {"type": name, "text": text, "peer": peer, "took": end_s - begin_s, "ended": end_s}
