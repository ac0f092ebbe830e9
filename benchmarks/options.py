"""The command line that all tables share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from exact import REDOPS
from launching import add_rank_options

DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8"]


def parse_size(text: str) -> int:
    """Read 4, 4K, 1M or 1G, in powers of 1024."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    digits = text if factor == 1 else text[:-1]
    if not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4, 4K, 1M or 1G")
    return int(digits) * factor


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _list_of(item: Callable[[str], object]) -> Callable[[str], list[object]]:
    return lambda text: [item(part.strip()) for part in text.split(",")]


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def pick(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return pick


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
    add("--backends", type=_list_of(str), default="pycomm,gloo", help="default: %(default)s")
    add("--ranks", type=_list_of(_positive), default="2,4", help="default: %(default)s")
    add("--sizes", type=_list_of(parse_size), default=sizes, help="default: %(default)s")
    if len(workloads) > 1:
        add("--only", type=_list_of(_one_of(workloads)), help=f"some of {', '.join(workloads)}")
    add("--dtype", choices=DTYPES, default="float32")
    add("--redop", choices=REDOPS, default="sum")
    add("--blocks", type=_positive, default=10, help="blocks a backend and size")
    add("--seconds", type=float, default=1.0, help="timed seconds a backend and size")
    add("--timeout", type=float, default=900.0, help="end a run of one --ranks after these seconds")
    add("--out", type=Path, help="also write the table to this file")
    add("--json", type=Path, help="also write the rows to this file as JSON")
    add_rank_options(parser)
    return parser
