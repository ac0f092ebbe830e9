"""Build floors 0 to 3 and run their tests.

python tools/cpp.py plain|cxx20|asan|tsan [CMake arguments]; more of these in $CMAKE_ARGS.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import machine

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"

# Each flavour has a build folder of its own. Warnings are errors where developers and CI look, not
# where users build.
FLAVOURS = {
    "plain": [],
    "cxx20": ["-DPYCOMM_CXX_STANDARD=20", "-DPYCOMM_PRECOMPILE=OFF", "-DPYCOMM_WERROR=ON"],
    "asan": ["-DPYCOMM_SANITIZE=address,undefined", "-DPYCOMM_WERROR=ON"],
    "tsan": ["-DPYCOMM_SANITIZE=thread", "-DPYCOMM_WERROR=ON"],
}

GTEST_HINT = """\
CMake could not configure the tests. If GoogleTest is what it missed, install it (Debian, Ubuntu: \
sudo apt-get install libgtest-dev libgmock-dev   Fedora: sudo dnf install gtest-devel \
gmock-devel), or name a copy of its sources: \
make test CMAKE_ARGS=-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=<folder>"""


# More failures than this are no accident, and are not run again.
FEW = 2

# What a sanitizer's findings begin with. They are never accidents.
SANITIZER_REPORTS = ("ERROR: AddressSanitizer", "WARNING: ThreadSanitizer", "runtime error:")


@dataclasses.dataclass(frozen=True)
class Counts:
    """What the test programs left."""

    ran: int
    skipped: int
    failed: Mapping[str, Sequence[str]]
    """By program, those that have any."""

    @property
    def names(self) -> list[str]:
        """The failed tests of all programs."""
        return [name for names in self.failed.values() for name in names]


def counts(results: Path) -> Counts:
    """Reads the programs' results. One that crashed has left none."""
    ran = skipped = 0
    failed: dict[str, list[str]] = {}
    for path in sorted(results.glob("*.json")):
        for suite in json.loads(path.read_text())["testsuites"]:
            for case in suite["testsuite"]:
                ran += case["status"] == "RUN"
                skipped += case.get("result") == "SKIPPED"
                if case.get("failures"):
                    failed.setdefault(path.stem, []).append(f"{suite['name']}.{case['name']}")
    return Counts(ran, skipped, failed)


def may_be_accidents(found: Counts, folder: Path) -> bool:
    """Whether only few tests failed, and no program for another reason than its tests."""
    logs = folder / "Testing" / "Temporary"
    failed_programs = (logs / "LastTestsFailed.log").read_text().split()
    said = (logs / "LastTest.log").read_text(errors="replace")
    return (
        0 < len(found.names) <= FEW
        and len(found.failed) == len(failed_programs)
        and not any(report in said for report in SANITIZER_REPORTS)
    )


def test_prefix(flavour: str) -> list[str]:
    # GCC 12's ThreadSanitizer cannot map its shadow memory under the address randomisation of newer
    # kernels.
    fixed = ["setarch", platform.machine(), "-R"]
    return fixed if flavour == "tsan" and machine.succeeds(*fixed, "true") else []


def build(flavour: str, cmake_arguments: Sequence[str] = (), target: str = "all") -> Path | None:
    """Builds one flavour, with fault points, and returns its folder; None if that failed."""
    folder = BUILD / f"cpp-{flavour}"
    jobs = str(machine.jobs(1.0))
    given = [*cmake_arguments, *os.environ.get("CMAKE_ARGS", "").split()]
    sources = "FETCHCONTENT_SOURCE_DIR_GOOGLETEST"
    if sources not in os.environ and not any(sources in argument for argument in given):
        machine.find_googletest()
    configure = [
        "cmake",
        "-S",
        str(ROOT),
        "-B",
        str(folder),
        "-DPYCOMM_FAULT_POINTS=ON",
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


def main() -> int:
    flavour, *cmake_arguments = sys.argv[1:] or ["plain"]
    folder = build(flavour, cmake_arguments)
    if folder is None:
        return 1
    results = folder / "results"
    jobs = str(machine.jobs(1.0))

    shutil.rmtree(results, ignore_errors=True)
    ctest = [
        *test_prefix(flavour),
        "ctest",
        "--test-dir",
        str(folder),
        "--output-on-failure",
        "-j",
        jobs,
    ]
    code = subprocess.run(ctest, check=False).returncode
    found = counts(results)
    failed = ", ".join(found.names)
    flaky = ""
    if code != 0 and may_be_accidents(found, folder):
        # Why: see tools/python_tests.py.
        print(f"=== once more, alone: {failed}", flush=True)
        alone = os.environ | {"GTEST_FILTER": ":".join(found.names)}
        code = subprocess.run([*ctest, "--rerun-failed"], env=alone, check=False).returncode
        if code == 0:
            flaky = f". FLAKY, passed when run again alone: {failed}"
    passed = found.ran - len(found.names) - found.skipped
    print(
        f"C++ {flavour}: {'passed' if code == 0 else 'FAILED'}, {passed} passed, "
        f"{len(found.names)} failed, {found.skipped} skipped{flaky}",
        flush=True,
    )
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
