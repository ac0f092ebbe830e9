"""What docs/errors.md promises of the time until a fault is noticed, at its value.

Only with ``--exact-bounds``, on a machine that does nothing else. The fault matrix compares its own
bounds at their values then, too.
"""

from __future__ import annotations

import re
import signal
import statistics
from typing import Any

import fault_figures
import fault_ranks
import pytest
from documents import ROOT
from fault_cases import mismatch_cases
from ranks import run_ranks

pytestmark = [pytest.mark.needs_native, pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def only_where_asked_for(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--exact-bounds"):
        pytest.skip("needs --exact-bounds, and a machine that does nothing else")


def promised_s(what: str) -> float:
    """The last column of a row of the table "How fast", in seconds."""
    table = (ROOT / "docs" / "errors.md").read_text().partition("## How fast")[2]
    row = next(line for line in table.splitlines() if line.startswith(f"| {what}"))
    found = re.search(r"([\d.]+) (ms|s)\b", row.rsplit("|", 2)[1])
    assert found is not None, row
    return float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)


@pytest.mark.parametrize("ranks_do", ["reduce_until_it_fails", "send_until_it_fails"])
def test_a_killed_rank(ranks_do: str) -> None:
    target: Any = getattr(fault_figures, ranks_do)
    seconds, wrong = fault_figures.strike(int(signal.SIGKILL), 20, target)
    assert wrong == 0 and len(seconds) == 40
    assert statistics.median(seconds) <= promised_s("a process that ends or is killed"), seconds


def test_a_stopped_rank() -> None:
    seconds, wrong = fault_figures.strike(int(signal.SIGSTOP), 4)
    assert wrong == 0 and len(seconds) == 8
    # Silence counts from the last heartbeat, and they come every 500 ms.
    assert seconds[0] > 2.4 and seconds[-1] <= promised_s("a rank that is stopped"), seconds


def test_different_operations() -> None:
    chosen = mismatch_cases(3, everything=True)
    results = run_ranks(3, fault_ranks.run_mismatches, args=(chosen, 1), timeout_s=240).check()
    seconds = sorted(met["s"] for rank in results.values() for met in rank)
    assert statistics.median(seconds) <= promised_s("different operations"), seconds
