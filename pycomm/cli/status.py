"""``python -m pycomm status``: what this user's ranks on this host are doing right now."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pwd
import sys
import textwrap
from collections.abc import Iterable, Sequence

from pycomm._native.flight_record import GroupRecord, OperationRecord, ProcessRecord, ranks_text
from pycomm.trace.align import NS_PER_S, POINT_TO_POINT, Aligned, align
from pycomm.trace.findings import seconds_text
from pycomm.trace.process_reports import Report, reports

_WIDTH = 79
_NAME = 14  # of a group, in its column
_LONGEST_S = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command; ``pycomm.cli`` has made its parser."""
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


@dataclasses.dataclass(frozen=True)
class Row:
    """One rank in one of its groups."""

    rank: int
    """In the world."""
    pid: int
    group: str
    run: str
    """Tells groups of the same name in two jobs apart; "0" before their ranks have met."""
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
    if not (0 <= arguments.after < _LONGEST_S and 0 < arguments.timeout < _LONGEST_S):
        text = f"--after is at least 0, --timeout above 0, and both under {_LONGEST_S:.0f}"
        print(f"pycomm status: {text}", file=sys.stderr)
        return 2
    try:
        found = reports(arguments.timeout)
    except OSError as error:
        print(f"pycomm status: /proc/net/unix cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    records = [one.record for one in found if one.record is not None]
    rows = [row for record in records for row in _rows(record)]
    rows.sort(key=lambda row: (row.group, row.run, row.rank, row.pid))
    problems = list(_problems(found, records, round(arguments.after * NS_PER_S)))
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
                group=group.called,
                run=group.run,
                state=max(group.phases_ns, key=lambda it: group.phases_ns[it], default="?"),
                op=waiting[0].label if waiting else None,
                for_s=None if since_ns is None else (record.written_ns - since_ns) / NS_PER_S,
                pending=len(waiting),
                last=last.label if last else None,
            )
        )
    return rows


def _pending(group: GroupRecord) -> list[OperationRecord]:
    """Oldest first."""
    waiting = [one for one in group.operations if one.state in ("queued", "running")]
    return sorted(waiting, key=lambda one: one.issued_ns)


def _problems(
    found: Iterable[Report], records: Sequence[ProcessRecord], after_ns: int
) -> Iterable[str]:
    for one in found:
        if one.record is None:
            yield f"Process {one.pid}: {one.why}." if one.pid else f"{one.why.capitalize()}."
    for record in records:
        for group in record.groups:
            yield from _trouble(record, group, after_ns)
            yield from _waits_for_messages(record, group, after_ns)
    for aligned in align(records):
        yield from _waits(aligned, after_ns)


def _trouble(record: ProcessRecord, group: GroupRecord, after_ns: int) -> Iterable[str]:
    """A group that has failed, or that has not come together."""
    who = f"rank {record.rank} (pid {record.pid})"
    if group.failure is not None:
        yield f"G{group.title[1:]} has failed on {who}: {group.failure.get('summary', '')}"
    elif "ready" not in group.phases_ns:
        waited_ns = record.written_ns - min(group.phases_ns.values(), default=record.written_ns)
        if waited_ns >= after_ns:
            yield (
                f"{who.capitalize()} has waited for the other ranks of {group.title} for "
                f"{seconds_text(waited_ns)}. Try, on the first host of the job: "
                "python -m pycomm doctor --hosts HOST1,HOST2"
            )


def _waits_for_messages(record: ProcessRecord, group: GroupRecord, after_ns: int) -> Iterable[str]:
    """The message that a rank has waited for longest: messages have no number in their group."""
    for one in _pending(group):
        waited_ns = record.written_ns - one.issued_ns
        if one.op in POINT_TO_POINT and waited_ns >= after_ns:
            yield (
                f"Rank {record.rank} (pid {record.pid}) waits in {one.label} ({one.described}) of "
                f"{group.title}, for {seconds_text(waited_ns)} so far."
            )
            return


def _waits(group: Aligned, after_ns: int) -> Iterable[str]:
    """The collective that has waited longest, and who has not entered it."""
    inside: dict[int, OperationRecord] = {}
    for rank, member in group.members.items():
        for one in _pending(member.group):
            if one.op not in POINT_TO_POINT:
                if member.process.written_ns - one.issued_ns >= after_ns:
                    inside[rank] = one
                break
    if not inside:
        return
    first = min(inside, key=lambda rank: inside[rank].issued_ns)
    what = inside[first]
    same = sorted(rank for rank, mine in inside.items() if mine.id == what.id)
    for_ns = group.members[first].process.written_ns - what.issued_ns
    text = f"{ranks_text(same).capitalize()} of {group.title} "
    text += f"{'waits' if len(same) == 1 else 'wait'} in {what.label} ({what.described}), for "
    text += f"{seconds_text(for_ns)} so far"
    outside = [rank for rank in sorted(group.members) if not _may_be_in(group, rank, what)]
    if outside:
        pids = ", ".join(f"pid {group.members[rank].process.pid}" for rank in outside)
        have = "has" if len(outside) == 1 else "have"
        text += f"; {ranks_text(outside)} ({pids}) {have} not entered it"
    here = {member.process.host for member in group.members.values()}
    gone = [rank for rank in group.missing if group.host_of(rank) in here]
    elsewhere = [rank for rank in group.missing if group.host_of(rank) not in here]
    if gone:
        text += f". {ranks_text(gone).capitalize()} of this host did not answer or has ended"
    if elsewhere:
        hosts = sorted({group.host_of(rank) or "?" for rank in elsewhere})
        text += f". Of {ranks_text(elsewhere)} nothing is known here: run this on "
        text += ", ".join(hosts)
    yield text + "."


def _may_be_in(group: Aligned, rank: int, what: OperationRecord) -> bool:
    """Whether the rank has entered it, or whether that is not known.

    A report always has the last operation with a number: a rank that is past a number has entered
    it. What a callback has issued has none.
    """
    member = group.members[rank]
    if what.id in member.by_id or what.sequence is None:
        return True
    numbers = [one.sequence for one in member.group.operations if one.sequence is not None]
    return max(numbers, default=-1) >= what.sequence


def _screen(found: Sequence[Report], rows: Sequence[Row], problems: Sequence[str]) -> str:
    if not found:
        return (
            "No process of this user has a pycomm group of several ranks here.\n"
            "The ranks of a container are only seen from inside it, as the user who runs them:\n"
            "$ docker exec CONTAINER python -m pycomm status\n"
            "$ kubectl exec POD -- python -m pycomm status"
        )
    count = f"{len(found)} process{'es' * (len(found) != 1)}"
    lines = [f"pycomm status: {count} of {_user()} on this host"]
    if rows:
        head = f"{'rank':>4} {'pid':>8}  {'group':<{_NAME}} {'state':<10} {'in':<24} {'for':>9}"
        lines += ["", head]
    before = rows[0] if rows else None
    named = ""
    for row in rows:
        if before is not None and (row.group, row.run) != (before.group, before.run):
            lines.append("")
        if len(row.group) > _NAME and row.group != named:
            lines.append(f"  {row.group}:"[:_WIDTH])
        named = row.group
        before = row
        where = row.op or (f"- after {row.last}" if row.last else "-")
        if row.pending > 1:
            where += f" +{row.pending - 1}"
        waited = "" if row.for_s is None else seconds_text(round(row.for_s * NS_PER_S))
        lines.append(
            f"{row.rank:>4} {row.pid:>8}  {row.group[:_NAME]:<{_NAME}} {row.state:<10} "
            f"{where[:24]:<24} {waited:>9}"
        )
    for problem in problems or ["Nothing waits for long."]:
        lines += ["", *textwrap.wrap(problem, _WIDTH, break_long_words=False)]
    return "\n".join(line.rstrip() for line in lines)


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"
