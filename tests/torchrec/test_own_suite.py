"""TorchRec's own tests: what passes over gloo passes over pycomm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run_python

PROGRAM = Path(__file__).resolve().with_name("own_suite.py")
# The others need a GPU. Four of these start two ranks; the rest join a group of one.
PASS_OVER_GLOO = 17


def outcomes(backend: str, folder: Path) -> dict[str, str]:
    out = folder / f"{backend}.json"
    done = run_python([str(PROGRAM), backend, str(out)], timeout_s=900.0)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(out.read_text())
    return found


@pytest.mark.needs_native
@pytest.mark.timeout(1900)
def test_what_passes_over_gloo_passes_over_pycomm(tmp_path: Path) -> None:
    gloo, ours = outcomes("gloo", tmp_path), outcomes("pycomm", tmp_path)
    assert gloo.keys() == ours.keys()
    passed = [name for name, outcome in gloo.items() if outcome == "passed"]
    assert len(passed) == PASS_OVER_GLOO, gloo
    behind = {name: ours[name] for name in passed if ours[name] != "passed"}
    assert not behind, "\n".join(f"{name}: {outcome}" for name, outcome in behind.items())
    for name, outcome in ours.items():
        assert outcome == "passed" or outcome.startswith("skipped: Not enough GPUs"), (
            name,
            outcome,
        )
