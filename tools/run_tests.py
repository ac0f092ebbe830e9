"""Run the C++ tests and then the Python tests of a ring; print a table of both.

    python tools/run_tests.py test      # `make test`
    python tools/run_tests.py ci        # `make ci_tests`: slow ones, and those that inject faults

tests/rig/rings.py says which Python tests are of which ring, tests/cpp/slow_tests.txt which C++
tests are slow.
"""

from __future__ import annotations

import argparse
import re
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RINGS = {"test": [], "ci": ["--slow"]}
"""By name, the arguments that choose its C++ tests."""


def suites(ring: str) -> dict[str, list[str]]:
    """The commands that run the tests of this ring."""
    return {
        "C++": [sys.executable, "tools/cpp.py", "plain", *RINGS[ring]],
        "Python": [sys.executable, "tools/python_tests.py", f"--ring={ring}"],
    }


def run_and_keep_last_line(command: list[str], folder: Path = ROOT) -> tuple[int, str]:
    """Run a command, pass its output on as it comes, and return its exit status and last line."""
    child = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, errors="replace"
    )
    last = "no output"
    for line in child.stdout or []:
        print(line, end="", flush=True)
        last = line.strip() or last
    return child.wait(), last


def core_seconds() -> float:
    """What the processes that have ended have used of the cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ring", choices=RINGS, nargs="?", default="test")
    ring = parser.parse_args().ring
    table, summary, failed = [], [], False
    for name, command in suites(ring).items():
        print(f"=== {name} tests: {shlex.join(command[1:])}", flush=True)
        began_s, used_s = time.monotonic(), core_seconds()
        code, last = run_and_keep_last_line(command)
        took_s, used_s = time.monotonic() - began_s, core_seconds() - used_s
        failed = failed or code != 0
        counted = re.sub(r"^(C\+\+ plain( slow)?|Python): ", "", last)
        summary.append(f"{name}: {counted}" + (f" (exit {code})" if code else ""))
        table.append(f"{name:<7} {took_s:>5.0f} s {used_s:>5.0f} s of cores  {last}")
    print("\n".join(["", *table]))
    print(f"tests of ring {ring}: {'FAILED' if failed else 'passed'}. {'. '.join(summary)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
