"""Build layers 0 to 3 and run their tests.

    python tools/cpp.py FLAVOUR [--all-cases] [--remember-failures] [CMake arguments]

FLAVOUR is a key of FLAVOURS below. $CMAKE_ARGS may hold more arguments for CMake.

Under a sanitizer the tests that tests/cpp/in_shares.txt lists come in shares, a fifth on each day:
see cpp_shares.py. All of them run with --all-cases, and in the flavours whose names end in _full.
With --remember-failures tests that fail are added to tests/python/always.txt: they run on every day
then. Where $GTEST_FILTER is set, it alone chooses the tests.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import cpp_shares
import machine
import native
import reruns
import shares

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"

# Each flavour has a build folder of its own. Warnings are errors where developers and CI look, not
# where users build. Precompiled headers hide a missing include, so not every flavour has them; nor
# does it have units of many files (united() below).
FLAVOURS = {
    "plain": [],
    "strict": ["-DPYCOMM_PRECOMPILE=OFF", "-DPYCOMM_WERROR=ON"],
    "asan": ["-DPYCOMM_SANITIZE=address,undefined", "-DPYCOMM_WERROR=ON"],
    "tsan": ["-DPYCOMM_SANITIZE=thread", "-DPYCOMM_WERROR=ON"],
}
# Every group size and as many seeds as without a sanitizer: `make nightly`.
IN_SHARES = ("asan", "tsan")
for name in IN_SHARES:
    FLAVOURS[f"{name}_full"] = [*FLAVOURS[name], "-DPYCOMM_TEST_IN_FULL=ON"]

GTEST_HINT = """\
CMake could not configure the tests. If GoogleTest is what it missed, install it (Debian, Ubuntu: \
sudo apt-get install libgtest-dev libgmock-dev   Fedora: sudo dnf install gtest-devel \
gmock-devel), or name a copy of its sources: \
make test CMAKE_ARGS=-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=<folder>"""


# What a sanitizer's findings begin with. A program that printed one is not run again.
SANITIZER_REPORTS = (
    "ERROR: AddressSanitizer",
    "ERROR: LeakSanitizer",
    "WARNING: ThreadSanitizer",
    "runtime error:",
)

AGAIN_LIMIT_S = 600  # ctest's limit for a program
# What EXPECT_WITHIN_MS of tests/cpp/within.h writes on the line after the place.
TIME_BOUND = re.compile(r"[^\n]*\nTookTooLong: ")


@dataclasses.dataclass(frozen=True)
class Counts:
    """What the test programs left."""

    tests: Sequence[str]
    """That ran."""
    skipped: int
    failed: Mapping[str, Sequence[str]]
    """By program, those that have any."""
    late: Collection[str] = ()
    """Those of them whose failures are all time bounds."""

    @property
    def ran(self) -> int:
        return len(self.tests)

    @property
    def names(self) -> list[str]:
        """The failed tests of all programs."""
        return [name for names in self.failed.values() for name in names]


def counts(results: Path, program: str = "*") -> Counts:
    """Reads the programs' results. One that crashed has left none."""
    ran, skipped = [], 0
    failed: dict[str, list[str]] = {}
    late = set()
    for path in sorted(results.glob(f"{program}.json")):
        for suite in json.loads(path.read_text())["testsuites"]:
            for case in suite["testsuite"]:
                name = f"{suite['name']}.{case['name']}"
                ran += [name] if case["status"] == "RUN" else []
                skipped += case.get("result") == "SKIPPED"
                if failures := case.get("failures"):
                    failed.setdefault(path.stem, []).append(name)
                    if all(TIME_BOUND.match(each["failure"]) for each in failures):
                        late.add(name)
    return Counts(ran, skipped, failed, late)


def wrong_times(found: Counts, wanted: Sequence[str]) -> list[str]:
    """Tests that did not run, that ran more than once, or that nobody asked for."""
    ran, asked = collections.Counter(found.tests), collections.Counter(wanted)
    return sorted((ran - asked) + (asked - ran))


def may_run_again(found: Counts, folder: Path) -> bool:
    """Whether all that failed are few tests, each by time bounds only."""
    logs = folder / "Testing" / "Temporary"
    failed_programs = (logs / "LastTestsFailed.log").read_text().split()
    said = (logs / "LastTest.log").read_text(errors="replace")
    return (
        0 < len(found.names) <= reruns.FEW
        and all(name in found.late for name in found.names)
        and len(found.failed) == len(failed_programs)
        and not any(report in said for report in SANITIZER_REPORTS)
    )


_TEST_OR_END = re.compile(
    r"^\[ +(RUN|OK|FAILED|SKIPPED) +\] (\S+)|^(\d+/\d+ Testing: )|("
    + "|".join(SANITIZER_REPORTS)
    + ")",
    re.MULTILINE,
)


def broken_off(log: str) -> list[str]:
    """The tests in which a program crashed, ran out of time or printed a sanitizer's report.

    They have left no failure in its results. `log` is what ctest has kept of all programs.
    """
    found, running = [], ""
    for match in _TEST_OR_END.finditer(log + "\n1/1 Testing: "):
        what, name, program, report = match.groups()
        if what == "RUN":
            running = name
        elif running and (program or report):
            found.append(running)
        if what != "RUN" and not report:
            running = ""
    return sorted(set(found))


def run_again(folder: Path, failed: Mapping[str, Sequence[str]], prefix: Sequence[str]) -> bool:
    """Runs these tests alone, one program at a time; whether they passed.

    Not by ctest, which would give a part of a program only its part of them.
    """
    home, result = folder / "tests" / "cpp", folder / "results" / "again.json"
    for part, names in failed.items():
        program = str(home / f"{part.partition('-')[0]}_test")
        filters = [f"--gtest_filter={':'.join(names)}", f"--gtest_output=json:{result}"]
        result.unlink(missing_ok=True)
        try:
            done = subprocess.run(
                [*prefix, program, *filters], cwd=home, check=False, timeout=AGAIN_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return False
        # A filter that fits no test is no failure to GoogleTest.
        if done.returncode != 0 or counts(result.parent, "again").ran != len(names):
            return False
    return True


def test_prefix(flavour: str) -> list[str]:
    # GCC 12's ThreadSanitizer cannot map its shadow memory under the address randomisation of newer
    # kernels.
    fixed = ["setarch", platform.machine(), "-R"]
    return fixed if flavour.startswith("tsan") and machine.succeeds(*fixed, "true") else []


def united(flavour: str) -> bool:
    """Whether many files are compiled at once, which hides a missing include, too."""
    return flavour != "strict" and native.wanted()


def googletest_arguments(folder: Path) -> list[str]:
    """CMake's arguments for GoogleTest; prints a line if CMake will probably download it."""
    found = machine.find_googletest(ROOT / "build" / "googletest")
    if found is None and not (folder / "_deps" / "googletest-src").is_dir():
        print("no GoogleTest found: CMake downloads it (1 MB), unless CMake finds one", flush=True)
    return found or []


def build(flavour: str, cmake_arguments: Sequence[str] = (), target: str = "all") -> Path | None:
    """Builds one flavour, with fault points, and returns its folder; None if that failed."""
    folder = BUILD / f"cpp-{flavour}"
    jobs = str(machine.jobs(1.0))
    given = [*cmake_arguments, *os.environ.get("CMAKE_ARGS", "").split()]
    machine.drop_moved_build(folder, ROOT)
    sources = "FETCHCONTENT_SOURCE_DIR_GOOGLETEST"
    if sources not in os.environ and not any(sources in argument for argument in given):
        given = [*googletest_arguments(folder), *given]
    configure = [
        "cmake",
        "-S",
        str(ROOT),
        "-B",
        str(folder),
        "-DPYCOMM_FAULT_POINTS=ON",
        f"-DCMAKE_UNITY_BUILD={'ON' if united(flavour) else 'OFF'}",
        *FLAVOURS[flavour],
    ]
    if shutil.which("ninja") and not (folder / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja"]
    if subprocess.run([*configure, *given], stdout=subprocess.DEVNULL, check=False).returncode != 0:
        print(GTEST_HINT, file=sys.stderr)
        return None
    command = ["cmake", "--build", str(folder), "-j", jobs, "--target", target]
    if subprocess.run(command, check=False).returncode != 0:
        print(f"C++ {flavour}: the build failed", file=sys.stderr)
        return None
    return folder


def in_shares(folder: Path, prefix: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Chooses today's share; returns the environment that runs it, and those tests."""
    shares.choose()
    today = os.environ["SHARE"]
    every = cpp_shares.names(folder, prefix)
    later = cpp_shares.later(every)
    print(
        f"C++: share {today} of {shares.SHARES} (SHARE={today} repeats it), "
        f"{len(later)} of {len(every)} tests run on other days",
        flush=True,
    )
    # ThreadSanitizer's build has not all programs.
    if folder.name == "cpp-asan" and (gone := cpp_shares.unmatched(every)):
        raise SystemExit(f"{cpp_shares.LISTED} names tests that do not exist: {', '.join(gone)}")
    filters = {"GTEST_FILTER": f"*-{':'.join(later)}"} if later else {}
    return os.environ | filters, sorted(set(every) - set(later))


def main() -> int:
    options = {"--all-cases", "--remember-failures"} & {*sys.argv[1:]}
    flavour, *cmake_arguments = [each for each in sys.argv[1:] if each not in options] or ["plain"]
    folder = build(flavour, cmake_arguments)
    if folder is None:
        return 1
    results = folder / "results"
    jobs = str(machine.jobs(1.0, waiting=2))

    shutil.rmtree(results, ignore_errors=True)
    prefix = test_prefix(flavour)
    ctest = [*prefix, "ctest", "--test-dir", str(folder), "--output-on-failure", "-j", jobs]
    chosen, wanted = dict(os.environ), list[str]()
    # A filter of the caller's own chooses, whatever the share.
    if flavour in IN_SHARES and "--all-cases" not in options and "GTEST_FILTER" not in os.environ:
        chosen, wanted = in_shares(folder, prefix)
    elif "GTEST_FILTER" not in os.environ:
        wanted = sorted(cpp_shares.names(folder, prefix))
    code = subprocess.run(ctest, env=chosen, check=False).returncode
    found = counts(results)
    failed = ", ".join(found.names)
    again = ""
    if code != 0 and may_run_again(found, folder):
        print(f"=== too slow, run again alone: {failed}", flush=True)
        code = 0 if run_again(folder, found.failed, prefix) else code
        again = reruns.report(found.names, code == 0)
    if code == 0 and wanted and sorted(found.tests) != wanted:
        print(f"C++ {flavour}: did not run exactly once: {', '.join(wrong_times(found, wanted))}")
        code = 1
    if code != 0 and "--remember-failures" in options:
        log = folder / "Testing" / "Temporary" / "LastTest.log"
        shares.remember([*found.names, *broken_off(log.read_text(errors="replace"))])
    passed = found.ran - len(found.names) - found.skipped
    print(
        f"C++ {flavour}: {'passed' if code == 0 else 'FAILED'}, {passed} passed, "
        f"{len(found.names)} failed, {found.skipped} skipped{again}",
        flush=True,
    )
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
