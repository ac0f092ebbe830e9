"""What the fault tests tell beside their verdicts, summed up at the end of a run.

Tests attach it to their reports, so that it arrives from the workers of a parallel run as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Record = Callable[[str, object], None]
Row = tuple[str, dict[str, Any]]


def took(record: Record, name: str, seconds: float, bound_s: float) -> None:
    """A rank's error came after so many seconds; the bound is that of a quiet machine."""
    record("fault-took", {"case": name, "s": seconds, "bound_s": bound_s})


def agreement(record: Record, name: str, told: Mapping[int, object], *, joined: bool) -> None:
    """What each rank named as the cause; ``joined``: of a group that had been made."""
    by_rank = {str(rank): str(cause) for rank, cause in told.items()}
    record("fault-agreement", {"case": name, "told": by_rank, "joined": joined})


def _differ(row: Mapping[str, Any]) -> bool:
    return len(set(row["told"].values())) > 1


def lines(properties: Iterable[Row]) -> list[str]:
    """The summary of these properties; empty where no fault test has run."""
    rows = list(properties)
    told = [row for name, row in rows if name == "fault-agreement" and len(row["told"]) > 1]
    took_s = [row for name, row in rows if name == "fault-took"]
    found = []
    for joined, when in ((True, "in a group"), (False, "while a group was made")):
        judged = [row for row in told if row["joined"] == joined]
        differing = [row for row in judged if _differ(row)]
        if judged:
            found.append(
                f"{len(judged)} faults {when}: in {len(differing)} the ranks named different causes"
            )
        for row in differing:
            causes = "; ".join(f"rank {rank}: {cause}" for rank, cause in row["told"].items())
            found.append(f"  {row['case']}: {causes}")
    if took_s:
        late = {row["case"] for row in took_s if row["s"] > row["bound_s"]}
        worst = max(took_s, key=lambda row: row["s"] / row["bound_s"])
        found.append(
            f"{len({row['case'] for row in took_s})} faults with a bound in seconds: in "
            f"{len(late)} an error came later than on a quiet machine, at most "
            f"{worst['s'] / worst['bound_s']:.2f} times the bound ({worst['case']}); "
            f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
    return found


def write(terminal: Any) -> None:
    """Writes the summary."""
    reports = [
        report
        for each in terminal.stats.values()
        for report in each
        if getattr(report, "when", "") in ("call", "???")  # ???: its process died
    ]
    rows = [row for report in reports for row in report.user_properties]
    if summary := lines(row for row in rows if row[0].startswith("fault-")):
        terminal.section("faults")
        for line in summary:
            terminal.write_line(line)
