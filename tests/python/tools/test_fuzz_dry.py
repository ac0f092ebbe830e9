"""tools/fuzz.py --until-dry: when a target ends, and where the next session continues."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tools"))
fuzz_dry = importlib.import_module("fuzz_dry")
fuzz = importlib.import_module("fuzz")

M = 1_000_000


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    path.write_bytes(b"a fuzzer")
    return path


def runs_of(
    inputs: int, *, new_at: int = 0, cpu_seconds: float = 1.0, good: bool = True
) -> tuple[Callable[..., bool], list[str]]:
    """A run of so many inputs, a new edge at the input `new_at` of each run; and who ran."""
    ran: list[str] = []

    def one_run(name: str, most_inputs: int, found: Any) -> bool:
        ran.append(name)
        if new_at:
            found.edges += 1
            found.last_new = found.inputs + new_at
        found.inputs += min(inputs, most_inputs)
        found.cpu_seconds += cpu_seconds
        return good

    return one_run, ran


def counts_of(program: Path, one_run: object, names: list[str], minutes: float = 9.0) -> Any:
    return fuzz_dry.run_all(names, names, program, program.parent / "state", one_run, minutes)


def test_a_target_is_dry_after_ten_million_inputs_that_reach_nothing_new(program: Path) -> None:
    one_run, ran = runs_of(10 * M // 4)
    counts = counts_of(program, one_run, ["a", "b"])
    assert [found.reason for found in counts.values()] == ["dry", "dry"]
    assert ran == ["a"] * 4 + ["b"] * 4
    counts_of(program, one_run, ["a", "b"])
    assert len(ran) == 8  # a later session does not repeat them


@pytest.mark.parametrize(
    ("more", "reason", "runs"),
    [
        ({"new_at": M // 2, "cpu_seconds": 300.0}, "60 CPU minutes", 12),
        ({"new_at": M, "cpu_seconds": 1200.0}, "60 CPU minutes", 3),
        ({"good": False}, "FOUND SOMETHING", 1),
    ],
)
def test_a_target_that_does_not_become_dry_ends(
    program: Path, more: dict[str, Any], reason: str, runs: int
) -> None:
    one_run, ran = runs_of(M, **more)
    assert counts_of(program, one_run, ["a"])["a"].reason == reason
    assert len(ran) == runs
    assert counts_of(program, one_run, ["a"])["a"].reason == reason
    assert len(ran) == runs


def test_all_targets_together_have_a_budget(program: Path) -> None:
    one_run, ran = runs_of(10 * M)
    names = [f"t{number:02}" for number in range(12)]
    counts = counts_of(program, one_run, names)
    assert [found.reason for found in counts.values()] == ["dry"] * 10 + [
        "10^8 inputs of all targets"
    ] * 2
    assert ran == names[:10]


def test_a_run_gets_as_many_inputs_as_its_target_lacks(program: Path) -> None:
    asked = []

    def one_run(name: str, most_inputs: int, found: Any) -> bool:
        asked.append(most_inputs)
        if len(asked) == 1:
            found.last_new = 4 * M
        found.inputs += min(9 * M, most_inputs)
        return True

    found = counts_of(program, one_run, ["a"])["a"]
    assert (found.reason, found.inputs, asked) == ("dry", 14 * M, [10 * M, 5 * M])


def test_a_run_is_not_so_short_that_it_does_nothing(program: Path) -> None:
    def one_run(name: str, most_inputs: int, found: Any) -> bool:
        found.inputs += most_inputs - 1 if most_inputs > 1 else 0
        found.cpu_seconds += 1.0
        return True

    found = counts_of(program, one_run, ["a"])["a"]
    assert found.reason == "dry" and found.cpu_seconds == 2.0


def test_a_session_continues_where_the_last_has_ended(program: Path) -> None:
    one_run, ran = runs_of(M // 2, new_at=1)
    state = program.parent / "state"
    fuzz_dry.run_all(["a"], ["a", "b"], program, state, one_run, 0.0)
    assert ran == []
    state_of_a = fuzz_dry.Found(
        inputs=19 * M, last_new=9 * M + 1, program=fuzz_dry.load(state, "a", "").program
    )
    digest = counts_of(program, one_run, ["a"], 0.0)["a"].program
    state_of_a.program = digest
    fuzz_dry.save(state, "a", state_of_a)
    quiet, ran = runs_of(1)
    counts = counts_of(program, quiet, ["a"])
    assert counts["a"].reason == "dry" and ran == ["a"]
    assert counts["a"].inputs == 19 * M + 1
    at = fuzz_dry.commit(ROOT)
    text = fuzz_dry.report({**counts, "b": fuzz_dry.Found()}, at, sys.executable)
    assert (
        "dry: a.\nNot run with this program: b.\n" in text
        and "commit " in text
        and "cores (" in text
    )
    program.write_bytes(b"another fuzzer")
    assert counts_of(program, quiet, ["a"], 0.0)["a"].inputs == 0  # begun anew


def test_the_time_of_earlier_programs_counts(program: Path) -> None:
    busy, ran = runs_of(M, new_at=M // 2, cpu_seconds=1200.0)
    state = program.parent / "state"
    counts_of(program, busy, ["a"], 0.0)
    digest = fuzz_dry.load(state, "a", "").program
    for second in (b"a second fuzzer", b"a third one"):
        found = fuzz_dry.load(state, "a", digest)
        found.cpu_seconds += 1000.0
        fuzz_dry.save(state, "a", found)
        program.write_bytes(second)
        digest = counts_of(program, busy, ["a"], 0.0)["a"].program
    assert ran == []
    found = counts_of(program, busy, ["a"])["a"]
    assert (found.reason, found.cpu_before) == ("60 CPU minutes", 2000.0)
    assert (found.cpu_seconds, found.inputs, len(ran)) == (2400.0, 2 * M, 2)
    assert " 2400    2000 " in found.line("a")


def test_counts_are_those_that_libfuzzer_logs() -> None:
    log = (
        "#2\tINITED cov: 40 ft: 80 corp: 2/9b\n"
        "#9\tNEW    cov: 42 ft: 81 corp: 3/9b\n"
        "#99\tREDUCE cov: 42 ft: 90 corp: 4/9b\n"
        "Done 100 runs in 2 second(s)\n"
    )
    found = fuzz_dry.Found()
    fuzz.add(found, log, 100)
    assert (found.inputs, found.first_edges, found.edges, found.last_new) == (98, 40, 42, 7)
    fuzz.add(found, log.replace("cov: 40", "cov: 42"), 100)
    assert (found.inputs, found.edges, found.since_new()) == (196, 42, 189)


def _fuzzer(path: Path, ends_with: int) -> Path:
    """Says what libFuzzer says that has read 5 inputs again and then done the rest."""
    path.write_text(
        "#!/bin/sh\n"
        'for word in "$@"; do case "$word" in -runs=*) runs=${word#-runs=};; esac; done\n'
        'printf "#5\\tINITED cov: 3\\nDone %s runs in 1 second(s)\\n" "$runs" >&2\n'
        f"exit {ends_with}\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("ends_with", [0, 77])
def test_what_is_read_again_does_not_use_up_the_inputs(tmp_path: Path, ends_with: int) -> None:
    folder = tmp_path / "hello"
    folder.mkdir()
    for number in range(5):
        (folder / str(number)).write_bytes(b"x")
    found = fuzz_dry.Found()
    good = fuzz.fuzz(_fuzzer(tmp_path / "fuzzer", ends_with), "hello", 1, tmp_path, found, 100)
    assert good == (ends_with == 0)
    assert found.inputs >= (100 if good else 0)
