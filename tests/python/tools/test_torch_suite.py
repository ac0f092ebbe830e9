"""torch's own tests of collectives over pycomm, on two ranks; `make torch_suite` runs them all."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from ranks import run_python

RUN = Path(__file__).resolve().parents[2] / "torch_suite" / "run.py"
sys.path.append(str(RUN.parent))
COLLECTIVES = "^test_(all_|batch_|broadcast|gather|scatter|send|recv|isend|irecv|reduce|sparse)"

pytestmark = [pytest.mark.needs_native, pytest.mark.slow]


@pytest.mark.timeout(400)
@pytest.mark.in_shares
def test_whatever_gloo_passes() -> None:
    done = run_python([str(RUN), "--world-size", "2", "--tests", COLLECTIVES], timeout_s=350)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'pass': 0" not in done.stdout


def test_a_test_reserved_for_gloo_must_fail_for_the_stated_reason() -> None:
    problems = importlib.import_module("run").problems
    name = "test_monitored_barrier_gloo"
    refused = "ValueError: monitored_barrier is only implemented for GLOO backend.\n"
    for status, reason, good in [
        ("fail", "Traceback …\n" + refused, True),
        ("fail", "AssertionError: 3 != 4\n", False),
        ("fail", "Process 1 terminated with signal SIGSEGV", False),
        ("skip", refused, False),
        ("pass", "", True),
    ]:
        found = problems("gloo", {name: {"status": status, "reason": reason}}, [name])
        assert (found == []) == good, (status, reason)
    other = {"test_all_reduce_sum": {"status": "fail", "reason": refused}}
    assert problems("gloo", other, ["test_all_reduce_sum"])
