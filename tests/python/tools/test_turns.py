"""Tests in several processes: which of them run at once, which alone, and what a crash costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import turns
from processes import RIG

pytestmark = pytest.mark.ci

CONFTEST = f"""
import sys
sys.path.insert(0, {str(RIG)!r})
import turns
def pytest_configure(config):
    config.addinivalue_line("markers", "alone: x")
    config.pluginmanager.register(turns, "turns")
"""

HEAD = """
import json, os, time
from pathlib import Path
import pytest

HERE = Path(__file__).parent

def sees(name, limit_s):
    end_s = time.monotonic() + limit_s
    while not (HERE / name).exists():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True

def note(name, **what):
    what["process"] = os.environ.get("PYTEST_XDIST_WORKER", "")
    with (HERE / "notes").open("a") as notes:
        notes.write(json.dumps({"test": name, "pid": os.getpid(), **what}) + "\\n")
"""


OPTIONS = ("-q", "--color=no", "-p", "xdist", "-p", "no:cacheprovider")
XDIST_ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Others that are installed here, hypothesis among them, take each process half a second."""


def outcome(folder: Path, files: dict[str, str], *options: str) -> tuple[str, list[dict[str, str]]]:
    """Runs a suite of these files: the counts, and what its tests have noted, in order."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(HEAD + text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *options, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        env={name: value for name, value in os.environ.items() if "PYTEST" not in name}
        | XDIST_ALONE,
    )
    path = folder / "notes"
    lines = path.read_text().splitlines() if path.exists() else []
    said = done.stdout + done.stderr
    return said.strip().splitlines()[-1] + f"\n{said}", [json.loads(line) for line in lines]


MEET = """
def test_meet():
    (HERE / "{me}").touch()
    assert sees("{other}", 60)
"""


def test_files_run_at_once(tmp_path: Path) -> None:
    files = {"a": MEET.format(me="a", other="b"), "b": MEET.format(me="b", other="a")}
    said, _ = outcome(tmp_path, files, "-n", "2")
    assert said.startswith("2 passed"), said


SEVERAL = """
@pytest.mark.parametrize("number", range(6))
def test_several(number):
    note("several")
"""


def test_a_file_stays_in_one_process(tmp_path: Path) -> None:
    said, noted = outcome(tmp_path, {"a": SEVERAL, "b": SEVERAL, "c": SEVERAL}, "-n", "3")
    assert said.startswith("18 passed"), said
    pids = [each["pid"] for each in noted]
    assert sorted(pids.count(pid) for pid in set(pids)) in ([6, 6, 6], [6, 12], [18]), noted


# The other process has finished its file. Only the lock keeps it from the tests that run alone.
LOOKS = """
def test_looks_about():
    (HERE / "inside").touch()
    note("looks", alone_meanwhile=sees("alone-is-inside", 3))
    (HERE / "inside").unlink()
"""
ALONE = """
@pytest.mark.alone
@pytest.mark.parametrize("number", range(2))
def test_alone(number):
    (HERE / "alone-is-inside").touch()
    note("alone", others=(HERE / "inside").exists())
    (HERE / "alone-is-inside").unlink()
"""


def test_nothing_runs_beside_a_test_that_runs_alone(tmp_path: Path) -> None:
    files = {"a": ALONE + SEVERAL, "b": LOOKS + SEVERAL, "c": ALONE}
    said, noted = outcome(tmp_path, files, "-n", "2")
    assert said.startswith("17 passed"), said
    names = [each["test"] for each in noted]
    assert names[names.index("alone") :][:4] == ["alone"] * 4, noted
    assert len({each["pid"] for each in noted if each["test"] == "alone"}) == 1, noted
    assert not any(each.get("others") or each.get("alone_meanwhile") for each in noted), noted


def test_an_ordinary_run_keeps_its_order(tmp_path: Path) -> None:
    files = {"a": ALONE, "b": SEVERAL}
    said, noted = outcome(tmp_path, files)
    assert said.startswith("8 passed"), said
    assert [each["test"] for each in noted] == ["alone"] * 2 + ["several"] * 6


CRASH = """
def test_before():
    note("before")

def test_crash():
    note("crash")
    os._exit(3)

def test_after():
    note("after")
"""


def test_a_test_whose_process_dies_fails_once_and_costs_no_other(tmp_path: Path) -> None:
    said, noted = outcome(tmp_path, {"a": CRASH, "b": SEVERAL}, "-n", "2")
    assert said.startswith("1 failed, 8 passed"), said
    assert "crashed while running" in said and "test_a.py::test_crash" in said
    ran = [each["test"] for each in noted]
    assert sorted(set(ran)) == ["after", "before", "crash", "several"]
    assert ran.count("crash") == 1 and ran.count("after") == 1


# The second process dies while the one that replaces the first still collects.
CRASHES_FIRST = """
if (HERE / "crashed").exists():
    (HERE / "collecting").touch()
    sees("crashed again", 60)
    time.sleep(0.5)

def test_crash():
    (HERE / "crashed").touch()
    os._exit(3)
"""
CRASHES_NEXT = """
def test_crash_again():
    assert sees("collecting", 60)
    (HERE / "crashed again").touch()
    os._exit(3)
"""


def test_two_processes_may_die_at_once(tmp_path: Path) -> None:
    files = {"a": CRASHES_FIRST + SEVERAL, "b": CRASHES_NEXT + SEVERAL, "c": SEVERAL}
    said, _ = outcome(tmp_path, files, "-n", "2")
    assert said.startswith("2 failed, 18 passed"), said


DIES_ALONE = """
@pytest.mark.alone
def test_die():
    os._exit(3)

@pytest.mark.alone
def test_after():
    note("after")
"""


def test_a_process_may_die_when_the_others_have_no_work_left(tmp_path: Path) -> None:
    files = {"a": SEVERAL, "b": SEVERAL, "c": DIES_ALONE}
    said, noted = outcome(tmp_path, files, "-n", "2")
    assert said.startswith("1 failed, 13 passed"), said
    assert [note["test"] for note in noted].count("after") == 1


def test_the_files_named_exist() -> None:
    found = {path.name for path in (RIG.parent / "python").glob("*/test_*.py")}
    assert found >= {*turns.BY_TEST, *turns.LONG}
