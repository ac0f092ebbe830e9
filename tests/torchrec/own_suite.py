"""Runs the tests that TorchRec's wheel brings along, over one backend: `own_suite.py BACKEND OUT`.

They are base classes, which TorchRec's own repository subclasses in the same way for gloo. OUT is
JSON: the outcome of each test, "passed", "skipped: why", or the traceback. Test cases are drawn
from a fixed seed, so all backends run the same ones.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import unittest
from pathlib import Path
from typing import Any

import hypothesis
import missing_module  # noqa: F401 (first: TorchRec's bases import what it stands in for)

import pycomm  # noqa: F401 (registers the backend)

hypothesis.settings.register_profile("same", derandomize=True, database=None)
hypothesis.settings.load_profile("same")  # before the bases choose their settings

from torchrec.distributed.test_utils import test_model_parallel_base as bases  # noqa: E402
from torchrec.distributed.test_utils.test_model_parallel import _ModelParallelBase  # noqa: E402

# Ranks are forked from a process that has imported these.
PRELOAD = ["missing_module", "pycomm", bases.__name__]
BASES = [_ModelParallelBase, bases.ModelParallelStateDictBase, bases.ModelParallelSparseOnlyBase]
del _ModelParallelBase  # not to be run by itself


class Outcomes(unittest.TestResult):
    """Outcomes by test."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def _add(self, test: Any, outcome: str) -> None:
        self.found[test.id().partition(".")[2]] = outcome
        print(f"{test.id()}: {outcome[-500:]}", file=sys.stderr, flush=True)

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self._add(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self._add(test, f"skipped: {reason}")

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._add(test, self.failures[-1][1])

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._add(test, self.errors[-1][1])


def main(backend: str, out: Path) -> None:
    multiprocessing.set_forkserver_preload(PRELOAD)
    suite = unittest.TestSuite()
    for base in BASES:
        # Theirs allows two backends by name.
        members = {"backend": backend, "setUpClass": classmethod(lambda cls: None)}
        suite.addTests(
            unittest.defaultTestLoader.loadTestsFromTestCase(type(base.__name__, (base,), members))
        )
    outcomes = Outcomes()
    suite.run(outcomes)
    out.write_text(json.dumps(outcomes.found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
