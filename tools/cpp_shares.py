"""Select today's fifth of the slow C++ tests, for the runs under sanitizers.

tests/cpp/in_shares.txt lists them. tools/cpp.py takes a fifth of them on each day, with the rule of
tests/rig/shares.py: the UTC day number modulo 5 (SHARE= chooses), and always those that always.txt
names. Tests that are not listed run each time.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "rig"))

import shares  # noqa: E402

LISTED = ROOT / "tests" / "cpp" / "in_shares.txt"


def patterns() -> list[str]:
    """The lines of the list, without comments."""
    lines = (line.partition("#")[0].strip() for line in LISTED.read_text().splitlines())
    return [line for line in lines if line]


def names_in(listing: str) -> list[str]:
    """The tests that --gtest_list_tests has printed."""
    found, suite = [], ""
    for line in listing.splitlines():
        if re.match(r"\S+\.( |$)", line):
            suite = line.split()[0]
        elif suite and line.startswith("  "):
            found.append(suite + line.split()[0])
    return [name for name in found if "DISABLED_" not in name]


def names(folder: Path, prefix: Sequence[str]) -> list[str]:
    """All tests of the test programs in a build folder."""
    found = []
    for program in sorted((folder / "tests" / "cpp").glob("*_test")):
        command = [*prefix, str(program), "--gtest_list_tests"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found += names_in(done.stdout)
    return found


def later(every: Iterable[str]) -> list[str]:
    """Those that are listed and not of today's share."""
    listed = patterns()
    slow = [name for name in every if any(fnmatch.fnmatchcase(name, each) for each in listed)]
    today = set(shares.part_of(slow, str))
    return [name for name in slow if name not in today]


def unmatched(every: Sequence[str]) -> list[str]:
    """Patterns that match no test: of a test that was renamed, for example."""
    return [each for each in patterns() if not fnmatch.filter(every, each)]
