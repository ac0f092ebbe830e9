"""Which failed tests may run again, and where that is reported.

Any thread may lose its core for half a second, so a bound on elapsed time may fail although the
code is right. Only such a failure is run again: at most two tests of a suite, alone, once. A crash,
a wrong value or a process left behind is never run again. Each rerun is named in the suite's last
line and, if $RERUNS_FILE is set, in that file: `.ci/run` and `make nightly` print it beside the
step's result.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

FEW = 2
"""If more tests than this are too slow, the code is slow. They are not run again."""


def report(names: Sequence[str], passed: bool) -> str:
    """Writes the rerun down; returns it in words, for the end of a summary."""
    how = "passed" if passed else "FAILED"
    if path := os.environ.get("RERUNS_FILE"):
        with Path(path).open("a") as file:
            file.writelines(f"{name} ({how})\n" for name in names)
    return f". TOO SLOW at first, {how} when run again alone: {', '.join(names)}"
