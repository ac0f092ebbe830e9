"""Run pytest; what fails, if it is little, is run once more, alone. `make test` and `make tcp` do.

python tools/python_tests.py [pytest's arguments]

The suite starts thousands of processes and bounds many of them in seconds. On a machine whose cores
are lent elsewhere for a while, one of a thousand tests may fail for that reason alone. A second run
tells this from a mistake; the test is named in the last line all the same, as one to be mended.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FEW = 2
"""More failures than this are no accident, and are not run again."""

_TESTS_FAILED = 1  # pytest's exit status; others are for what is no test's failure


def _run(arguments: Sequence[str]) -> tuple[int, str]:
    """Runs pytest, passes its output on as it comes; returns its exit status and last line."""
    command = [sys.executable, "-m", "pytest", "--color=no", "--require-native", *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace")
    last = "no output"
    for line in child.stdout or []:
        print(line, end="", flush=True)
        last = line.strip() or last
    return child.wait(), re.sub(r"^=+ | =+$", "", last)


def _failed(cache: Path) -> list[str]:
    remembered = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(remembered.read_text())) if remembered.exists() else []


def run(arguments: Sequence[str]) -> tuple[int, str]:
    """Runs the tests; returns the exit status, and the counts in words."""
    with tempfile.TemporaryDirectory(prefix="pycomm-pytest-") as folder:
        cache = ["-o", f"cache_dir={folder}"]
        code, counts = _run([*cache, *arguments])
        failed = _failed(Path(folder))
        if code != _TESTS_FAILED or not 0 < len(failed) <= FEW:
            return code, counts
        names = ", ".join(failed)
        print(f"=== once more, alone: {names}", flush=True)
        code, again = _run([*cache, *arguments, "--last-failed", "--last-failed-no-failures=none"])
    if code == 0:
        return 0, f"{counts}. FLAKY, passed when run again alone: {names}"
    return code, f"{counts}. Run again alone: {again}"


if __name__ == "__main__":
    exit_status, in_words = run(sys.argv[1:])
    print(f"Python: {in_words}")
    sys.exit(exit_status)
