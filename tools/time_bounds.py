"""A pytest plugin: writes down which tests failed, and whether by a time bound only.

A test counts as too slow if it has the mark `time_bound` and its body, not its set-up or tear-down,
raised `TookTooLong` (tests/rig/time_bound.py). tools/python_tests.py loads this plugin and
decides by it; the file is $TIME_BOUNDS_FILE. With several processes each sends its reports to the
one that writes the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

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
