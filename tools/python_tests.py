"""Run pytest, and once more each test that failed by a time bound. `make test` and `make tcp` do.

python tools/python_tests.py [pytest's arguments]

Several processes run the tests: tests/rig/turns.py says which tests may run beside others.
`-n 0` is one process. The suite starts thousands of processes and bounds many of them in seconds.
tools/reruns.py says what may be run again and why.

In pytest this file is a plugin, too: it writes down which tests failed, and whether by a time bound
only. A test counts as too slow if it has the mark `time_bound` and its body, not its set-up or
tear-down, raised `TookTooLong` (tests/rig/time_bound.py). With several processes each sends its
reports to the one that writes $TIME_BOUNDS_FILE.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import machine
import pytest
import reruns

TOOLS = Path(__file__).resolve().parent

_TESTS_FAILED = 1  # pytest's exit status; others are for what is no test's failure
GIB_PER_PROCESS = 1.5  # it, the process that its ranks are forked from, and up to eight ranks


def processes() -> int:
    """How many run tests: two more than cores, since tests wait. Each takes seconds to begin."""
    cores, by_memory = len(os.sched_getaffinity(0)), int(machine.memory_gib() / GIB_PER_PROCESS)
    return max(1, min(cores + 2, by_memory))


def _run(arguments: Sequence[str], failures: Path) -> tuple[int, str]:
    """Runs pytest, passes its output on as it comes; returns its exit status and last line."""
    command = [sys.executable, "-m", "pytest", "--color=no", "--require-native", *arguments]
    paths = [str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TIME_BOUNDS_FILE": str(failures)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace", env=env)
    last = "no output"
    for line in child.stdout or []:
        print(line, end="", flush=True)
        last = line.strip() or last
    return child.wait(), re.sub(r"^=+ | =+$", "", last)


def _too_slow(failures: Path) -> list[str]:
    """Tests that may run again: none if any test failed in another way, or pytest itself died."""
    if not failures.exists():
        return []
    found = json.loads(failures.read_text())
    return [] if found["wrong"] or len(found["slow"]) > reruns.FEW else found["slow"]


def run(arguments: Sequence[str]) -> tuple[int, str]:
    """Runs the tests; returns the exit status, and the counts in words."""
    with tempfile.TemporaryDirectory(prefix="pycomm-pytest-") as folder:
        failures = Path(folder) / "failures.json"
        plugin = ["-p", "python_tests", "-o", f"cache_dir={folder}", "-n", str(processes())]
        code, counts = _run([*plugin, *arguments], failures)
        names = _too_slow(failures)
        if code != _TESTS_FAILED or not names:
            return code, counts
        print(f"=== too slow, run again alone: {', '.join(names)}", flush=True)
        again = ["--last-failed", "--last-failed-no-failures=none", "-n", "0"]
        code, _ = _run([*plugin, *arguments, *again], failures)
    return code, counts + reruns.report(names, code == 0)


# --- the plugin

_slow: set[str] = set()
_wrong: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.too_slow = (  # type: ignore[attr-defined]
        report.when == "call"
        and call.excinfo is not None
        and call.excinfo.typename == "TookTooLong"
        and item.get_closest_marker("time_bound") is not None
    )
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:  # the report of a crashed process has no such attribute
        (_slow if getattr(report, "too_slow", False) else _wrong).add(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _wrong.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    if session.shouldfail or session.shouldstop:  # as -x does: what did not run is not known
        _wrong.add("stopped early")
    record = {"slow": sorted(_slow - _wrong), "wrong": sorted(_wrong)}
    Path(os.environ["TIME_BOUNDS_FILE"]).write_text(json.dumps(record))


if __name__ == "__main__":
    exit_status, in_words = run(sys.argv[1:])
    print(f"Python: {in_words}")
    sys.exit(exit_status)
