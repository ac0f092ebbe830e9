"""Run the C++ tests and then the Python tests; print a table of both. What `make test` runs.

`make share` runs the Python tests that are slow or inject faults, a fifth of them on each day.
"""

from __future__ import annotations

import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUITES = {
    "C++": [sys.executable, "tools/cpp.py", "plain"],
    "Python": [sys.executable, "tools/python_tests.py", "-m", "not in_shares and not faults"],
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
    table, summary, failed = [], [], False
    for name, command in SUITES.items():
        print(f"=== {name} tests: {shlex.join(command[1:])}", flush=True)
        began_s, used_s = time.monotonic(), core_seconds()
        code, last = run_and_keep_last_line(command)
        took_s, used_s = time.monotonic() - began_s, core_seconds() - used_s
        failed = failed or code != 0
        counted = last.removeprefix("C++ plain: ").removeprefix("Python: ")
        summary.append(f"{name}: {counted}" + (f" (exit {code})" if code else ""))
        table.append(f"{name:<7} {took_s:>5.0f} s {used_s:>5.0f} s of cores  {last}")
    print("\n".join(["", *table]))
    print(f"make test: {'FAILED' if failed else 'passed'}. {'. '.join(summary)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
