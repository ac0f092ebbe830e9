"""The one assertion whose failure may be run again: a bound on elapsed time.

A test that uses it has the mark `time_bound`. Any process may lose its core for half a second, so
`tools/python_tests.py` runs such a test once more if it raised `TookTooLong` and nothing else
failed. Assert values first and times last: a wrong value must be the failure that is seen.

With TEST_NO_TIME_BOUNDS set, nothing is too late: tools/seam.py sets it, as under the sanitizers
everything takes several times as long.
"""

from __future__ import annotations

import os


class TookTooLong(AssertionError):
    """Something was right, and late."""


def assert_within(took_s: float, limit_s: float, what: str = "") -> None:
    """Raises TookTooLong unless less than ``limit_s`` passed; ``what`` is shown with it."""
    if not took_s < limit_s and not os.environ.get("TEST_NO_TIME_BOUNDS"):
        raise TookTooLong(f"took {took_s:.3f} s, the limit is {limit_s:g} s. {what}".rstrip())
