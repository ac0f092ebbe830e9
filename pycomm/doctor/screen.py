"""The report for a terminal: verdict first, one row per host, 79 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from pycomm.doctor import splits, sync
from pycomm.doctor.facts import Finding, HostFacts
from pycomm.doctor.local import files_needed
from pycomm.doctor.rate import HostRate, megabytes, slowest
from pycomm.doctor.report import Report

WIDTH = 79
_COMMAND = "$ "
_WORD = re.compile(r"'[^']*'|\S+")  # a line is not broken inside quotes
_UNKNOWN = "?"
_ALONE = """\
This host only. To check all hosts of a job, start the doctor as the job:
   torchrun --nnodes=... -m pycomm doctor        (or srun, mpirun)
or, without a launcher, on the first host:
   python -m pycomm doctor --hosts node1,node2"""
# The columns that are left out first where a line would be too long.
_DISPENSABLE = ("ranks", "lost", "torch", "MTU", "rtt")
_LEAST_ADDRESS = 15
_SELDOM = 32


def as_text(report: Report) -> str:
    """The whole screen."""
    parts = [
        "\n".join(_head(report)),
        "\n".join(_numbered(report.problems)),
        "\n".join(_table(report)),
        "\n".join(_sync_lines(report)),
        "\n".join(_notes(report.notes)),
        _ALONE if report.alone else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _head(report: Report) -> Iterator[str]:
    count = len(report.hosts)
    hosts = f"{count} host" + ("" if count == 1 else "s")
    if report.alone:  # READY says nothing of the others
        hosts = "this host only"
    left = f"pycomm doctor: {hosts}, {report.seconds:.0f} s"
    yield left + report.verdict.rjust(WIDTH - len(left))
    if report.reason:
        yield from textwrap.wrap(report.reason, WIDTH)


def _numbered(findings: Sequence[Finding]) -> Iterator[str]:
    if len(findings) > 1:
        yield "Do item 1 first."
    for number, finding in enumerate(findings, start=1):
        yield from _finding(finding, f"{number:>2} ")


def _notes(findings: Sequence[Finding]) -> Iterator[str]:
    if findings:
        yield "good to know"
    for finding in findings:
        yield from _finding(finding, " - ")


def _finding(finding: Finding, mark: str) -> Iterator[str]:
    yield from textwrap.wrap(
        finding.text,
        WIDTH,
        initial_indent=mark,
        subsequent_indent="   ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in finding.todo:
        before, command, after = line.partition(_COMMAND)
        if command and not before:
            yield from command_lines(after, "     ")
        else:
            yield from textwrap.wrap(
                before + after,
                WIDTH,
                initial_indent="   ",
                subsequent_indent="     ",
                break_long_words=False,
                break_on_hyphens=False,
            )


def command_lines(command: str, indent: str) -> list[str]:
    """A command in lines of the screen's width that still can be pasted as a whole."""
    lines, rest = [], indent
    for word in _WORD.findall(command):
        if rest.strip() and len(rest) + len(word) + 3 > WIDTH:
            lines.append(rest + " \\")
            rest = indent + "  "
        rest += word if not rest.strip() else " " + word
    return [*lines, rest]


def _table(report: Report) -> Iterator[str]:
    if not report.hosts:
        return
    rates = report.rates or [HostRate()] * len(report.hosts)
    rtts = report.rtts_ms or [None] * len(report.hosts)
    columns: dict[str, list[str]] = {
        "host": [_short(host.name, 16) for host in report.hosts],
        "ranks": [_span(host.ranks) for host in report.hosts],
        "torch": _marked_torch(report),
        "interface": [_short(host.interface or _UNKNOWN, 11) for host in report.hosts],
        "address": [host.address or _UNKNOWN for host in report.hosts],
        "MTU": [str(host.chosen.mtu) if host.chosen else _UNKNOWN for host in report.hosts],
    }
    if report.rates:
        columns |= {
            "out": [_rate(row.out, row) for row in rates],
            "in": [_rate(row.into, row) for row in rates],
            "both": [_rate(row.both, row) for row in rates],
        }
    if "reach" in report.stages:
        columns["rtt"] = [_UNKNOWN if rtt is None else f"{rtt:.2g}" for rtt in rtts]
    if report.rates:
        columns["lost"] = [_UNKNOWN if r.lost is None else f"{100 * r.lost:.1f}" for r in rates]
    units = {"out": "MB/s", "in": "MB/s", "both": "MB/s", "rtt": "ms", "lost": "%"}
    yield from _fitted(columns, units)
    yield from _local_lines(report.hosts)


def _fitted(columns: dict[str, list[str]], units: dict[str, str]) -> Iterator[str]:
    def widths() -> dict[str, int]:
        return {
            name: max(map(len, [name, units.get(name, ""), *cells]))
            for name, cells in columns.items()
        }

    for name in _DISPENSABLE:
        if sum(widths().values()) + 2 * (len(columns) - 1) > WIDTH:
            columns.pop(name, None)
    over = sum(widths().values()) + 2 * (len(columns) - 1) - WIDTH
    if over > 0:  # full IPv6 addresses
        limit = max(widths()["address"] - over, _LEAST_ADDRESS)
        columns["address"] = [_middle(cell, limit) for cell in columns["address"]]
    fitted = widths()

    def line(cells: dict[str, str]) -> str:
        parts = [
            cells.get(name, "").rjust(width)
            if name in (*units, "MTU")
            else cells.get(name, "").ljust(width)
            for name, width in fitted.items()
        ]
        return "  ".join(parts).rstrip()

    yield line({name: name for name in columns})
    if any(name in columns for name in units):
        yield line({name: units.get(name, "") for name in columns})
    for row in range(len(columns["host"])):
        yield line({name: cells[row] for name, cells in columns.items()})


def _local_lines(hosts: Sequence[HostFacts]) -> Iterator[str]:
    ranks = sum(len(host.ranks) for host in hosts)
    cores = _each([f"{host.cores_usable:g}" for host in hosts])
    limits = [host.files_limit for host in hosts]
    files = _each(["unlimited" if limit < 0 else str(limit) for limit in limits])
    need = max(files_needed(host, ranks) for host in hosts)
    gpus = sum(host.versions.get("cuda", "no GPU") != "no GPU" for host in hosts)
    found = [host for host in hosts if host.memfd]
    parts = [
        f"cores {cores}",
        f"open files {files}, needs {need}",
        f"memfd {'missing' if found else 'ok'}",
        f"GPUs on {gpus} of {len(hosts)}" if gpus else "no GPUs",
    ]
    yield from textwrap.wrap("   ".join(parts), WIDTH, break_on_hyphens=False)


def _sync_lines(report: Report) -> Iterator[str]:
    if not report.syncs:
        return
    millions = report.parameters / 1e6
    for busy in (False, True):
        title = (
            f"one sync of {millions:g} M parameters" if not busy else "   while the cores compute"
        )
        yield _sync_line(title, report, busy=busy, factor=1.0) + "predicted"
    yield from _split_line(report)
    slow = [index for index, row in enumerate(report.rates) if row.slow]
    if len(slow) == 1 and len(report.hosts) > 2:
        others = [row for index, row in enumerate(report.rates) if index != slow[0]]
        now, then = slowest(report.rates), slowest(others)
        if now and then:
            factor = sync.without(1.0, len(report.hosts), now, then)
            title = f"   without {report.hosts[slow[0]].name}"
            yield _sync_line(title, report, busy=False, factor=factor) + "computed"


def _sync_line(title: str, report: Report, *, busy: bool, factor: float) -> str:
    line = title.ljust(34)
    for wire in sync.WIRES:
        found = sync.find(report.syncs, wire, busy=busy)
        if found is not None:
            seconds = found.of(report.parameters) * factor
            line += f"{wire} {seconds_text(seconds)}".ljust(11) + " "
    return line


def _split_line(report: Report) -> Iterator[str]:
    """What other splits would take: the measured sync of fp32, by their bytes."""
    found = sync.find(report.syncs, "fp32", busy=False)
    hosts = len(report.hosts)
    if found is None or hosts < 2:
        return
    per_byte = found.of(report.parameters) / splits.ddp_nbytes(report.parameters, hosts)
    seldom = per_byte * splits.ddp_nbytes(report.parameters, hosts, every=_SELDOM)
    sharded = per_byte * splits.fsdp_nbytes(report.parameters, hosts)
    line = "   other splits, per step".ljust(34)
    line += f"every {_SELDOM}nd step {seconds_text(seldom)} ".ljust(24)
    yield line + f"FSDP {seconds_text(sharded)}".ljust(11) + " computed"


def seconds_text(seconds: float) -> str:
    """ "28 s", "2.1 s", "0.05 s"; "2.8 h" from 10,000 s on."""
    hours = seconds / 3600
    if seconds >= 9999.5:
        return f"{hours:.1f} h" if hours < 99.95 else f"{hours:.0f} h"
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.2g} s"


def _marked_torch(report: Report) -> list[str]:
    texts = [finding.text for finding in report.problems if finding.code == "VERSION"]
    cells = []
    for host in report.hosts:
        wrong = any(text.startswith(f"{host.name}: torch ") for text in texts)
        version = _short(host.versions.get("torch", _UNKNOWN), 12)
        cells.append(f"!{version}" if wrong else version)
    return cells


def _rate(rate: float | None, row: HostRate) -> str:
    if rate is None:
        return _UNKNOWN
    return ("!" if row.slow else "") + megabytes(rate)


def _each(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else " ".join(values)


def _span(ranks: Sequence[int]) -> str:
    """ "0-3" or "0,2,4"."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return _short(",".join(map(str, ranks)), 8)


def _middle(text: str, limit: int) -> str:
    """Both ends of an address: its network and its host."""
    if len(text) <= limit:
        return text
    end = (limit - 1) // 2
    return f"{text[: limit - 1 - end]}…{text[-end:]}"


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
