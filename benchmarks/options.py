"""The command line that all tables share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from exact import REDOPS
from launching import add_rank_options

from pycomm.cli.bench import list_of, one_of, size_of

DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8"]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def make_parser(
    table: str, workloads: Sequence[str] = (), sizes: str = "4,4K,64K,1M,25M,100M"
) -> argparse.ArgumentParser:
    """Make the parser of one table. `workloads`: what `--only` may pick, if there is a choice."""
    parser = argparse.ArgumentParser(
        description=f"Time {table} over several backends, block by block in turn. "
        "Under torchrun it measures the ranks that are there; otherwise it starts its own.",
        epilog="benchmarks/README.md explains the columns.",
    )
    add = parser.add_argument
    add("--backends", type=list_of(str), default="pycomm,gloo", help="default: %(default)s")
    add("--ranks", type=list_of(_positive), default="2,4", help="default: %(default)s")
    add("--sizes", type=list_of(size_of), default=sizes, help="default: %(default)s")
    if len(workloads) > 1:
        add("--only", type=list_of(one_of(workloads)), help=f"some of {', '.join(workloads)}")
    add("--dtype", choices=DTYPES, default="float32")
    add("--redop", choices=REDOPS, default="sum")
    add("--blocks", type=_positive, default=10, help="blocks a backend and size")
    add("--seconds", type=float, default=1.0, help="timed seconds a backend and size")
    add("--timeout", type=float, default=900.0, help="end a run of one --ranks after these seconds")
    add("--out", type=Path, help="also write the table to this file")
    add("--json", type=Path, help="also write the rows to this file as JSON")
    add_rank_options(parser)
    return parser
