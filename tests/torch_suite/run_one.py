"""Runs the suite for one backend, world size and face, and writes what each test did as JSON.

    python tests/torch_suite/run_one.py --backend pycomm --world-size 2 --out results.json

torch is imported once, here; the ranks of each test are forked from this process, so that a test
costs tens of milliseconds and not the seconds that importing torch takes.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import re
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import suite_module


def forked_context() -> Any:
    """multiprocessing's fork, whose children run Python's exit hooks as spawned ones would."""
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("fork")

    class Process(context.Process):  # type: ignore[misc,name-defined]
        def run(self) -> None:
            atexit._clear()  # the parent's hooks: they would remove its folders
            try:
                super().run()
            finally:
                atexit._run_exitfuncs()

    return Process


class Recorder(unittest.TestResult):
    """Each test's outcome, as it comes."""

    def __init__(self, log: Path, verbose: bool) -> None:
        super().__init__()
        self.outcomes: dict[str, dict[str, Any]] = {}
        self._log = log
        self._verbose = verbose
        self._began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.monotonic()
        os.ftruncate(1, 0)  # stdout is the log file: this test's output only
        os.lseek(1, 0, os.SEEK_SET)

    def _note(self, test: unittest.TestCase, status: str, reason: str = "") -> None:
        name = test.id().split(".")[-1]
        seconds = round(time.monotonic() - self._began, 2)
        self.outcomes[name] = {"status": status, "reason": reason, "seconds": seconds}
        if status == "fail":
            self.outcomes[name]["log"] = self._log.read_text(errors="replace")[-3000:]
        if self._verbose:
            os.write(3, f"{status:5} {seconds:6.2f} s {name} {reason[-200:]!r}\n".encode())

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "pass")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, "skip", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._note(test, "fail", "".join(traceback.format_exception(*err))[-4000:])

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.addError(test, err)


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Sends this process's and its children's output to a file; descriptor 3 is the terminal."""
    sys.stdout.flush()
    os.dup2(1, 3)
    kept = os.dup(2)
    log = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(3, 1)
        os.dup2(kept, 2)


def run(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Runs the chosen tests; their outcomes by name."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "barrier").mkdir()
        module = suite_module.load(
            arguments.backend, arguments.face, arguments.world_size, Path(folder)
        )
        import torch

        import pycomm  # once, before the fork

        if arguments.face == "nccl":
            # torch's takes no CPU tensors. Ours runs over any backend, so both get it.
            torch.nn.SyncBatchNorm = pycomm.SyncBatchNorm  # type: ignore[misc]

        process = forked_context()

        class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
            def setUp(self) -> None:
                super().setUp()
                self._start_processes(process)

            @classmethod
            def _run(cls, *args: Any, **kwargs: Any) -> None:
                if arguments.face == "nccl":
                    import cuda_on_cpu

                    cuda_on_cpu.OnCpu().__enter__()
                super()._run(*args, **kwargs)

        names = unittest.TestLoader().getTestCaseNames(Suite)
        chosen = [name for name in names if re.search(arguments.tests, name)]
        log = Path(folder) / "log"
        result = Recorder(log, arguments.verbose)
        with output_to(log):
            unittest.TestSuite(Suite(name) for name in chosen).run(result)
    return result.outcomes


def main() -> int:
    """Command line; exit 0 also where tests failed, as the comparison decides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("pycomm", "gloo"), default="pycomm")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--face", choices=suite_module.FACES, default="gloo")
    parser.add_argument("--tests", default="", help="regular expression over test names")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    began = time.monotonic()
    outcomes = run(arguments)
    counts = {
        status: sum(each["status"] == status for each in outcomes.values())
        for status in ("pass", "fail", "skip")
    }
    seconds = time.monotonic() - began
    title = f"{arguments.backend} {arguments.world_size} ranks, {arguments.face}'s tests"
    print(f"{title}: {counts} in {seconds:.0f} s", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(outcomes, indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
