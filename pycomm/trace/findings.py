"""Says in words what the records of a group show."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
from collections.abc import Mapping, Sequence

from pycomm._native.flight_record import OperationRecord, ranks_text
from pycomm.trace.align import NS_PER_S, POINT_TO_POINT, Aligned

_LATE_NS = 10_000_000
"""A rank that enters an operation less than this after the first is not late: on a busy host a
thread waits for its core for some milliseconds, and hosts' clocks are aligned to about one."""
_LATE_SHARE = 0.05
"""Waits for a rank that add up to less than this part of the recorded time are not reported."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing."""

    kind: str
    """ "failed", "no_record", "not_entered", "mismatch", "unfinished" or "late"."""
    text: str
    group: str
    ranks: tuple[int, ...]
    """The ranks that it is about: to blame, missing or late."""
    op: str | None = None
    """ "all_reduce #12"."""

    @property
    def is_problem(self) -> bool:
        """Whether something went wrong; a late rank is not wrong, only worth knowing."""
        return self.kind != "late"


def seconds_text(nanoseconds: int) -> str:
    """ "2.1 s", "35.0 ms"."""
    if abs(nanoseconds) >= NS_PER_S:
        return f"{nanoseconds / NS_PER_S:.1f} s"
    return f"{nanoseconds / 1e6:.1f} ms"


def clock_text(nanoseconds: int) -> str:
    """The time of day, in this machine's zone."""
    moment = datetime.datetime.fromtimestamp(nanoseconds // NS_PER_S)
    return f"{moment:%H:%M:%S}.{nanoseconds % NS_PER_S // 1_000_000:03d}"


def findings_of(group: Aligned) -> list[Finding]:
    """Everything that the records of one group show, the most telling first."""
    operations = group.operations()
    found = [
        *_failures(group),
        *_missing(group),
        *_mismatches(group, operations),
        *_stuck(group, operations),
        *_stuck_point_to_point(group),
        *_late(group, operations),
    ]
    return found


def _rank_text(group: Aligned, rank: int) -> str:
    host = group.host_of(rank)
    return f"rank {rank} on {host}" if host else f"rank {rank}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _failures(group: Aligned) -> list[Finding]:
    told: dict[tuple[object, object], list[int]] = {}
    for rank, member in group.members.items():
        if member.group.failure is not None:
            failure = member.group.failure
            told.setdefault((failure.get("code"), failure.get("summary")), []).append(rank)
    found = []
    for (code, summary), ranks in sorted(told.items(), key=lambda item: -len(item[1])):
        failure = group.members[ranks[0]].group.failure or {}
        blamed = failure.get("peer")
        found.append(
            Finding(
                kind="failed",
                text=f"{summary} [{code}] Reported by {ranks_text(ranks)}.",
                group=group.name,
                ranks=() if blamed is None else (int(blamed),),
            )
        )
    return found


def _missing(group: Aligned) -> list[Finding]:
    return [
        Finding(
            kind="no_record",
            text=f"There is no record of {_rank_text(group, rank)}: it was killed before it could "
            "write one, or its file is not among these.",
            group=group.name,
            ranks=(rank,),
        )
        for rank in group.missing
    ]


def _mismatches(
    group: Aligned, operations: Sequence[tuple[str, dict[int, OperationRecord]]]
) -> list[Finding]:
    for _, by_rank in operations:
        calls: dict[tuple[str, str], list[int]] = {}
        for rank, mine in sorted(by_rank.items()):
            calls.setdefault((mine.op, mine.described), []).append(rank)
        if len(calls) == 1:
            continue
        # The fewest are named first: they are the likeliest to be wrong.
        sides = sorted(calls.items(), key=lambda item: len(item[1]))
        parts = [f"{ranks_text(ranks)} called {op}({what})" for (op, what), ranks in sides]
        sequence = next(iter(by_rank.values())).sequence
        which = "An operation" if sequence is None else f"Operation #{sequence}"
        return [
            Finding(
                kind="mismatch",
                text=f"{which} is not the same on all ranks: {', but '.join(parts)}.",
                group=group.name,
                ranks=tuple(sides[0][1]),
                op=next(iter(by_rank.values())).label,
            )
        ]
    return []  # of several only the first: all later ones may follow from it


def _stuck(
    group: Aligned, operations: Sequence[tuple[str, dict[int, OperationRecord]]]
) -> list[Finding]:
    """The first operation that did not end, and how many more."""
    stuck = []
    for key, by_rank in operations:
        inside = {rank: mine for rank, mine in by_rank.items() if mine.state != "done"}
        if inside:
            stuck.append((key, by_rank, inside))
    if not stuck:
        return []
    _, by_rank, inside = stuck[0]
    mine = next(iter(inside.values()))
    outside = [
        rank
        for rank, member in group.members.items()
        if rank not in by_rank and not member.may_have_forgotten(mine)
    ]
    later = len(stuck) - 1
    more = "" if later == 0 else f" {later} later operation{'s' * (later > 1)} did not end either."
    if outside:
        text = " ".join(_not_entered(group, rank, mine, inside) for rank in outside)
        text += f" {_waiting(group, inside)}."
        kind, ranks = "not_entered", outside
    else:
        kind, ranks = "unfinished", sorted(inside)
        text = f"{mine.label} ({mine.described}) did not end: {_progress(inside)}."
        if group.missing:
            text += f" Of {ranks_text(group.missing)} it is not known."
    return [Finding(kind, text + more, group.name, tuple(ranks), mine.label)]


def _not_entered(
    group: Aligned, rank: int, what: OperationRecord, inside: Mapping[int, OperationRecord]
) -> str:
    member = group.members[rank]
    text = f"{_sentence(_rank_text(group, rank))} has not entered {what.label} ({what.described})"
    too_late = next((one for one in member.group.operations if one.id == what.id), None)
    if too_late is not None:
        after_ns = too_late.issued_ns - member.group.phases_ns["failed"]
        text += f" before the group failed, but {seconds_text(after_ns)} after that"
    ended = [
        one
        for one in member.group.operations
        if one.ended_ns is not None and not member.came_too_late(one)
    ]
    if not ended:
        return f"{text}; it has finished nothing in this group."
    last = max(ended, key=lambda one: one.ended_ns or 0)
    before_ns = _given_up_ns(group, inside) - ((last.ended_ns or 0) - member.shift_ns)
    return f"{text}; it last finished {last.label}, {seconds_text(before_ns)} before the end."


def _given_up_ns(group: Aligned, inside: Mapping[int, OperationRecord]) -> int:
    """When the last rank left the operation, or wrote its record while still in it."""
    return max(
        (mine.ended_ns or group.members[rank].process.written_ns) - group.members[rank].shift_ns
        for rank, mine in inside.items()
    )


def _waiting(group: Aligned, inside: Mapping[int, OperationRecord]) -> str:
    first_ns = min(group.members[rank].issued_ns(mine) for rank, mine in inside.items())
    until_ns = _given_up_ns(group, inside)
    waited = f"from {clock_text(first_ns)} on, {seconds_text(until_ns - first_ns)}"
    return f"{_sentence(ranks_text(inside))} waited in it {waited}"


def _progress(inside: Mapping[int, OperationRecord]) -> str:
    parts = []
    for rank, mine in sorted(inside.items()):
        if mine.started_ns is None:
            state = "has it queued"
        elif mine.bytes_done == 0 and mine.bytes_total > 0:
            state = f"received nothing of {mine.bytes_total} bytes"
        else:
            state = f"received {mine.bytes_done} of {mine.bytes_total} bytes"
        parts.append(f"rank {rank} {state}")
    shown = parts if len(parts) <= 8 else [*parts[:8], f"and {len(parts) - 8} more ranks"]
    return ", ".join(shown)


def _stuck_point_to_point(group: Aligned) -> list[Finding]:
    found = []
    for rank, member in group.members.items():
        for mine in member.group.operations:
            unfinished = mine.state != "done" and not member.came_too_late(mine)
            if mine.op in POINT_TO_POINT and unfinished:
                what = f"{mine.label} ({mine.described}) of {_rank_text(group, rank)}"
                text = f"{what} did not end: {_progress({rank: mine})}."
                found.append(Finding("unfinished", text, group.name, (rank,), mine.label))
                break
    return found


def _late(
    group: Aligned, operations: Sequence[tuple[str, dict[int, OperationRecord]]]
) -> list[Finding]:
    """Which rank the others mostly waited for. Without the first operation: ranks start apart.

    A rank counts as late in an operation that it enters ``_LATE_NS`` or more after the first, if
    that is longer than the operation took once all were in it: else waiting was not the most of it.
    """
    late: dict[int, list[tuple[int, str]]] = {}
    whole = [
        by_rank
        for _, by_rank in operations
        if len(by_rank) == len(group.members) > 1
        and all(mine.state == "done" for mine in by_rank.values())
    ][1:]
    times = [_times(group, by_rank) for by_rank in whole]
    for by_rank, (first_ns, slowest, last_ns, ended_ns) in zip(whole, times, strict=True):
        behind_ns = last_ns - first_ns
        if behind_ns >= max(_LATE_NS, ended_ns - last_ns):
            late.setdefault(slowest, []).append((behind_ns, by_rank[slowest].label))
    began_ns = min((one[0] for one in times), default=0)
    all_ns = max([1, *(one[3] - began_ns for one in times)])
    found = []
    for rank, behind in sorted(late.items(), key=lambda item: -sum(ns for ns, _ in item[1])):
        share = sum(ns for ns, _ in behind) / all_ns
        if share < _LATE_SHARE:
            continue
        most_ns, where = max(behind)
        median_ns = round(statistics.median(ns for ns, _ in behind))
        found.append(
            Finding(
                kind="late",
                text=f"{_sentence(_rank_text(group, rank))} was late in {len(behind)} of "
                f"{len(whole)} operations that ended, {seconds_text(median_ns)} after the first "
                f"(median), {seconds_text(most_ns)} at most ({where}): {share:.0%} of the recorded "
                "time.",
                group=group.name,
                ranks=(rank,),
            )
        )
    return found


def _times(group: Aligned, by_rank: Mapping[int, OperationRecord]) -> tuple[int, int, int, int]:
    """When the first rank entered, which one entered last, when, and when the last one ended."""
    entered = {rank: group.members[rank].issued_ns(mine) for rank, mine in by_rank.items()}
    slowest = max(entered, key=lambda rank: entered[rank])
    ended = [(mine.ended_ns or 0) - group.members[rank].shift_ns for rank, mine in by_rank.items()]
    return min(entered.values()), slowest, entered[slowest], max(ended)
