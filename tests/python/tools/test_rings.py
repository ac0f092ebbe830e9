"""Which test is of which ring, which C++ tests are slow, and what fault tests are made of."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import fault_cases
import fault_programs
import fault_report
import pytest
import rings
import torch
from ranks import run_ranks

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))

import cpp

ROOT = cpp.ROOT

GRID = """
import pytest
import rings

@pytest.mark.ci
@pytest.mark.parametrize("a", rings.ends([1, 2, 3]))
@pytest.mark.parametrize(("b", "c"), rings.first_of([(1, 2), (3, 4)]))
def test_grid(a, b, c): pass

def test_plain(): pass

@pytest.mark.release
@pytest.mark.parametrize("a", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_long(a): pass
"""
FILE = """
import pytest
pytestmark = pytest.mark.nightly

def test_a(): pass

@pytest.mark.ci
def test_b(): pass
"""


def collect(rank: int, world_size: int, folder: str, arguments: list[str]) -> int:
    os.chdir(folder)
    sys.path.insert(0, str(ROOT / "tests" / "python"))
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "conftest"]
    return pytest.main([*options, "-c", str(ROOT / "pyproject.toml"), *arguments])


def collected(folder: Path, *arguments: str) -> set[str]:
    """The tests of this folder that a run of pytest with our conftest would have.

    In a forked process, as our conftest imports torch.
    """
    args = (str(folder), list(arguments))
    env = {"PYTEST_ADDOPTS": None}
    (done,) = run_ranks(1, collect, args=args, env=env, backend=None, init="none")
    assert done.value in (0, 5), done.describe()
    return {line.split("::")[1] for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.ci
def test_each_test_is_of_one_ring_and_the_nearest_mark_decides(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(GRID)
    (tmp_path / "test_two.py").write_text(FILE)
    by_ring = {ring: collected(tmp_path, str(tmp_path), "--ring", ring) for ring in rings.RINGS}
    assert by_ring == {
        "test": {"test_plain"},
        "ci": {"test_grid[1-2-1]", "test_grid[1-2-3]", "test_b"},
        "nightly": {
            "test_grid[1-2-2]",
            *(f"test_grid[3-4-{a}]" for a in (1, 2, 3)),
            "test_long[1]",
            "test_a",
        },
        "release": {"test_long[2]"},
    }
    assert collected(tmp_path, str(tmp_path)) == by_ring["test"] | by_ring["ci"]
    assert collected(tmp_path, f"{tmp_path}/test_one.py::test_long") == {
        "test_long[1]",
        "test_long[2]",
    }
    assert collected(tmp_path, str(tmp_path), "--ring", "all") == set.union(*by_ring.values())


def test_a_ring_that_there_is_not() -> None:
    assert list(rings.read("test,nightly")) == ["test", "nightly"]
    with pytest.raises(pytest.UsageError, match="there is no ring ic"):
        rings.read("test,ic")


def test_the_sample_of_faults_has_each_kind_and_what_has_failed() -> None:
    every = fault_cases.cases()
    in_ci = fault_cases.sample(every)
    assert in_ci <= {case.name for case in every}, "a case that has failed has another name now"
    kinds = {case.kind for case in every}
    chosen = {case.kind for case in every if case.name in in_ci}

    def in_others(kinds: set[str]) -> list[list[str]]:
        split = [kind.split(" in ", 1) for kind in kinds]
        return [each for each in split if each[-1].split()[0] in fault_cases.OTHER_OPERATIONS]

    assert len(kinds - chosen) == len(in_others(kinds)) - len(in_others(chosen)) > 20
    for place in (0, 1):  # each fault in another operation than all_reduce, each of these with one
        met = {each[place] for each in in_others(chosen)}
        assert met == {each[place] for each in in_others(kinds)}
    assert len(in_ci) < len(every) / 6


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


def test_a_heading_names_the_flavours_that_leave_slow_tests_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    every = cpp.names_in(LISTING)
    assert every == [
        "Group.Joins",
        "Transports/FarAhead.Passes/Tcp",
        "Transports/FarAhead.Passes/SharedMemory",
        "Typed/0.Adds",
    ]
    monkeypatch.setattr(cpp, "SLOW", tmp_path / "slow.txt")
    cpp.SLOW.write_text("# why\n[plain]\nTyped/*\n[asan tsan] # why\nTransports/FarAhead.*  # x\n")
    later = "Transports/FarAhead.Passes/Tcp:Transports/FarAhead.Passes/SharedMemory"
    for flavour in ("asan", "tsan"):
        chosen = cpp.chosen_of(flavour, every, slow=False)
        assert chosen == (["Group.Joins", "Typed/0.Adds"], f"*-{later}")
        assert cpp.chosen_of(flavour, every, slow=True) == (later.split(":"), later)
    assert cpp.chosen_of("plain", every, slow=True) == (["Typed/0.Adds"], "Typed/0.Adds")
    assert cpp.chosen_of("asan_full", every, slow=False) == (sorted(every), "*")
    cpp.SLOW.write_text("[plain]\nGone.Test\n")
    with pytest.raises(SystemExit, match=r"names tests that do not exist: Gone\.Test"):
        cpp.chosen_of("plain", every, slow=False)


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
    monkeypatch.setattr(cpp, "names", lambda *_: [])
    monkeypatch.setattr(cpp, "chosen_of", lambda *_, slow: (["A.T"] * 5, "*-Slow.*"))
    monkeypatch.setattr(sys, "argv", ["cpp.py", "asan"])
    monkeypatch.delenv("GTEST_FILTER", raising=False)
    assert cpp.main() == 1, "5 tests are wanted, and none ran"
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
    wanted = ["B.T", "A.T0", "A.T1"]
    monkeypatch.setattr(cpp, "names", lambda *_: wanted)
    monkeypatch.setattr(cpp, "chosen_of", lambda *_, slow: (wanted, "*"))
    monkeypatch.setattr(cpp, "counts", lambda _: cpp.Counts(ran, 0, {}))
    monkeypatch.setattr(sys, "argv", ["cpp.py", flavour])
    monkeypatch.delenv("GTEST_FILTER", raising=False)
    assert cpp.main() == code
