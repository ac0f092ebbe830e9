"""What the fault tests are made of: shares of the cases, the check of results, the summary."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest
import fault_programs
import fault_report
import pytest
import shares
import torch
from processes import child_environment

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))

import cpp
import cpp_shares

ROOT = cpp.ROOT


def test_every_case_runs_within_five_days(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shares, "ALWAYS", tmp_path / "always.txt")
    shares.ALWAYS.write_text("# why\n")
    names = [f"case {number}" for number in range(200)]
    by_day = []
    for day in range(shares.SHARES):
        monkeypatch.setenv("SHARE", str(day))
        by_day.append(shares.part_of(names, str))
    assert sorted(name for part in by_day for name in part) == sorted(names)
    assert all(20 <= len(part) <= 60 for part in by_day)
    first = by_day[0][0]
    assert shares.remember([first, first]) == [first] and shares.remember([first]) == []
    assert first in shares.part_of(names, str) and first not in by_day[4]
    second = by_day[0][1]
    assert second in shares.part_of(names, str, daily=second.__eq__) and second not in by_day[4]


def test_the_share_is_the_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARE", raising=False)
    monkeypatch.setattr(shares.time, "time", lambda: 86400 * 20_003 - 1.0)
    assert shares.share() == 20_002 % 5
    monkeypatch.setenv("SHARE", "5")
    with pytest.raises(SystemExit, match="from 0 to 4"):
        shares.share()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", __file__],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.strip() == "ERROR: SHARE='5' is not allowed: use a number from 0 to 4"


def test_a_result_is_wrong_by_one_element_by_a_step_and_by_a_rank() -> None:
    wanted = fault_programs.sum_of_values(1000, 3, 7)
    whole = sum(fault_programs.values(1000, rank, 7) for rank in range(3))
    fault_programs.check("a sum", torch.as_tensor(whole), wanted)
    changed = wanted.clone()
    changed[500] += 1
    two_ranks = fault_programs.sum_of_values(1000, 2, 7)
    for wrong in (changed, fault_programs.sum_of_values(1000, 3, 6), two_ranks, wanted.roll(251)):
        with pytest.raises(AssertionError, match="a sum delivered wrong values"):
            fault_programs.check("a sum", wrong, wanted)


def test_the_summary_counts_who_differed() -> None:
    rows: list[tuple[str, object]] = []
    fault_report.agreement(lambda *row: rows.append(row), "a", {0: "x", 2: "x"}, joined=True)
    fault_report.agreement(lambda *row: rows.append(row), "b", {0: "x", 2: "y"}, joined=True)
    fault_report.agreement(lambda *row: rows.append(row), "c", {0: "x"}, joined=True)
    fault_report.took(lambda *row: rows.append(row), "a", 3.0, 2.0)
    lines = fault_report.lines(rows)  # type: ignore[arg-type]
    assert lines[:2] == [
        "2 faults in a group: in 1 the ranks named different causes",
        "  b: rank 0: x; rank 2: y",
    ]
    assert lines[2].startswith("1 faults with a bound in seconds: in 1 an error came later")
    assert "1.50 times the bound (a)" in lines[2]


def test_only_cases_that_come_in_shares_are_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A parameter of another test, such as a number of ranks, would choose nothing."""
    monkeypatch.setattr(shares, "ALWAYS", tmp_path / "always.txt")
    shares.ALWAYS.write_text("# why\n")
    file = "tests/python/faults/test_fault_matrix.py"
    reports = [
        SimpleNamespace(nodeid=f"{file}::{test}", when="call", failed=failed, user_properties=kept)
        for test, failed, kept in (
            ("test_ranks_that_call_different_things[3]", True, []),
            ("test_every_rank_gets_the_right_error[killed-3ranks]", True, [("case", "killed")]),
            ("test_every_rank_gets_the_right_error[stopped-3ranks]", False, [("case", "stopped")]),
        )
    ]
    said: list[str] = []
    stats = {"passed": reports[2:], "failed": reports[:2]}
    terminal = SimpleNamespace(stats=stats, section=said.append, write_line=said.append)
    fault_report.write(terminal, remember=True)
    assert shares.ALWAYS.read_text() == "# why\nkilled\n"
    assert said[-1] == "  killed"


class Item:
    """What the choice of today's tests looks at."""

    def __init__(self, name: str, *marks: str) -> None:
        self.name, self.marks = name, marks
        self.user_properties: list[tuple[str, object]] = []

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def chosen_by(options: set[str], items: list[Item]) -> list[str]:
    """The names of those that the suite of tests/python runs with these options."""
    config = SimpleNamespace(
        getoption=lambda name: "" if name == "-m" else name in options,
        args=["tests/python"],
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    kept = list(items)
    conftest.pytest_collection_modifyitems(config, kept)  # type: ignore[arg-type]
    return [item.name for item in kept]


def test_with_all_in_shares_every_test_runs_within_five_days(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shares, "ALWAYS", tmp_path / "always.txt")
    shares.ALWAYS.write_text("test_4\n")
    names = [f"test_{number}" for number in range(100)]
    items = [Item(name) for name in names] + [Item("daily", "in_shares", "every_day")]
    items.append(Item("marked", "in_shares"))
    by_day, ordinary = [], []
    for day in range(shares.SHARES):
        monkeypatch.setenv("SHARE", str(day))
        by_day.append(chosen_by({"--require-native", "--all-in-shares"}, items))
        ordinary.append(chosen_by({"--require-native"}, items))
    assert all(10 <= len(part) <= 35 for part in by_day)
    assert all("daily" in part and "test_4" in part for part in by_day)
    assert {name for part in by_day for name in part} == {*names, "daily", "marked"}
    assert all(set(names) <= set(part) for part in ordinary)
    assert sum("marked" in part for part in ordinary) == 1
    everything = chosen_by({"--require-native", "--all-in-shares", "--all-faults"}, items)
    assert everything == [*names, "daily", "marked"]


# One process for all collections: only the first one imports torch and the tests.
COLLECT = """
import contextlib, json, os, sys
import pytest

class Collected:
    def pytest_collection_finish(self, session):
        self.names = [item.nodeid for item in session.items]

found = []
for share in ["", *sys.argv[1:]]:
    os.environ["SHARE"] = share or "0"
    collected = Collected()
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "in_shares or faults"]
    arguments += ["tests/python", *([] if share else ["--all-cases"])]
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main(arguments, plugins=[collected])
    assert code == 0, (share, code)
    found.append(collected.names)
print(json.dumps(found))
"""


@pytest.mark.in_shares
@pytest.mark.timeout(390)
def test_every_test_of_the_suite_that_comes_in_shares_runs_within_five_days() -> None:
    """A test that is cut twice, by its file and by its mark, would never have some cases."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *map(str, range(shares.SHARES))],
        cwd=ROOT,
        env=child_environment({"PYTEST_ADDOPTS": None}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    every, *by_day = json.loads(done.stdout)
    assert len(every) > 500
    assert all(len(part) < len(every) / 2 for part in by_day)
    assert sorted(set(every) - {name for part in by_day for name in part}) == []


LISTING = """\
Running main() from ./googletest/src/gtest_main.cc
Group.
  Joins
  DISABLED_Waits
Transports/FarAhead.
  Passes/Tcp  # GetParam() = 1
  Passes/SharedMemory  # GetParam() = 2
Typed/0.  # TypeParam = float
  Adds
"""


def test_slow_tests_under_a_sanitizer_run_within_five_days(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    every = cpp_shares.names_in(LISTING)
    assert every == [
        "Group.Joins",
        "Transports/FarAhead.Passes/Tcp",
        "Transports/FarAhead.Passes/SharedMemory",
        "Typed/0.Adds",
    ]
    every += [f"Slow.Number{number}" for number in range(100)]
    monkeypatch.setattr(shares, "ALWAYS", tmp_path / "always.txt")
    monkeypatch.setattr(cpp_shares, "LISTED", tmp_path / "in_shares.txt")
    shares.ALWAYS.write_text("Slow.Number7\n")
    cpp_shares.LISTED.write_text("# why\nTransports/FarAhead.*\nSlow.*  # and why\nGone.Test\n")
    assert cpp_shares.unmatched(every) == ["Gone.Test"]
    ran = []
    for day in range(shares.SHARES):
        monkeypatch.setenv("SHARE", str(day))
        later = cpp_shares.later(every)
        assert {"Group.Joins", "Typed/0.Adds", "Slow.Number7"}.isdisjoint(later)
        assert 65 <= len(later) <= 95
        ran += [name for name in every if name not in later]
    assert set(ran) == set(every)


def test_a_filter_of_the_callers_is_what_runs_under_a_sanitizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[dict[str, str]] = []

    def run(command: list[str], env: dict[str, str], check: bool) -> SimpleNamespace:
        ran.append(env)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(cpp, "build", lambda *_: tmp_path)
    monkeypatch.setattr(cpp, "test_prefix", lambda _: [])
    monkeypatch.setattr(cpp.subprocess, "run", run)
    monkeypatch.setattr(cpp, "in_shares", lambda *_: ({"GTEST_FILTER": "*-Slow.*"}, ["A.T"] * 5))
    monkeypatch.setattr(sys, "argv", ["cpp.py", "asan"])
    monkeypatch.delenv("GTEST_FILTER", raising=False)
    assert cpp.main() == 1, "5 tests are of this share, and none ran"
    monkeypatch.setenv("GTEST_FILTER", "Slow.Number7")
    assert cpp.main() == 0
    assert [env["GTEST_FILTER"] for env in ran] == ["*-Slow.*", "Slow.Number7"]


@pytest.mark.parametrize("flavour", ["plain", "asan_full"])
@pytest.mark.parametrize(
    ("ran", "code"),
    [(["A.T0", "A.T1", "B.T"], 0), (["A.T0", "B.T"], 1), (["A.T0", "A.T0", "B.T"], 1)],
)
def test_each_test_of_a_program_in_parts_has_to_run_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flavour: str, ran: list[str], code: int
) -> None:
    monkeypatch.setattr(cpp, "build", lambda *_: tmp_path)
    monkeypatch.setattr(cpp, "test_prefix", lambda _: [])
    monkeypatch.setattr(cpp.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    monkeypatch.setattr(cpp_shares, "names", lambda *_: ["B.T", "A.T0", "A.T1"])
    monkeypatch.setattr(cpp, "counts", lambda _: cpp.Counts(ran, 0, {}))
    monkeypatch.setattr(sys, "argv", ["cpp.py", flavour])
    monkeypatch.delenv("GTEST_FILTER", raising=False)
    assert cpp.main() == code
