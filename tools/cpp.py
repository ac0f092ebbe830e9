"""Build layers 0 to 3 and run their tests.

    python tools/cpp.py FLAVOUR [--slow] [CMake arguments]

FLAVOUR is a key of FLAVOURS below. $CMAKE_ARGS may hold more arguments for CMake.

tests/cpp/slow_tests.txt lists slow tests of a flavour. They are left out, and with --slow only they
run: by `.ci/run` for plain, by `make nightly` under sanitizers. The flavours whose names end in
_full run all tests, with every case. Where $GTEST_FILTER is set, it alone chooses the tests.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import machine
import native
import reruns

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
# Every group size and more seeds: plain in `make nightly`, the sanitizers in `make release`.
for name in ("plain", "asan", "tsan"):
    FLAVOURS[f"{name}_full"] = [*FLAVOURS[name], "-DPYCOMM_TEST_IN_FULL=ON"]
SLOW = ROOT / "tests" / "cpp" / "slow_tests.txt"
NOT_GTEST = "^(simulator.*|agreement|schedule_cost)$"  # of ctest's tests

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


def names_in(listing: str) -> list[str]:
    """The tests that --gtest_list_tests has printed."""
    found, suite = [], ""
    for line in listing.splitlines():
        if re.match(r"\S+\.( |$)", line):
            suite = line.split()[0]
        elif suite and line.startswith("  "):
            found.append(suite + line.split()[0])
    return [name for name in found if "DISABLED_" not in name]


def names(folder: Path, prefix: Sequence[str]) -> list[str]:
    """All tests of the test programs in a build folder."""
    found = []
    for program in sorted((folder / "tests" / "cpp").glob("*_test")):
        command = [*prefix, str(program), "--gtest_list_tests"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found += names_in(done.stdout)
    return found


def slow_patterns(flavour: str, text: str) -> list[str]:
    """The patterns under the headings that name this flavour, as `[asan tsan]` does."""
    found, ours = [], False
    for line in (each.partition("#")[0].strip() for each in text.splitlines()):
        if line.startswith("["):
            ours = flavour in line.strip("[]").split()
        elif line and ours:
            found.append(line)
    return found


def chosen_of(flavour: str, every: Sequence[str], *, slow: bool) -> tuple[list[str], str]:
    """The tests of this flavour that run, and the filter that chooses them."""
    patterns = slow_patterns(flavour, SLOW.read_text())
    # ThreadSanitizer's build has not all programs.
    gone = [each for each in patterns if not fnmatch.filter(every, each)]
    if gone and flavour != "tsan":
        raise SystemExit(f"{SLOW} names tests that do not exist: {', '.join(gone)}")
    listed = [name for name in every if any(fnmatch.fnmatchcase(name, each) for each in patterns)]
    if slow:
        return listed, ":".join(listed) or "none"
    return sorted(set(every) - set(listed)), f"*-{':'.join(listed)}" if listed else "*"


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    slow = "--slow" in sys.argv
    flavour, *cmake_arguments = [each for each in sys.argv[1:] if each != "--slow"] or ["plain"]
    folder = build(flavour, cmake_arguments)
    if folder is None:
        return 1
    results = folder / "results"
    jobs = str(machine.jobs(1.0, waiting=2))

    shutil.rmtree(results, ignore_errors=True)
    prefix = test_prefix(flavour)
    ctest = [*prefix, "ctest", "--test-dir", str(folder), "--output-on-failure", "-j", jobs]
    ctest += ["-E", NOT_GTEST] if slow else []
    env, wanted = dict(os.environ), list[str]()
    if "GTEST_FILTER" not in env:  # the caller's own filter alone chooses
        wanted, env["GTEST_FILTER"] = chosen_of(flavour, names(folder, prefix), slow=slow)
    code = subprocess.run(ctest, env=env, check=False).returncode
    found = counts(results)
    failed = ", ".join(found.names)
    again = ""
    if code != 0 and may_run_again(found, folder):
        print(f"=== too slow, run again alone: {failed}", flush=True)
        code = 0 if run_again(folder, found.failed, prefix) else code
        again = reruns.report(found.names, code == 0)
    if code == 0 and wanted and sorted(found.tests) != sorted(wanted):
        print(f"C++ {flavour}: did not run exactly once: {', '.join(wrong_times(found, wanted))}")
        code = 1
    passed = found.ran - len(found.names) - found.skipped
    print(
        f"C++ {flavour}{' slow' if slow else ''}: {'passed' if code == 0 else 'FAILED'}, "
        f"{passed} passed, {len(found.names)} failed, {found.skipped} skipped{again}",
        flush=True,
    )
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
