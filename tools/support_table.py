#!/usr/bin/env python3
"""Write the tables of docs/support.md from what tests/python/collectives/test_support.py has seen.

    python -m pytest tests/python/collectives/test_support.py --support-json seen.json
    python tools/support_table.py seen.json

The test fails where the page says something else than what it sees.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
YES, NO = "✓", "–"

Row = Mapping[str, str]
Table = tuple[tuple[str, ...], ...]


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *[":-:"] * (len(head) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _grid(rows: Sequence[Row], column: str) -> Table:
    """Head and body: a dtype a line, `column` (collective or op) across."""
    across = _unique(row[column] for row in rows)
    refused = {(row["dtype"], row[column]): row["refused"] for row in rows}
    return (
        ("", *across),
        *(
            (f"`{dtype}`", *(NO if refused[dtype, each] else YES for each in across))
            for dtype in _unique(row["dtype"] for row in rows)
        ),
    )


def render(rows: Sequence[Row]) -> str:
    """Make the tables, a section a device."""
    parts: list[str] = []
    for device in _unique(row["device"] for row in rows):
        here = [row for row in rows if row["device"] == device]
        parts.append(f"## {device}")
        by_table: dict[Table, list[str]] = {}
        for collective in _unique(row["collective"] for row in here if row["op"]):
            own = [row for row in here if row["collective"] == collective]
            by_table.setdefault(_grid(own, "op"), []).append(collective)
        for table, collectives in by_table.items():
            parts.append(f"**{', '.join(collectives)}**")
            parts.append(_markdown(table[0], table[1:]))
        moved = _grid([row for row in here if not row["op"]], "collective")
        parts.append("**Collectives that only move bytes**")
        parts.append(_markdown(moved[0], moved[1:]))
    return "\n\n".join(parts)


def page_with(tables: str, page: str) -> str:
    """Put the tables between the page's markers."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks its markers {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{tables}\n\n{END}{tail}"


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    rows = json.loads(Path(argv[0]).read_text())
    PAGE.write_text(page_with(render(rows), PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
