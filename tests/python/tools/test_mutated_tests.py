"""Mutations that named tests notice: each must still apply, and its tests must be there."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tests" / "cpp" / "proof" / "programs"))
mutated = importlib.import_module("mutated")
machinery = importlib.import_module("mutated_tests")
package = importlib.import_module("mutated_package")
security = importlib.import_module("security_mutations")
host = importlib.import_module("host_mutations")
core = importlib.import_module("core_mutations")
agreement = importlib.import_module("agreement_mutations")
driver = importlib.import_module("driver_mutations")
joining = importlib.import_module("joining_mutations")
step = importlib.import_module("step_mutations")

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
    unseen, seen = agreement.Found(2000, 0, ""), agreement.Found(2000, 3, "M1 3")
    plain = agreement.MUTATIONS[0]
    assert agreement.verdict(plain, unseen)[1:] == ("no seed notices it", False)
    assert agreement.verdict(plain, seen)[1:] == ("", True)
    assert agreement.verdict(plain, None)[1:] == ("does not compile", False)
    assert agreement.verdict(plain._replace(survives="nothing asks"), unseen)[1:] == ("", False)


def test_a_test_notices_each_mutation_of_the_agreement_that_no_seed_does() -> None:
    survivors = [each for each in agreement.MUTATIONS if each.survives]
    tested = {each.name for each in agreement.with_tests(agreement.MUTATIONS)}
    assert survivors and {each.name for each in survivors} <= tested


def test_every_mutation_of_the_step_applies() -> None:
    assert package.misplaced(ROOT, step.MUTATIONS) == []
    names = [mutation.name for mutation in step.MUTATIONS]
    assert len(set(names)) == len(names)
    wrong = step.MUTATIONS[0]._replace(old="not there", test="tests/python/a.py::test_b[c]")
    assert package.misplaced(ROOT, [wrong]) == [
        f"{wrong.name}: its text stands 0 times in pycomm/ddp/{wrong.file}, not once",
        f"{wrong.name}: there is no test {wrong.test}",
    ]


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
    row = f"| {mutation.name} | A.C |  | 0.0 |"
    assert machinery.verdict(mutation, green, red) == (row, "", True)
    assert not machinery.verdict(mutation, green, green).noticed
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
    assert machinery.verdict(mutation, green, machinery.judged(1, FOUND)).row == (
        f"| {mutation.name} | A.C | rank 1: a / b | 0.0 |"
    )


def test_one_that_does_not_end_is_noticed_by_time_and_the_report_says_so() -> None:
    mutation = security.MUTATIONS[0]._replace(tests="A.B:A.C:A.D")
    green = machinery.judged(0, PASSED)._replace(seconds=2.0)
    ran = machinery.hung(PASSED + "[ RUN      ] A.C\n", mutation.tests)._replace(seconds=60.0)
    row, complaint, _ = machinery.verdict(mutation, green, ran)
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


CASES = """<testsuites><testsuite>
<testcase classname="tests.python.a" name="test_b[1]"/>
<testcase classname="tests.python.a" name="test_b[2]">{}</testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("what", "passed", "fails", "trouble", "found"),
    [
        ("", 2, False, "", ""),
        ('<failure message="1 | 2&#10;and">x</failure>', 1, True, "", "1 / 2"),
        ('<error message="at teardown"/>', 1, True, "", "at teardown"),
        ("<skipped/>", 1, False, "skipped: test_b[2]", ""),
    ],
)
def test_what_pytest_reports(
    what: str, passed: int, fails: bool, trouble: str, found: str, tmp_path: Path
) -> None:
    report, test = tmp_path / "report.xml", "tests/python/a.py::test_b"
    report.write_text(CASES.format(what))
    failed = (test,) if fails else ()
    ran = package.read_report(report, test)
    assert ran == machinery.Ran(passed, failed, trouble, found=found)
    other = package.read_report(report, "tests/python/c.py::test_d")
    assert other.trouble == "test_b[2]: no test of tests/python/c.py" and not other.failed
    report.write_text("<testsuites/>")
    assert package.read_report(report, test).trouble == "no test test_b ran"


def test_pytest_runs_in_the_copy_and_is_ended(tmp_path: Path) -> None:
    (tmp_path / "pycomm.py").write_text("value = 1\n")
    # Where the repository's conftest is not, its option is unknown.
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--require-native', action='store_true')\n"
    )
    (tmp_path / "test_a.py").write_text(
        "import time\nimport pycomm\n\n\ndef test_b():\n    assert pycomm.value == 2\n\n\n"
        "def test_c():\n    time.sleep(100)\n"
    )
    red = package.run_pytest(tmp_path, "test_a.py::test_b", 60)
    assert (red.failed, red.trouble, red.found) == (
        ("test_a.py::test_b",),
        "",
        "assert 1 == 2",
    )
    assert package.run_pytest(tmp_path, "test_a.py::test_d", 60).trouble
    slow = package.run_pytest(tmp_path, "test_a.py::test_c", 3)
    assert slow.hung == "test_a.py::test_c" and slow.failed == ("test_a.py::test_c (does not end)",)


def test_what_is_built_with_a_mutation_is_put_back(tmp_path: Path) -> None:
    source, built = tmp_path / "a.cc", tmp_path / "build" / "a.o"
    source.write_text("old")
    built.parent.mkdir()
    built.write_text("of old")
    before = [path.stat().st_mtime_ns for path in (source, built)]
    objects = mutated.Objects(tmp_path, "build")
    objects.keep()
    mutation = security.MUTATIONS[0]._replace(old="old", new="new")
    with pytest.raises(ValueError), mutated.broken(source, mutation, objects):
        assert source.read_text() == "new"
        built.write_text("of new")
        os.utime(built)
        raise ValueError
    assert (source.read_text(), built.read_text()) == ("old", "of old")
    assert [path.stat().st_mtime_ns for path in (source, built)] == before


def test_a_copy_follows_its_folder(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "a").write_text("1")
    mutated.copy_folder(source, target)
    (target / "sub" / "b").write_text("left behind")
    (target / "sub" / "a").write_text("2")
    mutated.copy_folder(source, target)
    assert [(path.name, path.read_text()) for path in (target / "sub").iterdir()] == [("a", "1")]


def test_what_is_printed_is_written_and_the_last_line_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = [security.MUTATIONS[0]._replace(name=name) for name in ("one", "other")]
    monkeypatch.setattr(sys, "path", list(sys.path))

    def attempt(copy: Path, chosen: Sequence[Any], options: Any) -> Any:
        tally = mutated.Tally()
        for each in chosen:
            noticed = each.name == "one"
            complaint = "" if noticed else "no test notices it"
            tally.add(each, mutated.Verdict(f"| {each.name} |", complaint, noticed))
        return tally

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["some_mutations.py", *arguments])
        parser = mutated.parser("What it is for.")
        parser.add_argument("--seeds", type=int, default=5)
        return int(mutated.main(parser, two, lambda tree: [], attempt))

    out = tmp_path / "out.txt"
    assert run("--out", str(out), "--work", str(tmp_path), "--seeds", "7") == 1
    text = out.read_text()
    assert capsys.readouterr().out == text
    lines = text.splitlines()
    command = "python tests/cpp/proof/programs/some_mutations.py --seeds 7"
    assert lines[0] == f"# {'command':<14} {command}"
    assert [line.split()[1] for line in lines if line.startswith("# ")] == [
        *("command", "commit", "date", "cores", "kernel", "load_at_start", "minutes")
    ]
    assert "other: no test notices it" in lines
    assert lines[-1] == "1 of 2 mutations noticed, 1 not as expected"
    assert run("--only", "one") == 0
    assert capsys.readouterr().out.endswith("1 of 1 mutations noticed, 0 not as expected\n")
    with pytest.raises(SystemExit):
        run("--only", "none of these")
