"""Waiting until a thread of this process waits, for what happens to it then."""

from __future__ import annotations

import threading
import time
from pathlib import Path

LOOKS_ASLEEP = 10
"""A thread that only waits for a lock or a page for a moment is awake at one of so many looks."""


def wait_until_asleep(thread: threading.Thread, timeout_s: float = 60.0) -> None:
    """Returns once the thread has been found asleep ``LOOKS_ASLEEP`` times in a row.

    Raises:
        TimeoutError: That was not so within ``timeout_s`` seconds.
    """
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")
    deadline, looks = time.monotonic() + timeout_s, 0
    while looks < LOOKS_ASLEEP:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{thread.name} was not asleep within {timeout_s:g} s")
        # "pid (name) state …": the name may hold anything, so look from its end.
        looks = looks + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
        time.sleep(0.002)
