"""The seconds of the cores that each test uses: `pytest --costs FILE` writes a line for each test.

Wall seconds tell little where several processes run tests. A line has the seconds of the cores, the
wall seconds and the test's name. Counted are the process that runs the test, the children that it
has waited for, and the ranks that zygotes have forked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zygote

_TICKS = os.sysconf("SC_CLK_TCK")


def _of_process(pid: int) -> float:
    """What a process and the children that it has waited for have used."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, words[11:15])) / _TICKS


def used_s() -> float:
    """What this process, its children and its zygotes have used."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + sum(map(_of_process, zygote.zygote_pids()))


class Plugin:
    """Writes the lines. Several processes may append to one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before_s, began_s = used_s(), time.monotonic()
        try:
            return (yield)
        finally:
            took_s = time.monotonic() - began_s
            with self._path.open("a") as file:
                file.write(f"{max(0.0, used_s() - before_s):.2f}\t{took_s:.2f}\t{item.nodeid}\n")
