"""Integration tests: other libraries, run for real on two or more processes over pycomm.

Each test says with ``@pytest.mark.integration(library, what)`` what it shows. With
``--integration-results FILE`` the outcomes are written down as JSON, with the libraries' versions,
if every test has run: a record is of one day, one commit and one machine.
``tools/doc_tables.py`` makes the table of docs/integrations.md from that.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from borrow import python_conftest

HERE = Path(__file__).resolve().parent

# Nothing here may go and fetch.
os.environ["HF_HUB_OFFLINE"] = "1"
_shared = python_conftest(HERE)

from cases import ALL_S, case_runs, values  # noqa: E402

__all__ = ["case_runs", "values"]

no_process_left_behind = _shared.no_process_left_behind
no_pycomm_variables = _shared.no_pycomm_variables
pytest_unconfigure = _shared.pytest_unconfigure


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("case") is not None:  # the first one runs those of all others
            item.add_marker(pytest.mark.timeout(ALL_S + 30))
    _shared.pytest_collection_modifyitems(config, items)


def pytest_addoption(parser: pytest.Parser) -> None:
    _shared.pytest_addoption(parser)
    parser.addoption(
        "--integration-results", type=Path, metavar="FILE", help="write the outcomes as JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    _shared.pytest_configure(config)
    config.addinivalue_line(
        "markers", "integration(library, what): what this test shows, and of which library"
    )
    config.addinivalue_line("markers", "case(function, *args, run): see cases.py")
    config.stash[_ROWS] = {}
    config.stash[_LEFT_OUT] = []
    config.stash[_NOT_WRITTEN] = ""
    config.stash[_BEGAN] = (time.monotonic(), *_cpu_seconds())


_ROWS: pytest.StashKey[dict[str, dict[str, Any]]] = pytest.StashKey()
_LEFT_OUT: pytest.StashKey[list[str]] = pytest.StashKey()
"""Tests that -k, -m, --ring or --deselect has left out."""
_NOT_WRITTEN: pytest.StashKey[str] = pytest.StashKey()
_BEGAN: pytest.StashKey[tuple[float, float, float]] = pytest.StashKey()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        item.config.stash[_LEFT_OUT].append(item.nodeid)


def why_not_written(session: pytest.Session) -> str:
    """Why the rows of this session are no record of all tests; "" if they are."""
    left_out = session.config.stash[_LEFT_OUT]
    if left_out:
        return f"{len(left_out)} tests were left out"
    if any("::" in argument for argument in session.config.args):
        return "tests were named"
    files = {item.path.name for item in session.items}
    if missing := {path.name for path in HERE.glob("test_*.py")} - files:
        return f"no test of {', '.join(sorted(missing))} was collected"
    rows = session.config.stash[_ROWS]
    marked = [each for each in session.items if each.get_closest_marker("integration")]
    if any(item.nodeid not in rows for item in marked):
        return "it did not run to the end"
    return ""


def _cpu_seconds() -> tuple[float, float]:
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    mark = item.get_closest_marker("integration")
    if mark is None or (report.when != "call" and report.outcome == "passed"):
        return report
    library, what = mark.args
    shown = getattr(item, "callspec", None)
    case = f" [{shown.id}]" if shown is not None else ""
    row = item.config.stash[_ROWS].setdefault(
        item.nodeid, {"library": library, "what": what + case, "outcome": "passed", "note": ""}
    )
    if report.outcome != "passed":
        row["outcome"] = report.outcome
    if hasattr(report, "wasxfail"):
        row["outcome"] = "fails in the library"
        row["note"] = report.wasxfail.removeprefix("reason: ")
    elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        row["note"] = report.longrepr[2].removeprefix("Skipped: ")
    for name, value in item.user_properties:
        if name == "note":
            row["note"] = value
    return report


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Any:
    """Adds a remark to the test's row of the table, such as what a library says to a request."""

    def add(text: str) -> None:
        request.node.user_properties.append(("note", text))

    return add


def pytest_sessionfinish(session: pytest.Session) -> None:
    _shared.zygote.end_zygotes()  # else what the ranks used would not be counted
    path = session.config.getoption("--integration-results")
    rows = session.config.stash[_ROWS]
    session.config.stash[_NOT_WRITTEN] = why_not = why_not_written(session)
    if path is None or why_not:
        return
    from versions import version_of

    began_s, own_s, children_s = session.config.stash[_BEGAN]
    own_now_s, children_now_s = _cpu_seconds()
    versions = {name: version_of(name) for name in {row["library"] for row in rows.values()}}
    for row in rows.values():
        row["version"] = versions[row["library"]]
    record = {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "wall_s": round(time.monotonic() - began_s),
        "cpu_s": round(own_now_s - own_s + children_now_s - children_s),
        "rows": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def _commit() -> str:
    """The tested commit: a short hash, with a note if tracked files differ from it."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--exclude=*", "--dirty= with changes"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    began_s, own_s, children_s = config.stash[_BEGAN]
    own_now_s, children_now_s = _cpu_seconds()
    cpu_s = own_now_s - own_s + children_now_s - children_s
    wall_s = time.monotonic() - began_s
    terminalreporter.write_line(f"integrations: {wall_s:.0f} s, {cpu_s:.0f} CPU seconds")
    path, why_not = config.getoption("--integration-results"), config.stash[_NOT_WRITTEN]
    if path is not None and why_not:
        terminalreporter.write_line(f"{path} stays as it was: {why_not}")
