"""Remove one condition at a time; named tests must fail: security_mutations.py and its kind.

The tests that should notice a mutation run without it, where they must pass, and with it, where
each must fail, die, or not end in ten times as long as without it. A program fails if that is
otherwise, if a test is skipped, and, before it builds anything, if the text of a mutation no longer
stands exactly once in its file. It prints a table: the tests that failed, what the first of them
says if it says it in words, and the seconds. The line behind it names the mutations that a test
noticed only because it did not end.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mutated
from mutated import Tally, Verdict

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

    @property
    def names(self) -> list[str]:
        """Of the tests."""
        return self.tests.split(":")


def misplaced(tree: Path, mutations: Sequence[Mutation]) -> list[str]:
    """Mutations that do not apply to this tree, and tests that it does not have, in words."""
    return mutated.misplaced(tree, SOURCES, mutations) + missing_tests(tree, mutations)


def missing_tests(tree: Path, mutations: Sequence[Mutation]) -> list[str]:
    """Tests that the tree does not have, in words."""
    programs = {mutation.program for mutation in mutations}
    there = {program: "".join(map(Path.read_text, tests_of(tree, program))) for program in programs}
    return [
        f"{mutation.name}: there is no test {test}"
        for mutation in mutations
        for test in mutation.names
        if f"({test.replace('.', ', ', 1)})" not in there[mutation.program]
    ]


def tests_of(tree: Path, program: str) -> list[Path]:
    return sorted((tree / "tests" / "cpp" / program).rglob("*_test.cc"))


def keep_only_wanted_tests(copy: Path, mutations: Sequence[Mutation]) -> None:
    """Compiling the others would take most of the time."""
    for program in {mutation.program for mutation in mutations}:
        names = [name for each in mutations if each.program == program for name in each.names]
        suites = {test.partition(".")[0] for test in names}
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


class Tested(mutated.Change, Protocol):
    """A mutation that tests notice."""

    @property
    def names(self) -> Sequence[str]:
        """Of the tests. Each must fail."""

    @property
    def program(self) -> str:
        """That has them."""


def verdict(mutation: Tested, without: Ran, broken: Ran | None) -> Verdict:
    if broken is None:
        return Verdict(f"| {mutation.name} | does not compile | | |", "does not compile", False)
    told = ", ".join(broken.failed)
    if broken.hung:
        told += f": {broken.seconds:.0f} s; without the mutation {without.seconds:.1f} s"
    row = f"| {mutation.name} | {told} | {broken.found} | {broken.seconds:.1f} |"
    blind = set(mutation.names) - {name.partition(" ")[0] for name in broken.failed}
    blind -= broken.unrun
    complaint = broken.trouble
    if without.failed or without.trouble:
        complaint = f"without it: {without.trouble or 'failed: ' + ', '.join(without.failed)}"
    elif blind and not complaint:
        complaint = f"{', '.join(sorted(blind))} does not notice it"
    return Verdict(row, complaint, not complaint)


class Workshop(Protocol):
    """A copy of the tree in which mutations are tried."""

    objects: mutated.Objects

    def path_of(self, mutation: Any) -> Path:
        """The file that it changes."""

    def build(self, program: str) -> Path | None:
        """What runs the program's tests; None if it does not compile."""

    def run(self, built: Path, mutation: Any, limit_s: float) -> Ran:
        """Runs the mutation's tests."""


def try_all(workshop: Workshop, mutations: Sequence[Tested], tally: Tally) -> None:
    """Prints the table, one program's mutations after the other's."""
    print("| condition that is left out | tests that fail | what they found | seconds |")
    print("|---|---|---|---|", flush=True)
    programs = {}
    for name in dict.fromkeys(each.program for each in mutations):
        built = programs[name] = workshop.build(name)
        if built is None:
            tally.wrong.append(f"{name}: its tests do not compile without a mutation")
            return
    unbroken: dict[tuple[str, str], Ran] = {}
    for each in mutations:
        if (key := (each.program, ":".join(each.names))) not in unbroken:
            unbroken[key] = workshop.run(programs[each.program], each, LIMIT_S)
    workshop.objects.keep()
    by_time = []
    for each in sorted(mutations, key=lambda each: list(programs).index(each.program)):
        without = unbroken[each.program, ":".join(each.names)]
        with mutated.broken(workshop.path_of(each), each, workshop.objects):
            built = workshop.build(each.program)
            ran = workshop.run(built, each, limit_of(without)) if built else None
        found = verdict(each, without, ran)
        tally.add(each, found)
        if found.noticed and ran and ran.hung:
            by_time.append(each.name)
    tally.notes.append(f"noticed by time alone: {', '.join(by_time) or 'none'}")


class GoogleTests:
    """The programs of tests/cpp, less the tests that these mutations do not need.

    The files that they break are compiled alone. The others are in units, each of which takes a
    compiler up to half a minute.
    """

    _BUILD = "build/cpp-plain"

    def __init__(self, copy: Path, mutations: Sequence[Mutation]) -> None:
        self.objects = mutated.Objects(copy, self._BUILD)
        self._copy = copy
        mutated.copy_sources(copy)
        host = SOURCES / "engine" / "host"
        mutated.copy_folder(copy / host, copy / WALKED / "engine" / "host")
        keep_only_wanted_tests(copy, mutations)
        files = {self.path_of(each) for each in mutations if each.file.endswith(".cc")}
        listed = "".join(f"  {file}\n" for file in sorted(files))
        self._alone = copy / "alone.cmake"
        text = (
            f"set_source_files_properties(\n{listed}  PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)\n"
        )
        if not self._alone.exists() or self._alone.read_text() != text:
            self._alone.write_text(text)

    def path_of(self, mutation: Mutation) -> Path:
        folder = self._copy / (WALKED if mutation.program == WALK else SOURCES)
        return mutated.path_of(folder, mutation)

    def build(self, program: str) -> Path | None:
        configure = [
            *CONFIGURE,
            f"-DPYCOMM_WALKED={self._copy / WALKED}",
            f"-DCMAKE_PROJECT_pycomm_INCLUDE={self._alone}",
        ]
        return mutated.build(self._copy, self._copy / self._BUILD, f"{program}_test", configure)

    def run(self, built: Path, mutation: Mutation, limit_s: float) -> Ran:
        return run_tests(built, mutation.tests, limit_s)


def main(about: str, mutations: Sequence[Mutation]) -> int:
    """Does what the command line asks for; `about` begins with what the program is for."""

    def attempt(copy: Path, chosen: Sequence[Mutation], _: argparse.Namespace) -> Tally:
        tally = Tally()
        try_all(GoogleTests(copy, mutations), chosen, tally)
        return tally

    def wrong(tree: Path) -> list[str]:
        return misplaced(tree, mutations)

    return mutated.main(mutated.parser(about), mutations, wrong, attempt)
