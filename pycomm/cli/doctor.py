"""``python -m pycomm doctor``: reports why a job would not start, and which host is slow."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from pycomm import errors
from pycomm.doctor.flow import MAX_SECONDS
from pycomm.doctor.join import NoStoreError, join, report_alone
from pycomm.doctor.meeting import NoDoctorError, Place, Plan
from pycomm.doctor.report import NOT_READY, Report
from pycomm.doctor.run import examine, examine_alone
from pycomm.doctor.screen import as_text
from pycomm.doctor.system import is_of_this_host, resolve, socket_options, variables_in_force
from pycomm.integrations import launch

_PORT = 29500
_WAIT_S = 60.0
_WAIT_FOR_PEOPLE_S = 600.0

_DESCRIPTION = """\
Check a cluster before a job starts: why it would not start, and which host is slow. Start it as
the job itself, one process per rank: torchrun ... -m pycomm doctor, or
srun python -m pycomm doctor. Without a launcher, --hosts prints the line for each host and waits.
Without anything, it checks this host alone. It takes about half a minute and sends at full speed
between pairs of hosts meanwhile.
Exit codes: 0 ready or not judged, 1 would not start, 2 wrong usage, 3 starts, but slow.
"""
_HOSTS_HELP = "Run this on host A. It prints the command for each other host."
_RANKS_HELP = "without a launcher: ranks that the job will have on each host; default: 1"
_WAIT_HELP = "seconds for all hosts to come; default: 60, with --hosts 600"
_HOSTFILE_HELP = """\
Write the hosts and their ranks to this file, for pycomm run, unless the verdict is NOT READY"""
_SECONDS_HELP = """\
Length of each measurement in the first round; later rounds take half. Default: %(default)s"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command; ``pycomm.cli`` has made its parser."""
    parser.description = _DESCRIPTION
    add = parser.add_argument
    add("--hosts", type=_names, metavar="A,B", help=_HOSTS_HELP)
    add("--nnodes", type=int, metavar="N", help="without a launcher: how many hosts")
    add("--node-rank", type=int, metavar="K", help="without a launcher: which host this is, from 0")
    add("--master-addr", metavar="A", help="without a launcher: name or address of host 0")
    add("--master-port", type=_port, default=_PORT, help="of the job; default: %(default)s")
    add("--ranks-per-host", type=_ranks, default=1, metavar="R", help=_RANKS_HELP)
    add("--wait", type=_wait, metavar="S", help=_WAIT_HELP)
    add("--seconds", type=_seconds, default=1.5, metavar="S", help=_SECONDS_HELP)
    add(
        "--model",
        type=_count,
        metavar="P",
        default="62.5M",
        help="parameters of your model, such as 125M or 7B, for the predicted syncs; "
        "default: %(default)s",
    )
    add("--reach-only", action="store_true", help="send nothing at full speed")
    add("--hostfile", metavar="PATH", help=_HOSTFILE_HELP)
    add("--strict", action="store_true", help="exit 1 instead of 0 if nothing could be judged")
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Runs as one rank, or for this host alone; rank 0 prints, by hand every host."""
    try:
        place = find_place(arguments, os.environ)
        if place is None:
            report = examine_alone(os.environ, _plan(arguments))
            _write_hostfile(report, arguments)
            return _print(report, arguments)
        if arguments.hosts:
            _print_lines(arguments, place, variables_in_force(os.environ))
    except (ValueError, OSError) as error:
        print(f"pycomm doctor: {error}", file=sys.stderr)
        return 2
    prints = place.rank == 0 or place.by_hand
    begin = time.monotonic()
    try:
        plan = _plan(arguments, prints)
        with join(place, plan.wait_s) as store:
            report = examine(store, place, os.environ, plan)
    except NoStoreError as error:
        return _print(error.report(os.environ, arguments.strict), arguments)
    except NoDoctorError as error:
        took = time.monotonic() - begin
        alone = report_alone(place, os.environ, arguments.strict, took, str(error))
        return _print(alone, arguments)
    except (errors.PycommError, dist.DistError, OSError, TimeoutError) as error:
        print(f"pycomm doctor: rank {place.rank}: {error}", file=sys.stderr)
        return 1
    if place.rank == 0:
        try:
            _write_hostfile(report, arguments)
        except OSError as error:
            print(f"pycomm doctor: {error}", file=sys.stderr)
            return 2
    return _print(report, arguments) if prints else report.exit_code


def _write_hostfile(report: Report, arguments: argparse.Namespace) -> None:
    """A line per host, in the order of ranks. By hand, the hosts have the names of ``--hosts``."""
    if not arguments.hostfile or report.verdict == NOT_READY:
        return
    by_hand = arguments.hosts or report.alone
    lines = []
    for host in sorted(report.hosts, key=lambda host: min(host.ranks)):
        name = host.name
        if arguments.hosts:
            name = arguments.hosts[min(host.ranks) // arguments.ranks_per_host]
        elif name.endswith(f"({host.address})"):  # not unique: see unique_names
            name = host.address
        name = f"[{name}]" if ":" in name else name
        count = arguments.ranks_per_host if by_hand else len(host.ranks)
        lines.append(f"{name}:{count}" + (f"  # {host.address}" if host.address else ""))
    Path(arguments.hostfile).write_text("".join(f"{line}\n" for line in lines))


def find_place(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Place | None:
    """The rank of this process; None if it checks this host alone.

    Raises:
        ValueError: The options or variables do not go together.
    """
    if arguments.hosts:
        _check_first(arguments.hosts[0])
        return _by_hand(arguments, environ, len(arguments.hosts), 0, arguments.hosts[0])
    if arguments.nnodes is None:
        for name in ("node_rank", "master_addr"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} goes with --nnodes")
    else:
        missing = [n for n in ("node_rank", "master_addr") if getattr(arguments, n) is None]
        if missing:
            raise ValueError(f"--nnodes goes with --{missing[0].replace('_', '-')}")
        if not 0 <= arguments.node_rank < arguments.nnodes:
            raise ValueError(f"--node-rank is from 0 to {arguments.nnodes - 1}")
        return _by_hand(
            arguments, environ, arguments.nnodes, arguments.node_rank, arguments.master_addr
        )
    found = launch.env_from_launcher()
    if found is None:
        return None
    return Place(
        rank=found.rank,
        size=found.world_size,
        master=found.address,
        master_port=found.port,
        store_port=found.port,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _check_first(host: str) -> None:
    """On another host, torch would wait for a store that no process opens."""
    addresses = resolve(host)
    if not any(map(is_of_this_host, addresses)):
        known = f"its addresses are {', '.join(addresses)}" if addresses else "it has no address"
        raise ValueError(f"run this on {host}, the first of --hosts. As seen here, {known}")


def _by_hand(
    arguments: argparse.Namespace, environ: Mapping[str, str], size: int, rank: int, master: str
) -> Place:
    """The doctor's store is not at the job's port: the job may start on one host already while the
    doctor ends on another."""
    first, last = socket_options(environ).port_range
    job = arguments.master_port
    own = [port for port in range(first, last + 1) if port != job] if last > first else [job + 1]
    return Place(
        rank=rank,
        size=size,
        master=master,
        master_port=arguments.master_port,
        store_port=own[0],
        by_hand=True,
    )


def _print_lines(arguments: argparse.Namespace, place: Place, variables: list[str]) -> None:
    """The other options reach the other hosts through the store."""
    hosts = arguments.hosts
    print(f"pycomm doctor: run this on each host; {hosts[0]} waits here", file=sys.stderr)
    for rank, host in enumerate(hosts[1:], start=1):
        line = [sys.executable, "-m", "pycomm", "doctor", f"--nnodes={place.size}"]
        line += [f"--node-rank={rank}", f"--master-addr={place.master}"]
        line += [f"--master-port={place.master_port}", f"--wait={_wait_s(arguments):g}"]
        print(f"  {host}:\n    {' '.join([*variables, shlex.join(line)])}", file=sys.stderr)


def _plan(arguments: argparse.Namespace, prints: bool = True) -> Plan:
    return Plan(
        seconds=arguments.seconds,
        parameters=arguments.model,
        reach_only=arguments.reach_only,
        ranks_per_host=arguments.ranks_per_host,
        wait_s=_wait_s(arguments),
        strict=arguments.strict,
        progress=_progress if prints and sys.stderr.isatty() else lambda _: None,
    )


def _wait_s(arguments: argparse.Namespace) -> float:
    default = _WAIT_FOR_PEOPLE_S if arguments.hosts else _WAIT_S
    return float(arguments.wait or default)


def _progress(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"pycomm doctor: {line}", file=sys.stderr, flush=True)


def _print(report: Report, arguments: argparse.Namespace) -> int:
    text = json.dumps(report.as_json(), indent=2) if arguments.json else as_text(report)
    print(text, flush=True)
    return report.exit_code


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of hosts such as node1,node2")
    return names


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _seconds(text: str) -> float:
    return _between(text, 0.5, MAX_SECONDS)


def _wait(text: str) -> float:
    return _between(text, 0.5, 3600.0)


def _between(text: str, least: float, most: float) -> float:
    with contextlib.suppress(ValueError):
        if least <= float(text) <= most:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, {least:g} to {most:g}")


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, 1 to 4096")
    return int(text)


def _count(text: str) -> float:
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}.get(text[-1:].upper(), 1.0)
    with contextlib.suppress(ValueError):
        count = float(text if factor == 1.0 else text[:-1]) * factor
        if 0 < count < 1e13:
            return count
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters such as 62.5M or 7B")
