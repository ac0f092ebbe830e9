#!/usr/bin/env python3
"""Write the tables of docs/which-split.md: bytes and seconds per step of each way to split.

    python tools/which_split.py

pycomm/doctor/splits.py computes the figures, as the doctor's. A test fails where the page says
something else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from options_table import between, write  # noqa: E402 (it is in tools)

from pycomm.doctor.screen import seconds_text  # noqa: E402
from pycomm.doctor.splits import (  # noqa: E402
    FP16_NBYTES,
    INT8_NBYTES,
    ddp_nbytes,
    fsdp_nbytes,
    pipeline_nbytes,
    wire_seconds,
)

LINKS_GBIT = (1, 2.5, 10, 25)
MACHINES = (2, 4)
TOKENS = 8192
WIDTHS: Mapping[str, tuple[float, int]] = {
    "25 million": (25e6, 512),
    "125 million": (125e6, 768),
    "1 billion": (1e9, 2048),
}
"""The parameters of each table, and the width of a model of that size."""

# What a row is called, and the bytes for so many parameters, machines and values per token.
SPLITS: Mapping[str, Callable[[float, int, int], float]] = {
    "DDP, fp32": lambda p, m, _: ddp_nbytes(p, m),
    "DDP, fp16": lambda p, m, _: ddp_nbytes(p, m, value_nbytes=FP16_NBYTES),
    "DDP, int8": lambda p, m, _: ddp_nbytes(p, m, value_nbytes=INT8_NBYTES),
    "every 32nd step": lambda p, m, _: ddp_nbytes(p, m, every=32),
    "pipeline": lambda _, m, width: pipeline_nbytes(TOKENS, width, m),
    "FSDP, `reshard_after_forward=False`": lambda p, m, _: fsdp_nbytes(p, m, reshard=False),
    "FSDP": lambda p, m, _: fsdp_nbytes(p, m),
    "FSDP, 4 microbatches": lambda p, m, _: fsdp_nbytes(p, m, microbatches=4),
}


def table(size: str) -> str:
    """One size of model. A cell is of 2 machines and of 4."""
    parameters, width = WIDTHS[size]
    head = [f"{size} parameters", "MB", *(f"{link:g} Gbit/s" for link in LINKS_GBIT)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, nbytes_of in SPLITS.items():
        nbytes = [nbytes_of(parameters, machines, width) for machines in MACHINES]
        cells = [name, " / ".join(f"{one / 1e6:,.0f}" for one in nbytes)]
        for link in LINKS_GBIT:
            few, many = (seconds_text(wire_seconds(one, link)) for one in nbytes)
            cells.append(f"{few.removesuffix(' s')} / {many}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def written(root: Path) -> dict[Path, str]:
    """What the page must be."""
    page = root / "docs" / "which-split.md"
    text = "\n\n".join(map(table, WIDTHS))
    marks = "<!-- tables: begin -->", "<!-- tables: end -->"
    return {page: between(page.read_text(), *marks, f"\n\n{text}\n\n", page)}


if __name__ == "__main__":
    write(written(ROOT))
