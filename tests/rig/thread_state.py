"""Whether a thread is asleep, and waiting until one of this process is, for what happens then."""

from __future__ import annotations

import time
from pathlib import Path

LOOKS_ASLEEP = 20
"""A thread that only waits for a lock or a page for a moment is awake at one of so many looks."""


def state_in(folder: str) -> str:
    """The kernel's letter for the process or thread of a folder of /proc: "S" if it is asleep, "T"
    if it is stopped."""
    # "pid (name) state …": the name may hold anything, so look from its end.
    return Path(folder, "stat").read_text().rpartition(")")[2].split()[0]


def wait_until_asleep(thread_id: int | None, timeout_s: float = 60.0) -> None:
    """Returns once a thread of this process was asleep at ``LOOKS_ASLEEP`` looks in a row.

    Args:
        thread_id: The kernel's number of it, as ``Thread.native_id``.

    Raises:
        TimeoutError: It was not within ``timeout_s`` seconds.
    """
    deadline, looks = time.monotonic() + timeout_s, 0
    while looks < LOOKS_ASLEEP:
        if time.monotonic() > deadline:
            raise TimeoutError(f"thread {thread_id} was not asleep within {timeout_s:g} s")
        looks = looks + 1 if state_in(f"/proc/self/task/{thread_id}") == "S" else 0
        time.sleep(0.005)
