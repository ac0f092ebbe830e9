"""The records as a Chrome trace: for chrome://tracing and https://ui.perfetto.dev."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pycomm._native.flight_record import OperationRecord
from pycomm.trace.align import Aligned, Member


def chrome_trace(groups: Sequence[Aligned]) -> dict[str, Any]:
    """One process per rank, in it one row per group; operations that overlap get own rows."""
    starts = [
        member.issued_ns(operation)
        for group in groups
        for member in group.members.values()
        for operation in member.group.operations
    ]
    origin_ns = min(starts, default=0)
    events: list[dict[str, Any]] = []
    named: set[int] = set()
    rows: dict[int, int] = {}  # by rank: how many there are, all groups together
    for group in groups:
        for member in group.members.values():
            pid = member.process.rank
            if pid not in named:
                named.add(pid)
                events.append(_name("process_name", pid, 0, f"rank {pid} on {member.process.host}"))
                events.append(
                    {
                        "ph": "M",
                        "name": "process_sort_index",
                        "pid": pid,
                        "args": {"sort_index": pid},
                    }
                )
            first = rows.get(pid, 0)
            found, used = _rows(member, first, group.name, origin_ns)
            events += found
            rows[pid] = first + used
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _rows(
    member: Member, first: int, group: str, origin_ns: int
) -> tuple[list[dict[str, Any]], int]:
    """The events of a group on one rank, and the number of its rows, which are at least one."""
    pid = member.process.rank
    events: list[dict[str, Any]] = []
    free_ns: list[int] = []  # by row: when its last operation has ended
    for operation in member.group.operations:
        begin = member.issued_ns(operation)
        end = max(begin, (operation.ended_ns or member.process.written_ns) - member.shift_ns)
        row = next((row for row, free in enumerate(free_ns) if free <= begin), len(free_ns))
        tid = first + row
        if row == len(free_ns):
            free_ns.append(end)
            events.append(_name("thread_name", pid, tid, f"group {group}"))
        free_ns[row] = end
        events.append(_slice(operation.label, operation.state, pid, tid, begin, end, origin_ns))
        events[-1]["args"] = {
            name: value
            for name, value in dataclasses.asdict(operation).items()
            if value is not None
        }
        events += _parts(operation, member, pid, tid, end, origin_ns)
    for phase, at_ns in member.group.phases_ns.items():
        events.append(
            {
                "ph": "i",
                "s": "p",
                "name": f"group {group}: {phase}",
                "pid": pid,
                "tid": first,
                "ts": (at_ns - member.shift_ns - origin_ns) / 1000,
            }
        )
    return events, max(1, len(free_ns))


def _parts(
    operation: OperationRecord, member: Member, pid: int, tid: int, end: int, origin_ns: int
) -> list[dict[str, Any]]:
    """Inside an operation: waiting for the native thread, for the other ranks, and moving bytes."""
    marks = [("queued", operation.issued_ns)]
    marks += [] if operation.started_ns is None else [("waits", operation.started_ns)]
    marks += [] if operation.first_byte_ns is None else [("moves", operation.first_byte_ns)]
    begins = [at_ns - member.shift_ns for _, at_ns in marks]
    ends = [*begins[1:], end]
    return [
        _slice(name, "part", pid, tid, begin, max(begin, until), origin_ns)
        for (name, _), begin, until in zip(marks, begins, ends, strict=True)
    ]


def _slice(
    name: str, category: str, pid: int, tid: int, begin: int, end: int, origin_ns: int
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": (begin - origin_ns) / 1000,
        "dur": (end - begin) / 1000,
    }


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
