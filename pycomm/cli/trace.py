"""``python -m pycomm trace``: each rank's last operations, from the flight records of all ranks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from pycomm._native.flight_record import BadRecordError, ranks_text
from pycomm.trace.align import Aligned, Records, dump_files, read_records
from pycomm.trace.chrome import chrome_trace
from pycomm.trace.findings import Finding, findings_of, seconds_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command; ``pycomm.cli`` has made its parser."""
    parser.add_argument(
        "dumps", nargs="+", type=Path, metavar="DUMP", help="files of ranks, or a folder of them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--chrome",
        type=Path,
        metavar="OUT.json",
        help="write a trace for chrome://tracing or ui.perfetto.dev",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; 1 if it found a problem, 2 if there is nothing to read."""
    try:
        records = read_records(dump_files(arguments.dumps))
        if arguments.chrome is not None:
            arguments.chrome.write_text(json.dumps(chrome_trace(records.groups)))
    except (BadRecordError, OSError) as error:
        print(f"pycomm trace: {error}", file=sys.stderr)
        return 2
    found = {id(group): findings_of(group) for group in records.groups}
    if arguments.json:
        print(json.dumps(as_json(records), indent=2))
    else:
        print(as_text(records))
    problems = [one for findings in found.values() for one in findings if one.is_problem]
    return 1 if problems or records.notes else 0


def as_json(records: Records) -> dict[str, Any]:
    """The report for a program."""
    return {
        "notes": list(records.notes),
        "groups": [
            {
                "name": group.name,
                "size": group.size,
                "records": sorted(group.members),
                "missing": group.missing,
                "operations": len(group.operations()),
                "clocks_ahead_ns": {
                    member.process.host: member.shift_ns for member in group.members.values()
                },
                "findings": [dataclasses.asdict(finding) for finding in findings_of(group)],
            }
            for group in records.groups
        ],
    }


def as_text(records: Records) -> str:
    """The report for a terminal."""
    lines = [f"note: {note}" for note in records.notes]
    for group in records.groups:
        lines += ["", *_group_lines(group)] if lines else _group_lines(group)
    return "\n".join(lines)


def _group_lines(group: Aligned) -> list[str]:
    hosts = Counter(filter(None, (group.host_of(rank) for rank in group.ranks)))
    where = f" on {', '.join(sorted(hosts))}" if hosts else ""
    ranks = "1 rank" if group.size == 1 else f"{group.size} ranks"
    lines = [f"{group.title}: {ranks}{where}; records of {ranks_text(group.members)}"]
    operations = group.operations()
    ended = sum(
        len(by_rank) == len(group.members) and all(one.state == "done" for one in by_rank.values())
        for _, by_rank in operations
    )
    known = f"{len(operations)} operations are known, {ended} of them ended on all of these"
    forgot = [rank for rank, member in group.members.items() if not member.group.complete]
    lines.append(f"  {known}" + (f"; {ranks_text(forgot)} forgot older ones" if forgot else ""))
    shifted = {
        member.process.host: member.shift_ns
        for member in group.members.values()
        if member.shift_ns != 0
    }
    lines += [
        f"  the clock of {host} is taken to be {seconds_text(shift)} ahead"
        for host, shift in shifted.items()
    ]
    findings = findings_of(group)
    lines += [f"  {_marked(finding)}" for finding in findings]
    if not any(finding.is_problem for finding in findings):
        lines.append("  nothing is wrong here")
    return lines


def _marked(finding: Finding) -> str:
    return f"{finding.kind.replace('_', ' ')}: {finding.text}"
