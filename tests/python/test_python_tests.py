"""What `make test` does with a test that fails: it is run again, and told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "python_tests.py"

SUITE = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(3))
def test_one(number):
    before = Path(__file__).with_name(f"ran_{number}")
    ran = before.exists()
    before.touch()
    assert ran or number >= FIRST_TIME
    assert number >= ALWAYS
"""


def outcome(folder: Path, *, first_time: int, always: int) -> tuple[int, str]:
    """Runs three tests, of which so many fail the first time, and so many always."""
    text = SUITE.replace("FIRST_TIME", str(first_time)).replace("ALWAYS", str(always))
    (folder / "test_suite.py").write_text(text)
    (folder / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--require-native', action='store_true')\n"
    )
    command = [sys.executable, str(TOOL), "-q", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.splitlines()[-1]


def test_one_that_fails_once_is_named_and_passes(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, first_time=1, always=0)
    assert code == 0
    assert said.startswith("Python: 1 failed, 2 passed in ")
    assert said.endswith(". FLAKY, passed when run again alone: test_suite.py::test_one[0]")


def test_one_that_always_fails_fails(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, first_time=0, always=1)
    assert code == 1
    assert "1 failed, 2 passed" in said
    assert "Run again alone: 1 failed in " in said


def test_many_are_not_run_again(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, first_time=3, always=0)
    assert code == 1
    assert said.startswith("Python: 3 failed in ")
    assert "again" not in said
