"""Words that make pycomm's text hard to read: where they stand, and how many there are.

python tools/words.py [--count] [--at COMMIT]

Ends with 1 if there is one. ``make lint`` runs it. The list is short and holds habits of this project's
own that readers stumbled over, each with what to write instead. A name in code that contains such a
word counts, too: rename it. Where a word is right, say so in ALLOWED.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("csrc", "pycomm", "docs", "examples", "benchmarks", "tools", "tests", ".github")
SUFFIXES = (".md", ".py", ".h", ".cc", ".cu", ".sh", ".yml")
SKIPPED = ("csrc/third_party/", "benchmarks/results/", "docs/pictures/", "tools/words.py")

_A_UNIT = (
    "rank|port|step|call|bucket|link|peer|host|group|process|thread|core|message|operation|page"
)

WORDS = {
    r"\bwhoever\b": "the one who acts: the rank, the caller, the thread",
    r"\bwhichever\b": '"any", or what decides',
    r"\bwhomever\b": "the one it happens to",
    r"(?:^|[.:;] |// |/// |# |\"\"\")What (?:is|has|was|goes|comes|may|cannot)\b[^?\n]*$": (
        "a subject: start with the thing that acts"
    ),
    r"(?:^|[.;] |// |/// |# |\"\"\")Who (?:\w+s|is|has|does)\b[^?\n]*$": "a subject: the rank that ...",
    rf"\b(?:a|one|two|\d+) (?:{_A_UNIT})s? a (?:{_A_UNIT})\b": '"per" or "each"',
    r"\b(?:baton|desk|thaw|thawed|cloakroom)\b": "the field's term",
    r"\bis told of\b|\bare told of\b": "is notified of, is reported to",
}
"""An expression, and what to write instead."""

ALLOWED: dict[str, int] = {}
"""Lines that are right as they are: "path: expression", and how many of them there are."""


def files(commit: str) -> Iterator[tuple[str, str]]:
    """The texts of the work tree, or of a commit, by path."""
    listing = ["git", "ls-files"] if not commit else ["git", "ls-tree", "-r", "--name-only", commit]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        top = name.partition("/")[0]
        if (top not in FOLDERS and "/" in name) or not name.endswith(SUFFIXES):
            continue
        if name.startswith(SKIPPED):
            continue
        if commit:
            show = ["git", "show", f"{commit}:{name}"]
            shown = subprocess.run(show, cwd=ROOT, capture_output=True, check=True).stdout
            yield name, shown.decode(errors="replace")
        elif (ROOT / name).is_file():
            yield name, (ROOT / name).read_text(encoding="utf-8", errors="replace")


def found(name: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, line and expression of each. Headings of documents may be "What is missing"."""
    for number, line in enumerate(text.splitlines(), 1):
        if name.endswith(".md") and line.startswith("#"):
            continue
        for expression in WORDS:
            if re.search(expression, line):
                yield number, line.strip(), expression


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", action="store_true", help="only how many there are of each")
    parser.add_argument("--at", default="", metavar="COMMIT", help="not the work tree")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    lines = []
    for name, text in files(options.at):
        per_file: Counter[str] = Counter()
        for number, line, expression in found(name, text):
            per_file[expression] += 1
            if per_file[expression] > ALLOWED.get(f"{name}: {expression}", 0):
                counts[expression] += 1
                lines.append(f"{name}:{number}: {line}\n    write instead: {WORDS[expression]}")
    if options.count:
        for expression in WORDS:
            print(f"{counts[expression]:6d}  {expression}")
        print(f"{counts.total():6d}  in all")
    elif lines:
        print("\n".join(lines))
        print(f"words: {len(lines)} to mend")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
