"""Findings about ranks that did not come, or ended in the middle of a run."""

from __future__ import annotations

from pycomm.doctor.facts import STOP, Finding, HostFacts, listed
from pycomm.doctor.meeting import Place, Roster

NOT_JUDGED = (
    "Nothing is judged. The doctor was not started there, has already ended, or the job is running."
)


def nobody_else(place: Place, roster: Roster, wait_s: float) -> str:
    """Why nothing is judged if only the first host's own ranks came; "" if others did, too.

    In a pod that was started again, rank 0 opens a store, and the others train already.
    """
    if len(roster.ranks) == place.size or len(roster.hosts()) > 1:
        return ""
    return (
        f"No other host came within {wait_s:.0f} s. {NOT_JUDGED} If a firewall is in front of "
        "this host, the others' screens have the line to open it."
    )


def missing(place: Place, roster: Roster, wait_s: float) -> list[Finding]:
    """Some hosts came and some did not."""
    if len(roster.ranks) == place.size or len(roster.hosts()) == 1:
        return []
    names = [str(n) for n in range(place.size) if n not in roster.ranks]
    what = "node rank" if place.by_hand else "rank"
    text = f"{what} {listed(names)} did not come within {wait_s:.0f} s"
    todo = [
        "Was the doctor started there? If it did not reach the first host, its screen has the line "
        "to open that host's firewall."
    ]
    return [Finding(STOP, "MISSING", "", text, todo)]


def went_silent(rank: int) -> Finding:
    """A rank that came, and then ended or hung."""
    text = f"rank {rank} joined and then ended or hung"
    return Finding(STOP, "WENT_SILENT", "", text, ["Its own output shows why it ended."])


def port_taken(host: HostFacts, why: str) -> Finding:
    """The doctor could not listen where the job's store will."""
    text = f"{host.name}: port {host.master_port}, for torch's store, is taken ({why})"
    todo = [
        "Another --master-port, or end what has it:",
        f"$ ss -ltnp 'sport = :{host.master_port}'",
    ]
    return Finding(STOP, "STORE_PORT_TAKEN", host.name, text, todo)
