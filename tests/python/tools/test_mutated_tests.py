"""Mutations that named tests notice: each must still apply, and its tests must be there."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tests" / "cpp" / "proof" / "programs"))
machinery = importlib.import_module("mutated_tests")
security = importlib.import_module("security_mutations")
host = importlib.import_module("host_mutations")
core = importlib.import_module("core_mutations")
agreement = importlib.import_module("agreement_mutations")
driver = importlib.import_module("driver_mutations")
joining = importlib.import_module("joining_mutations")

PASSED = "[ RUN      ] A.B\n[       OK ] A.B (1 ms)\n"
FAILED = "[ RUN      ] A.C\nx.cc:1: Failure\n[  FAILED  ] A.C (2 ms)\n"
SAID = '    Which is: "rank 1: a | b\\n  rank 0 goes"\n'
FOUND = f"[ RUN      ] A.C\n{SAID}[  FAILED  ] A.C (2 ms)\n"
SKIPPED = "[ RUN      ] A.D\n[  SKIPPED ] A.D (0 ms)\n"


@pytest.mark.parametrize(
    "mutations",
    [security.MUTATIONS, host.MUTATIONS, core.MUTATIONS, driver.MUTATIONS, joining.MUTATIONS],
)
def test_every_mutation_applies(mutations: Sequence[Any]) -> None:
    assert machinery.misplaced(ROOT, mutations) == []
    names = [mutation.name for mutation in mutations]
    assert len(set(names)) == len(names)


def test_every_mutation_of_the_agreement_applies() -> None:
    assert agreement.misplaced(ROOT) == []
    names = [mutation.name for mutation in agreement.MUTATIONS]
    assert len(set(names)) == len(names)
    assert agreement.verdict(agreement.MUTATIONS[0], agreement.Found(2000, 0, ""))[1]
    assert not agreement.verdict(agreement.MUTATIONS[0], agreement.Found(2000, 3, "M1 3"))[1]
    assert agreement.verdict(agreement.MUTATIONS[0], None)[1] == "does not compile"


def test_one_that_no_longer_applies_or_has_no_test_is_named(tmp_path: Path) -> None:
    mutation = security.MUTATIONS[0]
    for part in ("csrc/transport", "csrc/engine", "tests/cpp/transport", "tests/cpp/engine"):
        shutil.copytree(ROOT / part, tmp_path / part)
    source = tmp_path / "csrc" / "transport" / "secure" / mutation.file
    source.write_text(source.read_text().replace(mutation.old, ""))
    tests = tmp_path / "tests" / "cpp" / "transport" / "secure" / "tls_link_test.cc"
    _, _, name = mutation.tests.partition(".")
    tests.write_text(tests.read_text().replace(name, "Renamed"))
    place = source.relative_to(tmp_path)
    assert machinery.misplaced(tmp_path, security.MUTATIONS) == [
        f"{mutation.name}: its text stands 0 times in {place}, not once",
        f"{mutation.name}: there is no test {mutation.tests}",
    ]


def test_what_is_not_as_expected_is_a_complaint() -> None:
    mutation = security.MUTATIONS[0]._replace(tests="A.C")
    green, red = machinery.judged(0, PASSED), machinery.judged(1, PASSED + FAILED)
    assert red.failed == ("A.C",)
    assert machinery.verdict(mutation, green, red) == (f"| {mutation.name} | A.C |  | 0.0 |", "")
    assert machinery.verdict(mutation, green, green)[1] == "A.C does not notice it"
    both = mutation._replace(tests="A.B:A.C")
    assert machinery.verdict(both, green, red)[1] == "A.B does not notice it"
    assert machinery.verdict(mutation, red, red)[1] == "without it: failed: A.C"
    assert machinery.verdict(mutation, green, None)[1] == "does not compile"
    none, skipped = machinery.judged(0, ""), machinery.judged(0, PASSED + SKIPPED)
    assert machinery.verdict(mutation, none, red)[1] == "without it: no test ran"
    assert machinery.verdict(mutation, skipped, red)[1] == "without it: skipped: A.D"
    assert machinery.verdict(mutation, green, skipped)[1] == "skipped: A.D"
    assert machinery.judged(-11, "[ RUN      ] A.B\n").failed == ("A.B (died with -11)",)
    assert machinery.verdict(mutation, green, machinery.judged(1, FOUND))[0] == (
        f"| {mutation.name} | A.C | rank 1: a / b | 0.0 |"
    )


def test_one_that_does_not_end_is_noticed_by_time_and_the_report_says_so() -> None:
    mutation = security.MUTATIONS[0]._replace(tests="A.B:A.C:A.D")
    green = machinery.judged(0, PASSED)._replace(seconds=2.0)
    ran = machinery.hung(PASSED + "[ RUN      ] A.C\n", mutation.tests)._replace(seconds=60.0)
    row, complaint = machinery.verdict(mutation, green, ran)
    assert row.endswith("| A.C (does not end): 60 s; without the mutation 2.0 s |  | 60.0 |")
    assert complaint == "A.B does not notice it"  # A.D, which did not run, may
    assert machinery.verdict(mutation, green, machinery.hung(PASSED, "A.B"))[1] == (
        "did not end, and no test was running"
    )
    # A test that hangs without the mutation says nothing about it.
    assert machinery.verdict(mutation, ran, ran)[1] == "without it: failed: A.C (does not end)"


@pytest.mark.parametrize(("seconds", "limit"), [(0.1, 60), (5.9, 60), (30, 300)])
def test_only_what_takes_many_times_as_long_does_not_end(seconds: float, limit: float) -> None:
    assert machinery.limit_of(machinery.Ran(1, (), seconds=seconds)) == limit


def test_a_program_that_does_not_end_is_ended(tmp_path: Path) -> None:
    program = tmp_path / "hangs"
    program.write_text("#!/bin/sh\necho '[ RUN      ] A.B'\nexec sleep 1000\n")
    program.chmod(0o700)
    ran = machinery.run_tests(program, "A.B", 2.0)
    assert ran.hung == "A.B"
    assert 2.0 <= ran.seconds < 20


def test_tests_behind_one_that_dies_run_too(tmp_path: Path) -> None:
    program = tmp_path / "dies"
    begins = "echo '[ RUN      ] A.B'; kill -SEGV $$"
    program.write_text(f"#!/bin/sh\ncase $1 in *A.B*) {begins};; esac\nprintf '{FAILED}'\nexit 1\n")
    program.chmod(0o700)
    ran = machinery.run_tests(program, "A.B:A.C")
    assert ran.failed == ("A.B (died with -11)", "A.C")
