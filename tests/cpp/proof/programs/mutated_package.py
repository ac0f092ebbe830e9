"""Break one line of the package or of its extension; a named Python test must fail.

step_mutations.py has the list. It is judged as by mutated_tests.py: the test passes without the
mutation, and with it fails, dies, or does not end in ten times as long. Python files need no build.
For those of csrc the extension is built again, from objects that the repository has if there are
any.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import mutated
import mutated_tests
from mutated import ROOT, Tally
from mutated_tests import Ran

PARTS = (
    "cmake",
    "csrc",
    "pycomm",
    "tests/python",
    "tests/rig",
    "tools",
    "CMakeLists.txt",
    "README.md",
    "_pycomm_autoload.py",
    "pyproject.toml",
    "setup.py",
)
BUILT = ("build/native", "build/units", "build/python-headers")
_NO_TEST_RAN = (3, 4, 5)  # pytest's exit statuses


class Mutation(NamedTuple):
    name: str
    file: str  # its name; it lies in a subfolder of pycomm or of csrc
    old: str
    new: str
    test: str
    """As pytest names it, without spaces."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.test,)

    @property
    def program(self) -> str:
        """The folder with its file."""
        return "pycomm" if self.file.endswith(".py") else "csrc"


def misplaced(tree: Path, mutations: Sequence[Mutation]) -> list[str]:
    """Mutations that do not apply to this tree, and tests that it does not have, in words."""
    found = []
    for each in mutations:
        found += mutated.misplaced(tree, Path(each.program), [each])
        file, _, name = each.test.partition("::")
        function = f"\ndef {name.partition('[')[0]}("
        if not (tree / file).is_file() or function not in (tree / file).read_text():
            found.append(f"{each.name}: there is no test {each.test}")
    return found


def read_report(report: Path, test: str) -> Ran:
    """What pytest's report says of this test, of which there may be several cases."""
    file, _, name = test.partition("::")
    passed, found, trouble, failed = 0, "", "", False
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {part.tag: part for part in case}
        wrong = kinds.get("failure", kinds.get("error"))
        if case.get("classname") != file.removesuffix(".py").replace("/", "."):
            trouble = f"{case.get('name')}: no test of {file}"  # it could not be imported
        elif "skipped" in kinds:
            trouble = f"skipped: {case.get('name')}"
        elif wrong is None:
            passed += 1
        else:
            failed = True
            text = (wrong.get("message") or "").partition("\n")[0].replace("|", "/")
            found = found or text[: mutated_tests.MOST_TEXT]
    if not passed and not failed and not trouble:
        trouble = f"no test {name} ran"
    return Ran(passed, (test,) if failed else (), trouble, found=found)


def run_pytest(copy: Path, test: str, limit_s: float) -> Ran:
    report = copy / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--require-native"]
    begin = time.monotonic()
    child = subprocess.Popen(
        [*command, f"--junitxml={report}", test],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        seconds = time.monotonic() - begin
        return Ran(0, (f"{test} (does not end)",), seconds=seconds, hung=test)
    if report.exists():
        ran = read_report(report, test)
    elif code in _NO_TEST_RAN:
        ran = Ran(0, (), f"pytest ended with {code}")
    else:
        ran = Ran(0, (f"{test} (died with {code})",))
    return ran._replace(seconds=time.monotonic() - begin)


class PythonTests:
    """The package, its tests, and what the extension is built of."""

    def __init__(self, copy: Path, mutations: Sequence[Mutation]) -> None:
        builds = any(each.program == "csrc" for each in mutations)
        self.objects = mutated.Objects(copy, "pycomm", *(["build/native"] if builds else []))
        self._copy = copy
        mutated.copy_parts(copy, PARTS)
        for part in BUILT if builds else ():
            if (ROOT / part).exists() and not (copy / part).exists():
                shutil.copytree(ROOT / part, copy / part)
        # Commands that name .venv are the same in the copy, so what they have made is used.
        venv = copy / ".venv"
        if (ROOT / ".venv").exists() and not venv.exists():
            venv.symlink_to(ROOT / ".venv")

    def path_of(self, mutation: Mutation) -> Path:
        return mutated.path_of(self._copy / mutation.program, mutation)

    def build(self, program: str) -> Path | None:
        if program == "pycomm":
            return self._copy
        python = Path(sys.executable)
        if python.is_relative_to(ROOT):
            python = self._copy / python.relative_to(ROOT)
        done = subprocess.run(
            [str(python), "setup.py", "-q", "build_ext", "--inplace"],
            cwd=self._copy,
            env=os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            print((done.stdout + done.stderr)[-2000:], file=sys.stderr)
            return None
        return self._copy

    def run(self, built: Path, mutation: Mutation, limit_s: float) -> Ran:
        return run_pytest(built, mutation.test, limit_s)


def main(about: str, mutations: Sequence[Mutation]) -> int:
    """Does what the command line asks for; `about` begins with what the program is for."""

    def attempt(copy: Path, chosen: Sequence[Mutation], _: argparse.Namespace) -> Tally:
        tally = Tally()
        mutated_tests.try_all(PythonTests(copy, chosen), chosen, tally)
        return tally

    def wrong(tree: Path) -> list[str]:
        return misplaced(tree, mutations)

    return mutated.main(mutated.parser(about), mutations, wrong, attempt)
