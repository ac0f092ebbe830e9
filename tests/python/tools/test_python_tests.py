"""Which failed tests `make test` runs again: those that were too slow, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import RIG
from time_bound import TookTooLong, assert_within

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "python_tests.py"

SUITE = """
import os, signal, subprocess, sys
from pathlib import Path
import pytest
from time_bound import assert_within

def first_time(name):
    ran = Path(__file__).with_name(f"ran_{name}")
    if ran.exists():
        return False
    ran.touch()
    return True

"""

CONFTEST = f"""
import sys
sys.path.insert(0, {str(RIG)!r})
def pytest_addoption(parser): parser.addoption('--require-native', action='store_true')
def pytest_configure(config): config.addinivalue_line("markers", "time_bound: x")
"""

FINE = "def test_fine():\n    pass\n"
SLOW_ONCE = """
@pytest.mark.time_bound
def test_slow():
    assert_within(3.0 if first_time("slow") else 1.0, 2.0)
"""
SLOW_ALWAYS = """
@pytest.mark.time_bound
def test_slow():
    assert_within(3.0, 2.0)
"""


def outcome(folder: Path, *tests: str, processes: str = "2") -> tuple[int, str, list[str]]:
    """Runs a suite of these tests: exit status, last line, and what the file of reruns names."""
    (folder / "test_suite.py").write_text(SUITE + "\n".join(tests))
    (folder / "conftest.py").write_text(CONFTEST)
    named = folder / "reruns"
    named.touch()
    done = subprocess.run(
        [sys.executable, str(TOOL), "-q", "-p", "xdist", "-n", processes, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"RERUNS_FILE": str(named), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    return done.returncode, done.stdout.splitlines()[-1], named.read_text().splitlines()


@pytest.mark.parametrize("processes", ["0", "2"])
def test_one_that_is_too_slow_once_is_named_and_passes(tmp_path: Path, processes: str) -> None:
    code, said, named = outcome(tmp_path, FINE, SLOW_ONCE, processes=processes)
    assert code == 0
    assert said.startswith("Python: 1 failed, 1 passed in ")
    test = "test_suite.py::test_slow"
    assert said.endswith(f". TOO SLOW at first, passed when run again alone: {test}")
    assert named == [f"{test} (passed)"]


def test_one_that_is_always_too_slow_fails(tmp_path: Path) -> None:
    code, said, named = outcome(tmp_path, FINE, SLOW_ALWAYS)
    assert code == 1
    assert said.endswith(
        ". TOO SLOW at first, FAILED when run again alone: test_suite.py::test_slow"
    )
    assert named == ["test_suite.py::test_slow (FAILED)"]


NEVER_AGAIN = {
    "a wrong number": "def test_bad():\n    assert not first_time('bad')\n",
    "a wrong number in a test of a time bound": """
@pytest.mark.time_bound
def test_bad():
    assert 3 == (4 if first_time("bad") else 3)
""",
    "a time bound without the mark": """
def test_bad():
    assert_within(3.0 if first_time("bad") else 1.0, 2.0)
""",
    "a crash of a rank": """
@pytest.mark.time_bound
def test_bad():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)" if first_time("bad") else ""
    subprocess.run([sys.executable, "-c", code], check=True)
""",
    "a process left behind": """
@pytest.fixture
def nothing_left():
    yield
    assert not first_time("left"), "processes left behind"

@pytest.mark.time_bound
def test_bad(nothing_left):
    assert_within(3.0 if first_time("bad") else 1.0, 2.0)
""",
    "too slow, and another that is wrong": SLOW_ONCE
    + "\ndef test_bad():\n    assert not first_time('bad')\n",
    "three that are too slow": """
@pytest.mark.time_bound
@pytest.mark.parametrize("number", range(3))
def test_bad(number):
    assert_within(3.0 if first_time(number) else 1.0, 2.0)
""",
    "pytest itself dies": """
@pytest.mark.time_bound
def test_bad():
    if first_time("bad"):
        os._exit(1)
""",
    "a file that cannot be read": SLOW_ONCE + "\nassert not first_time('import')\n",
}


@pytest.mark.parametrize("what", NEVER_AGAIN)
def test_nothing_else_is_run_again(tmp_path: Path, what: str) -> None:
    code, said, named = outcome(tmp_path, FINE, NEVER_AGAIN[what])
    assert code != 0, said
    assert "again" not in said
    assert named == []


def test_the_assertion_of_a_time_bound() -> None:
    assert_within(1.99, 2.0)
    with pytest.raises(TookTooLong, match=r"^took 2\.000 s, the limit is 2 s\. rank 1 was killed$"):
        assert_within(2.0, 2.0, "rank 1 was killed")
    with pytest.raises(TookTooLong, match=r"^took nan s, the limit is 2 s\.$"):
        assert_within(float("nan"), 2.0)
