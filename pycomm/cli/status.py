"""``python -m pycomm status``: what this user's ranks on this host are doing right now."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from pycomm._flight_record import GroupRecord, OperationRecord, ProcessRecord
from pycomm._process_reports import Report, reports
from pycomm.trace.align import NS_PER_S, POINT_TO_POINT, Aligned, align
from pycomm.trace.findings import ranks_text, seconds_text

_WIDTH = 79


def add_parser(commands: Any) -> None:
    """Adds the command to the parser of ``pycomm.cli``."""
    text = "say what your ranks on this host are doing, also if they hang"
    parser = commands.add_parser("status", help=text, description=text.capitalize() + ".")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--after",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="an operation that has waited for longer is a problem; default 10",
    )
    parser.add_argument(
        "--timeout", type=float, default=3.0, metavar="SECONDS", help="for an answer; default 3"
    )
    parser.set_defaults(run=run)


@dataclasses.dataclass(frozen=True)
class Row:
    """One rank in one of its groups."""

    rank: int
    """In the world."""
    pid: int
    group: str
    state: str
    """The last phase that the group has reached: "rendezvous", "connect", "ready", "failed"."""
    op: str | None
    """The oldest operation that has not ended, as "all_reduce #12"; None: none."""
    for_s: float | None
    """How long it has been in that; without one, since its last operation ended."""
    pending: int
    """Operations that have not ended."""
    last: str | None
    """The last that has ended."""


def run(arguments: argparse.Namespace) -> int:
    """Prints the state; 1 if something waits or has failed, 2 if nothing can be asked."""
    if arguments.after < 0 or not arguments.timeout > 0:
        print("pycomm status: --after is at least 0, --timeout above 0", file=sys.stderr)
        return 2
    try:
        found = reports(arguments.timeout)
    except OSError as error:
        print(f"pycomm status: /proc/net/unix cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    records = [one.record for one in found if one.record is not None]
    rows = [row for record in records for row in _rows(record)]
    problems = list(_problems(found, align(records), round(arguments.after * NS_PER_S)))
    if arguments.json:
        shown = [dataclasses.asdict(row) for row in rows]
        silent = [{"pid": one.pid, "why": one.why} for one in found if one.record is None]
        print(json.dumps({"rows": shown, "silent": silent, "problems": problems}, indent=2))
    else:
        print(_screen(found, rows, problems))
    return 1 if problems else 0


def _rows(record: ProcessRecord) -> list[Row]:
    rows = []
    for group in record.groups:
        waiting = _pending(group)
        ended = [one for one in group.operations if one.ended_ns is not None]
        last = max(ended, key=lambda one: one.ended_ns or 0, default=None)
        since_ns = waiting[0].issued_ns if waiting else (last.ended_ns if last else None)
        if since_ns is None and "ready" not in group.phases_ns:
            since_ns = max(group.phases_ns.values(), default=None)
        rows.append(
            Row(
                rank=record.rank,
                pid=record.pid,
                group=group.name,
                state=_state(group),
                op=waiting[0].label if waiting else None,
                for_s=None if since_ns is None else (record.written_ns - since_ns) / NS_PER_S,
                pending=len(waiting),
                last=last.label if last else None,
            )
        )
    return rows


def _state(group: GroupRecord) -> str:
    return max(group.phases_ns, key=lambda phase: group.phases_ns[phase], default="rendezvous")


def _pending(group: GroupRecord) -> list[OperationRecord]:
    """Oldest first."""
    waiting = [one for one in group.operations if one.state in ("queued", "running")]
    return sorted(waiting, key=lambda one: one.issued_ns)


def _problems(found: Iterable[Report], groups: Sequence[Aligned], after_ns: int) -> Iterable[str]:
    for one in found:
        if one.record is None:
            yield f"Process {one.pid}: {one.why}."
    for group in groups:
        for rank, member in sorted(group.members.items()):
            if member.group.failure is not None:
                summary = member.group.failure.get("summary", "")
                yield f"Group {group.name} has failed on rank {rank}: {summary}"
            elif "ready" not in member.group.phases_ns:
                now_ns, begun = member.process.written_ns, member.group.phases_ns
                waited_ns = now_ns - min(begun.values(), default=now_ns)
                if waited_ns >= after_ns:
                    yield (
                        f"Rank {rank} has waited for the other ranks of group {group.name} for "
                        f"{seconds_text(waited_ns)}. Try: python -m pycomm doctor"
                    )
        yield from _waits(group, after_ns)


def _waits(group: Aligned, after_ns: int) -> Iterable[str]:
    """The operation that has waited longest, and who has not entered it."""
    inside: dict[int, OperationRecord] = {}
    for rank, member in group.members.items():
        waiting = _pending(member.group)
        if waiting and member.process.written_ns - waiting[0].issued_ns >= after_ns:
            inside[rank] = waiting[0]
    if not inside:
        return
    first = min(inside, key=lambda rank: inside[rank].issued_ns)
    what = inside[first]
    same = sorted(rank for rank, mine in inside.items() if mine.id == what.id)
    for_ns = group.members[first].process.written_ns - what.issued_ns
    text = f"{ranks_text(same).capitalize()} of group {group.name} "
    text += f"{'waits' if len(same) == 1 else 'wait'} in {what.label} ({what.described}), for "
    text += f"{seconds_text(for_ns)} so far"
    if what.op in POINT_TO_POINT:
        yield text + "."
        return
    outside = [
        rank
        for rank, member in sorted(group.members.items())
        if what.id not in member.by_id and not member.may_have_forgotten(what)
    ]
    elsewhere = group.missing
    if outside:
        text += f"; {ranks_text(outside)} {'has' if len(outside) == 1 else 'have'} not entered it"
    if elsewhere:
        hosts = sorted({group.host_of(rank) or "?" for rank in elsewhere})
        text += f". Of {ranks_text(elsewhere)} nothing is known here: run this on "
        text += ", ".join(hosts)
    yield text + "."


def _screen(found: Sequence[Report], rows: Sequence[Row], problems: Sequence[str]) -> str:
    if not found:
        return (
            "No process of this user has a pycomm group of several ranks here.\n"
            "In a container, run this inside it."
        )
    count = f"{len(found)} process{'es' * (len(found) != 1)}"
    lines = [f"pycomm status: {count} of {_user()} on this host"]
    if rows:
        lines += ["", f"{'rank':>4} {'pid':>8}  {'group':<14} {'state':<10} {'in':<24} {'for':>9}"]
    for row in sorted(rows, key=lambda row: (row.group, row.rank)):
        where = row.op or (f"- after {row.last}" if row.last else "-")
        if row.pending > 1:
            where += f" +{row.pending - 1}"
        waited = "" if row.for_s is None else seconds_text(round(row.for_s * NS_PER_S))
        lines.append(
            f"{row.rank:>4} {row.pid:>8}  {row.group[:14]:<14} {row.state:<10} {where[:24]:<24} "
            f"{waited:>9}"
        )
    for problem in problems or ["Nothing waits for long."]:
        lines += ["", *textwrap.wrap(problem, _WIDTH, break_long_words=False)]
    return "\n".join(line.rstrip() for line in lines)


def _user() -> str:
    try:
        import pwd

        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"
