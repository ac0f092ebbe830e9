"""Write the table of docs/integrations.md from what tests/integrations recorded.

    make integrations                    # runs the tests; writes both files if all of them ran
    python tools/integration_table.py [--check]    # only the table, from the record

The record, docs/integrations.json, is written by pytest's --integration-results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "integrations.md"
RECORD = ROOT / "docs" / "integrations.json"
BEGIN = "<!-- made by tools/integration_table.py: do not edit -->"
END = "<!-- end of what tools/integration_table.py made -->"


def make_table(record: dict[str, Any]) -> str:
    """The Markdown between the two marks."""
    rows = record["rows"].values()
    counts = {
        outcome: sum(row["outcome"] == outcome for row in rows)
        for outcome in ("passed", "failed", "skipped", "fails in the library")
    }
    said = ", ".join(
        f"{count} {outcome.replace('fails', 'fail')}" for outcome, count in counts.items() if count
    )
    lines = [
        f"Run on {record['date']} at commit {record['commit']}. {len(rows)} tests: {said}. "
        f"Python {record['python']}, {record['machine']}, {record['cpu_s']} CPU seconds, "
        f"{record['wall_s']} s.",
        "",
        "| library | version | what was run | result |",
        "|---|---|---|---|",
    ]
    for row in rows:
        result = row["outcome"] + (f": {row['note']}" if row["note"] else "")
        cells = (row["library"], row["version"], row["what"], result)
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def with_table(document: str, table: str) -> str:
    """The document with the table in place of what stood between the marks."""
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    made, count = re.subn(
        pattern, lambda _: f"{BEGIN}\n\n{table}\n\n{END}", document, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{DOCUMENT.name} has {count} places for the table, not one")
    return made


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where the table is not so")
    check = parser.parse_args().check
    before = DOCUMENT.read_text()
    after = with_table(before, make_table(json.loads(RECORD.read_text())))
    if check:
        if before != after:
            print(f"{DOCUMENT.relative_to(ROOT)} is not what its record says: make integrations")
        return int(before != after)
    if before != after:
        DOCUMENT.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
