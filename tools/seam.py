"""Build the extension with AddressSanitizer and UBSan, and run Python tests with it.

    python tools/seam.py            the tests of tests/python/seam_tests.txt under [ci]
    python tools/seam.py --listed   the files under [nightly]: what `make nightly` runs
    python tools/seam.py --all      the rest, less what seam_skipped.txt lists: `make release`
    python tools/seam.py test…      these tests, as pytest names them

`make asan` covers the C++ core. This covers what includes torch: csrc/c10d, ddp and bindings. The
extension lies in build/seam/pycomm. It links the core as `make asan` compiles it.

Python itself is not compiled with the sanitizers, so libasan.so is preloaded into every process,
also those that tests start. A report ends its process. Reports go to build/seam/reports: the run
fails if there is one, whatever the tests made of the dead process. Before any test, a
use-after-free that is compiled into this build is committed once, to prove that it is reported.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import cpp
import fault_build
import machine
import native

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "seam"
PACKAGE = BUILD / "pycomm"
REPORTS = BUILD / "reports"
TESTS = ROOT / "tests" / "python"
PLANTED = TESTS / "tools" / "seam_planted.py"

GIB_PER_COMPILER = 4.0
GIB_PER_PROCESS = 4.0  # of those that run tests, with the ranks of each
AT_LEAST = {"ci": 40, "nightly": 200}  # tests that must pass
REPORT_NCHARS = 20_000
SANITIZE = ("-fsanitize=address,undefined", "-g1")
# Leaks: Python and torch keep much memory to the end. Segmentation faults stay the tests' own: some
# send them. Several allocators of torch's libraries are not told apart. A small quarantine, since
# each rank has one.
ASAN_OPTIONS = (
    "detect_leaks=0",
    "handle_segv=0",
    "alloc_dealloc_mismatch=0",
    "quarantine_size_mb=16",
    f"log_path='{REPORTS}/asan'",
)
UBSAN_OPTIONS = ("print_stacktrace=1", "halt_on_error=1", f"log_path='{REPORTS}/ubsan'")


def listed(path: Path, heading: str = "") -> list[str]:
    """The lines of a list of tests, under one heading if it has some, without comments."""
    found, under = [], ""
    for line in (each.partition("#")[0].strip() for each in path.read_text().splitlines()):
        if line.startswith("["):
            under = line.strip("[]")
        elif line and under == heading:
            found.append(line)
    return found


def build() -> bool:
    """Builds the extension; False if that failed."""
    machine.find_headers(native.HEADERS)
    core = cpp.build("asan", target="pycomm_core")
    if core is None:
        return False
    torch = native.Torch.installed()
    extension = native.module_in(PACKAGE, torch)
    extension.parent.mkdir(parents=True, exist_ok=True)
    fault_build.mirror_python_files(PACKAGE)
    info = PACKAGE / "_build_info.py"  # the ordinary build may not exist yet
    info.unlink(missing_ok=True)
    info.write_text('"""Written by tools/seam.py."""\n\nGIT_COMMIT = ""\n')
    file = native.NinjaFile(BUILD, SANITIZE)
    objects = native.torch_objects(file, torch, BUILD / torch.tag, ["faults", "sanitize"])
    file.link(extension, [*objects, core / "libpycomm_core.a"], torch)
    command = file.command("seam", native.jobs(GIB_PER_COMPILER))
    return subprocess.run([*command, "--quiet"], cwd=ROOT, check=False).returncode == 0


def runtime_library(name: str) -> str:
    """The path of one of the compiler's libraries."""
    compiler = os.environ.get("CXX", "c++").split()
    found = subprocess.run(
        [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return str(Path(found.stdout.strip()).resolve())


def environment() -> dict[str, str]:
    """In which this extension is what `import pycomm` loads."""
    # libstdc++ too: AddressSanitizer looks for __cxa_throw when it starts.
    preload = [runtime_library("libasan.so"), runtime_library("libstdc++.so")]
    return os.environ | {
        "LD_PRELOAD": ":".join(preload),
        "ASAN_OPTIONS": ":".join(ASAN_OPTIONS),
        "UBSAN_OPTIONS": ":".join(UBSAN_OPTIONS),
        "PYTHONPATH": str(BUILD),
        "TEST_FAULT_BUILD": str(PACKAGE),
        "TEST_NO_TIME_BOUNDS": "1",
    }


def run_pytest(arguments: Sequence[str], *, quiet: bool = False) -> tuple[int, str, list[Path]]:
    """Runs pytest; returns its exit status, its last line, and the sanitizers' reports."""
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    # As a script, not as `-m pytest`, which puts this folder and its pycomm first.
    pytest = Path(sys.executable).with_name("pytest")
    command = [sys.executable, str(pytest), "--require-native", "-p", "no:cacheprovider"]
    child = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    last = "no output"
    for line in child.stdout or []:
        if not quiet:
            print(line, end="", flush=True)
        last = line.strip() or last
    return child.wait(), last.strip("= "), sorted(REPORTS.iterdir())


def planted_defect_is_reported() -> bool:
    """Whether the use-after-free in this build fails its test and is reported, with its line."""
    code, last, reports = run_pytest([str(PLANTED)], quiet=True)
    said = "\n".join(path.read_text(errors="replace") for path in reports)
    if code == 1 and "heap-use-after-free" in said and "useAfterFreeIfArmed" in said:
        return True
    print(f"seam: the planted use-after-free was not reported: pytest ended with {code} ({last})")
    print(said[-4000:])
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--listed", action="store_true", help="the files that are listed")
    parser.add_argument("--all", action="store_true", help="what the list leaves out")
    options, arguments = parser.parse_known_args()
    if not build():
        print("seam: FAILED, the extension with sanitizers could not be built", file=sys.stderr)
        return 1
    if not planted_defect_is_reported():
        print("seam: FAILED")
        return 1
    in_ci, lines = (listed(TESTS / "seam_tests.txt", ring) for ring in ("ci", "nightly"))
    files = [line for line in lines if not line.startswith("- ")]
    later = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    left_out = listed(TESTS / "seam_skipped.txt")
    at_least = 0
    if options.all:
        every = [str(path.relative_to(ROOT)) for path in sorted(TESTS.glob("*/test_*.py"))]
        others = [file for file in every if file not in files]
        arguments = [*others, *later, "--ring=test,ci,nightly", *arguments]
    elif options.listed:
        arguments = [*files, "--ring=test,ci,nightly", *arguments]
        left_out += later
        at_least = AT_LEAST["nightly"]
    elif all(each.startswith("-") for each in arguments):
        arguments = [*in_ci, *arguments]
        at_least = AT_LEAST["ci"]
    arguments += [f"--deselect={name}" for name in left_out]
    arguments = ["-n", str(machine.jobs(GIB_PER_PROCESS)), *arguments]
    began_s = time.monotonic()
    code, last, reports = run_pytest(arguments)
    for path in reports:
        print(f"=== {path}\n{path.read_text(errors='replace')[:REPORT_NCHARS]}")
    passed = re.search(r"(\d+) passed", last)
    too_few = (int(passed[1]) if passed else 0) < at_least
    if too_few:
        print(f"seam: {TESTS / 'seam_tests.txt'} has fewer than {at_least} tests that pass")
    failed = bool(code or reports or too_few)
    verdict = "FAILED" if failed else "passed"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"seam: {verdict}, {len(reports)} sanitizer reports, {time.monotonic() - began_s:.0f} s, "
        f"{used.ru_utime + used.ru_stime:.0f} s of cores. {last}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
