"""``python -m pycomm bench``: time collectives on the ranks that a launcher has started."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm import errors
from pycomm._group.creation import topology_text
from pycomm.cli.timing import COLLECTIVES, Case, Timing, measure
from pycomm.integrations import launch

_MAX_TIMEOUT_S = 24 * 3600.0
_SIZES = "4,4K,64K,1M,16M"
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
_FACTORS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_HEAD = (
    f"{'size':>12} {'count':>12} {'type':>9} {'collective':>15} {'time':>11} {'algbw':>9}"
    f" {'busbw':>9} {'#wrong':>7} {'cpu':>9}"
)
_UNITS = (
    f"{'(B)':>12} {'(elements)':>12} {'':>9} {'':>15} {'(us)':>11} {'(GB/s)':>9}"
    f" {'(GB/s)':>9} {'':>7} {'(us)':>9}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command; ``pycomm.cli`` has made its parser."""
    parser.description = (
        f"{(parser.description or '').removesuffix('.')}, as: torchrun --nproc-per-node 2 -m "
        "pycomm bench, or mpirun -np 2 python -m pycomm bench, or srun python -m pycomm bench."
    )
    add = parser.add_argument
    add(
        "--collectives",
        type=list_of(one_of(tuple(COLLECTIVES))),
        default="all_reduce",
        help=f"some of {', '.join(COLLECTIVES)}; default: %(default)s",
    )
    add("--sizes", type=list_of(size_of), default=_SIZES, help="bytes; default: %(default)s")
    add("--dtype", choices=_DTYPES, default="float32")
    add("--seconds", type=_seconds, default="0.5", help="about how long each row is timed")
    add(
        "--timeout",
        type=_timeout,
        default="300",
        metavar="S",
        help="seconds after which an operation, or the ranks' meeting, fails; default: %(default)s",
    )
    add("--json", action="store_true", help="print one JSON object, on rank 0")


def run(arguments: argparse.Namespace) -> int:
    """Runs as one rank. 1 if a result was wrong or the ranks failed, 2 for wrong usage."""
    try:
        found = launch.init_process_group("pycomm", timeout=timedelta(seconds=arguments.timeout))
    except ValueError as error:
        print(f"pycomm bench: {error}", file=sys.stderr)
        return 2
    except (errors.PycommError, OSError, RuntimeError) as error:
        print(f"pycomm bench: {error}", file=sys.stderr)
        return 1
    if found is None:
        print(
            "pycomm bench: no launcher has said which rank this is (torchrun, mpirun and srun do); "
            "start it as torchrun --nproc-per-node 2 -m pycomm bench",
            file=sys.stderr,
        )
        return 2
    try:
        wrong = _timed(arguments)
    except BrokenPipeError:  # of what it prints: for main()
        raise
    except (errors.PycommError, OSError, ValueError) as error:
        print(f"pycomm bench: rank {found.rank}: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    return 1 if wrong else 0


def _timed(arguments: argparse.Namespace) -> int:
    first = dist.get_rank() == 0
    shown = first and not arguments.json
    if shown:
        print(f"# {dist.get_world_size()} ranks: {topology_text()}\n{_HEAD}\n{_UNITS}", flush=True)
    rows = []
    for name in arguments.collectives:
        for nbytes in arguments.sizes:
            case = Case(name, nbytes, getattr(torch, arguments.dtype))
            timing = measure(case, arguments.seconds)
            rows.append(_row(case, timing))
            if shown:
                print(_line(rows[-1]), flush=True)
    if first and arguments.json:
        print(json.dumps({"topology": topology_text(), "rows": rows}, indent=2))
    return sum(int(row["wrong"]) for row in rows)


def _row(case: Case, timing: Timing) -> dict[str, Any]:
    algbw = case.nbytes / timing.seconds / 1e9
    return {
        "size": case.nbytes,
        "count": case.numel,
        "type": str(case.dtype).removeprefix("torch."),
        "collective": case.collective,
        "time_us": timing.seconds * 1e6,
        "algbw_gbps": algbw,
        "busbw_gbps": algbw * case.bus_factor,
        "wrong": timing.wrong,
        "cpu_us": timing.cpu_seconds * 1e6,
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['size']:>12} {row['count']:>12} {row['type']:>9} {row['collective']:>15}"
        f" {row['time_us']:>11.1f} {row['algbw_gbps']:>9.3f} {row['busbw_gbps']:>9.3f}"
        f" {row['wrong']:>7} {row['cpu_us']:>9.1f}"
    )


def size_of(text: str) -> int:
    """Reads 4, 4K, 1M or 1G, in powers of 1024."""
    factor = _FACTORS.get(text[-1:].upper(), 1)
    digits = text if factor == 1 else text[:-1]
    if not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4, 4K, 1M or 1G")
    return int(digits) * factor


def _seconds(text: str) -> float:
    return _up_to(600.0, text)


def _timeout(text: str) -> float:
    return _up_to(_MAX_TIMEOUT_S, text)


def _up_to(most: float, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= most:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds, above 0 and up to {most:.0f}"
        )
    return seconds


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    def pick(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return pick


def list_of(item: Callable[[str], object]) -> Callable[[str], list[object]]:
    return lambda text: [item(part.strip()) for part in text.split(",")]
