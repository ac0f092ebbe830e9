"""torch's own tests of collectives over pycomm, on two ranks; `make torch_suite` runs them all."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_python

RUN = Path(__file__).resolve().parent.parent / "torch_suite" / "run.py"
COLLECTIVES = "^test_(all_|batch_|broadcast|gather|scatter|send|recv|isend|irecv|reduce|sparse)"

pytestmark = [pytest.mark.needs_native, pytest.mark.slow]


@pytest.mark.timeout(400)
def test_whatever_gloo_passes() -> None:
    done = run_python([str(RUN), "--world-size", "2", "--tests", COLLECTIVES], timeout_s=350)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'pass': 0" not in done.stdout
