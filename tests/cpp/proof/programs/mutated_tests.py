"""Remove one condition at a time; a named C++ test must fail: security_mutations.py and its kind.

The tests that should notice a mutation run without it, where they must pass, and with it, where
each must fail, die, or not end in ten times as long as without it. A program fails if that is
otherwise, if a test is skipped, and, before it builds anything, if the text of a mutation no longer
stands exactly once in its file. It prints a table: the tests that failed, what the first of them
says if it says it in words, and the seconds. Its last line names the mutations that a test noticed
only because it did not end.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mutated

SOURCES = Path("csrc")
LIMIT_S = 300  # of tests without a mutation
LEAST_LIMIT_S = 60  # of tests with one: another process may have the cores for a while
TIMES_AS_LONG = 10
MOST_TEXT = 120  # of what a walk found
CONFIGURE = ("-DPYCOMM_PRECOMPILE=OFF", "-DCMAKE_UNITY_BUILD=ON")
WALK = "host_walk"
"""This program compiles engine/host once more. Its mutations are in a second copy of that folder:
nothing else is compiled for them."""
WALKED = Path("walked")


class Mutation(NamedTuple):
    name: str
    file: str  # its name; it lies in a subfolder of csrc
    old: str
    new: str
    tests: str
    """A filter of GoogleTest's without wildcards. Each of them must fail. DISABLED_ ones run too:
    they take too long for every day."""
    program: str = "transport"
    """The folder of tests/cpp that has them."""


def misplaced(tree: Path, mutations: Sequence[Mutation]) -> list[str]:
    """Mutations that do not apply to this tree, and tests that it does not have, in words."""
    found = mutated.misplaced(tree, SOURCES, mutations)
    programs = {mutation.program for mutation in mutations}
    there = {program: "".join(map(Path.read_text, tests_of(tree, program))) for program in programs}
    for mutation in mutations:
        for test in mutation.tests.split(":"):
            suite, _, name = test.partition(".")
            if f"({suite}, {name})" not in there[mutation.program]:
                found.append(f"{mutation.name}: there is no test {test}")
    return found


def tests_of(tree: Path, program: str) -> list[Path]:
    return sorted((tree / "tests" / "cpp" / program).rglob("*_test.cc"))


def keep_only_wanted_tests(copy: Path, mutations: Sequence[Mutation]) -> None:
    """Compiling the others would take most of the time."""
    for program in {mutation.program for mutation in mutations}:
        names = [each.tests for each in mutations if each.program == program]
        suites = {test.partition(".")[0] for tests in names for test in tests.split(":")}
        for path in tests_of(copy, program):
            if not any(f"({suite}, " in path.read_text() for suite in suites):
                path.unlink()


class Ran(NamedTuple):
    """What the tests of one filter said."""

    passed: int
    failed: tuple[str, ...]
    trouble: str = ""
    """Why nothing can be concluded from it."""
    seconds: float = 0
    hung: str = ""
    """The test that did not end."""
    unrun: frozenset[str] = frozenset()
    """Tests that would have come after that one."""
    found: str = ""
    """The first line of the first text that was not as expected: what a walk found."""


def limit_of(without: Ran) -> float:
    """Long enough for tests with a mutation: one that takes longer hangs, and is not only slow."""
    return max(LEAST_LIMIT_S, TIMES_AS_LONG * without.seconds)


def run_tests(program: Path, tests: str, limit_s: float = LIMIT_S) -> Ran:
    command = [str(program), f"--gtest_filter={tests}", "--gtest_also_run_disabled_tests"]
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as over:
        output = over.stdout or b""  # bytes, also of a process whose output is text
        text = output if isinstance(output, str) else output.decode(errors="replace")
        return hung(text, tests)._replace(seconds=time.monotonic() - begin)
    ran = judged(done.returncode, done.stdout)
    behind = [test for test in tests.split(":") if test not in begun(done.stdout)]
    if done.returncode not in (0, 1) and ran.failed and behind:  # it died, and they did not run
        rest = run_tests(program, ":".join(behind), limit_s)
        ran = rest._replace(passed=ran.passed + rest.passed, failed=ran.failed + rest.failed)
    return ran._replace(seconds=time.monotonic() - begin)


def ends_of(output: str) -> list[tuple[str, str]]:
    """How each test ended, and its name."""
    return re.findall(r"^\[ +(OK|FAILED|SKIPPED) +\] (\S+?),? .*\(\d+ ms\)$", output, re.MULTILINE)


def begun(output: str) -> list[str]:
    return re.findall(r"^\[ RUN +\] (\S+)$", output, re.MULTILINE)


def found_in(output: str) -> str:
    found = re.search(r'^ +Which is: "([^"\\]*)', output, re.MULTILINE)
    return found[1].replace("|", "/")[:MOST_TEXT] if found else ""


def judged(code: int, output: str) -> Ran:
    of_each = ends_of(output)
    failed = tuple(name for how, name in of_each if how == "FAILED")
    skipped = [name for how, name in of_each if how == "SKIPPED"]
    if code not in (0, 1) and not failed:
        running = begun(output)
        return Ran(0, (f"{running[-1]} (died with {code})",)) if running else Ran(0, (), "died")
    if skipped:
        return Ran(0, failed, f"skipped: {', '.join(skipped)}")
    trouble = "" if of_each else "no test ran"
    return Ran(len(of_each) - len(failed), failed, trouble, found=found_in(output))


def hung(output: str, tests: str) -> Ran:
    """What a run of these tests said that did not end within its limit."""
    ended = dict(reversed(each) for each in ends_of(output))
    running = next((name for name in begun(output) if name not in ended), "")
    failed = tuple(name for name, how in ended.items() if how == "FAILED")
    if not running:
        return Ran(0, failed, "did not end, and no test was running")
    unrun = frozenset(tests.split(":")) - set(begun(output))
    passed = len(ended) - len(failed)
    failed = (*failed, f"{running} (does not end)")
    return Ran(passed, failed, hung=running, unrun=unrun, found=found_in(output))


def verdict(mutation: Mutation, without: Ran, broken: Ran | None) -> tuple[str, str]:
    """The row of the table, and the complaint about it: empty if it is as expected."""
    if broken is None:
        return f"| {mutation.name} | does not compile | | |", "does not compile"
    told = ", ".join(broken.failed)
    if broken.hung:
        told += f": {broken.seconds:.0f} s; without the mutation {without.seconds:.1f} s"
    row = f"| {mutation.name} | {told} | {broken.found} | {broken.seconds:.1f} |"
    if without.failed or without.trouble:
        return row, f"without it: {without.trouble or 'failed: ' + ', '.join(without.failed)}"
    if broken.trouble:
        return row, broken.trouble
    blind = set(mutation.tests.split(":")) - {name.partition(" ")[0] for name in broken.failed}
    blind -= broken.unrun
    return row, f"{', '.join(sorted(blind))} does not notice it" if blind else ""


def build(copy: Path, program: str) -> Path | None:
    configure = [*CONFIGURE, f"-DPYCOMM_WALKED={copy / WALKED}"]
    return mutated.build(copy, copy / "build" / "cpp-plain", f"{program}_test", configure)


def try_all(copy: Path, mutations: Sequence[Mutation]) -> tuple[list[str], list[str]]:
    """Print the table's rows; return the complaints, and the mutations noticed by time alone."""
    wrong = []
    by_time = []
    unbroken = {}
    for name in sorted({mutation.program for mutation in mutations}):
        program = build(copy, name)
        if program is None:
            return [f"{name}_test does not compile without a mutation"], []
        for tests in {each.tests for each in mutations if each.program == name}:
            unbroken[name, tests] = run_tests(program, tests)
    for mutation in sorted(mutations, key=lambda each: each.program):
        folder = copy / (WALKED if mutation.program == WALK else SOURCES)
        with mutated.broken(mutated.path_of(folder, mutation), mutation):
            program = build(copy, mutation.program)
        without = unbroken[mutation.program, mutation.tests]
        ran = run_tests(program, mutation.tests, limit_of(without)) if program else None
        row, complaint = verdict(mutation, without, ran)
        print(row, flush=True)
        if complaint:
            wrong.append(f"{mutation.name}: {complaint}")
        elif ran and ran.hung:
            by_time.append(mutation.name)
    return wrong, by_time


def main(about: str, mutations: Sequence[Mutation]) -> int:
    """Do what the command line asks for; `about` begins with what the program is for."""
    options = mutated.parser(about.splitlines()[0]).parse_args()
    wrong = misplaced(mutated.ROOT, mutations)
    if wrong or options.check:
        print("\n".join(wrong) or f"all {len(mutations)} mutations apply")
        return 1 if wrong else 0
    with tempfile.TemporaryDirectory(prefix="pycomm-mutations-") as scratch:
        copy = options.work or Path(scratch)
        mutated.copy_sources(copy)
        host = SOURCES / "engine" / "host"
        mutated.copy_folder(copy / host, copy / WALKED / "engine" / "host")
        keep_only_wanted_tests(copy, mutations)
        print("| condition that is left out | tests that fail | what they found | seconds |")
        print("|---|---|---|---|", flush=True)
        chosen = mutated.chosen(mutations, options.only)
        wrong, by_time = try_all(copy, chosen)
    last = f"{len(chosen)} mutations, {len(wrong)} not as expected"
    last += f"; noticed by time alone: {', '.join(by_time) or 'none'}"
    print("\n".join([*wrong, last]))
    return 1 if wrong else 0
