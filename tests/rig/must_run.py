"""With TEST_MUST_RUN=1, a skipped test of tests/python/security, elastic or faults fails.

Those tests hold what docs/security.md, docs/elastic.md and docs/errors.md promise, also across
hosts. On a machine that CI has prepared, as root, nothing that they need is missing, so a skip
there is a mistake of the machine or of the test.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

FOLDERS = ("security", "elastic", "faults")
VARIABLE = "TEST_MUST_RUN"
MAY_SKIP = (
    "CUDA",
    "sanitizers",
    "core files",
    "may open",
    "of free memory",
    "threads of other programs",
    "no control group",
    "libssl.so.3",
    "tc is not allowed",
    "another endpoint",
    "no endpoint",
)
"""Words in the reasons of skips that stay skips. They depend on the build, the interpreter, or
limits of the machine that CI does not change, or name a case that does not exist."""


def wanted() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.path.parent.name in FOLDERS:
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        if not any(word in str(reason) for word in MAY_SKIP):
            report.outcome = "failed"
            report.longrepr = f"{VARIABLE} is set, and the test was skipped. {reason}"
    return report
