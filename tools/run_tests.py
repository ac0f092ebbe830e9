"""Run the C++ tests and then the Python tests; print one summary of both. What `make test` runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUITES = {
    "C++": [sys.executable, "tools/cpp.py", "plain"],
    "Python": [sys.executable, "tools/python_tests.py"],
}


def run_and_keep_last_line(command: list[str]) -> tuple[int, str]:
    """Run a command, pass its output on as it comes, and return its exit status and last line."""
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace")
    last = "no output"
    for line in child.stdout or []:
        print(line, end="", flush=True)
        last = line.strip() or last
    return child.wait(), last


def main() -> int:
    summary, failed = [], False
    for name, command in SUITES.items():
        print(f"=== {name} tests: {' '.join(command[1:])}", flush=True)
        code, last = run_and_keep_last_line(command)
        failed = failed or code != 0
        counted = last.removeprefix("C++ plain: ").removeprefix("Python: ")
        summary.append(f"{name}: {counted}" + (f" (exit {code})" if code else ""))
    print(f"make test: {'FAILED' if failed else 'passed'}. {'. '.join(summary)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
