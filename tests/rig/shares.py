"""A fifth of the cases on each day: all of them run within any five days in a row.

A run has the cases of today's share and those in `always.txt`: of the fault cases, of the tests
with the mark `in_shares`, with or without parameters, and of slow C++ tests under sanitizers
(tools/cpp_shares.py). With pytest's `--all-in-shares`, every test comes in shares. A case's share
depends on its name alone, so a new case moves no other one to another day. Cases that also have the
mark `every_day` are part of each run: one of each promise that the documents make.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

SHARES = 5
ALWAYS = Path(__file__).resolve().parents[1] / "python" / "always.txt"
CASE = "case"
"""The property of a test's report that has the name of its case, for tests that come in shares."""

T = TypeVar("T")


def share() -> int:
    """Today's share: ``SHARE`` from the environment, else the UTC day number modulo ``SHARES``."""
    given = os.environ.get("SHARE", "")
    if not given:
        return int(time.time() // 86400) % SHARES
    if not given.isdecimal() or int(given) >= SHARES:
        raise SystemExit(f"SHARE={given!r} is not allowed: use a number from 0 to {SHARES - 1}")
    return int(given)


def choose() -> None:
    """Chooses once for this process and its children, before midnight comes."""
    os.environ["SHARE"] = str(share())


def share_of(name: str) -> int:
    """The share of the case with this name."""
    return zlib.crc32(name.encode()) % SHARES


def always(path: Path | None = None) -> set[str]:
    """The names of cases that have failed once and run on every day since."""
    lines = (path or ALWAYS).read_text().splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def part_of(
    cases: Sequence[T], name_of: Callable[[T], str], daily: Callable[[T], bool] = lambda _: False
) -> list[T]:
    """The cases of today's share and those that always run."""
    today, kept = share(), always()
    return [
        each
        for each in cases
        if share_of(name_of(each)) == today or name_of(each) in kept or daily(each)
    ]


def remember(names: Iterable[str], path: Path | None = None) -> list[str]:
    """Adds names to the cases that always run; returns those that are new there."""
    new = sorted(set(names) - always(path))
    with (path or ALWAYS).open("a") as file:
        file.writelines(f"{name}\n" for name in new)
    return new
