"""Jobs whose ranks are killed and started again on the same store, several times in a row."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import rings
from ranks import RIG, run_python
from restart_program import LIVES, NOT_ALLOWED, SIZE

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(240)]


@pytest.mark.parametrize("late_s", [0.5, pytest.param(60, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("transport", rings.first_of(["auto", "tcp"]))
@pytest.mark.parametrize("where", ["processes", "containers"])
def test_each_life_meets(tmp_path: Path, where: str, transport: str, late_s: float) -> None:
    if where == "containers" and os.geteuid() != 0:
        pytest.skip("pid namespaces need root")
    done = run_python(
        [str(RIG / "restart_program.py"), str(tmp_path), where, str(late_s)],
        env={"PYCOMM_TRANSPORT": transport},
        timeout_s=200,
    )
    if done.returncode == NOT_ALLOWED:
        pytest.skip(f"pid namespaces are not allowed here: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    for life, order in enumerate(LIVES):
        if len(order) < SIZE:
            continue
        told = [(tmp_path / f"{life}-{rank}").read_text().split() for rank in range(SIZE)]
        total = sum(10 * life + rank for rank in range(SIZE))
        assert [value for value, _ in told] == [str(total)] * SIZE
        if where == "containers":  # or this would show nothing
            assert {pid for _, pid in told} == {"1"}
