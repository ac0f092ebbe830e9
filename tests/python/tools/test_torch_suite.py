"""torch's own tests of collectives over pycomm, on two ranks; `make torch_suite` runs them all."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from ranks import run_python

RUN = Path(__file__).resolve().parents[2] / "torch_suite" / "run.py"
sys.path.append(str(RUN.parent))
COLLECTIVES = "^test_(all_|batch_|broadcast|gather|scatter|send|recv|isend|irecv|reduce|sparse)"

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_whatever_gloo_passes() -> None:
    done = run_python([str(RUN), "--world-size", "2", "--tests", COLLECTIVES], timeout_s=350)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r" pycomm passes whatever gloo passes; [1-9]\d* passed", done.stdout)


def test_a_test_that_did_not_run_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = importlib.import_module("run")
    ran = {"test_all_reduce_sum": {"status": "pass", "reason": ""}}
    assert suite.problems("gloo", ran, ["test_all_reduce_sum"]) == []
    (absent,) = suite.problems("gloo", ran, ["test_all_reduce_sum", "test_barrier"])
    assert absent.startswith("test_barrier: ")
    assert suite.problems("gloo", ran, ["test_all_reduce_sum", "test_barrier"], "reduce") == []
    assert suite.problems("gloo", {}, []) == ["no test ran"]
    assert any("test_all_to_all_cuda:" in each for each in suite.problems("nccl", ran, []))
    monkeypatch.setattr(suite, "RECORDED", tmp_path / "gloo.json")
    assert suite.recorded_for("2.13") == {}
    (tmp_path / "gloo.json").write_text('{"torch": "2.13", "passes": {"gloo/2": ["test_x"]}}')
    assert suite.recorded_for("2.13") == {"gloo/2": ["test_x"]}
    assert suite.recorded_for("2.15") == {}, "gloo of another torch says nothing"


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
