"""Words that make pycomm's text hard to read: where they stand, and how many there are.

python tools/words.py [--count] [--at COMMIT]

Ends with 1 if there is one. ``make lint`` runs it. The list is short. It holds this project's own
habits that readers stumbled over, each with what to write instead. It reads comments, texts and
names: rename a function whose name has such a word. If a word is right as it is, put it into
ALLOWED.
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
SKIPPED = (
    "csrc/third_party/",
    "benchmarks/results/",
    "docs/pictures/",
    "tools/words.py",
    "tests/python/tools/test_words.py",
)

_A_UNIT = (
    "rank|port|step|call|bucket|link|peer|host|group|process|thread|core|message|operation|page|"
    "line|row|byte|block|chunk|file|key|value|element|second|minute|interface|tensor|frame"
)
_BEGINS = r"(?:^|[.;] |// |/// |# |\"\"\")"

WORDS = {
    "whoever": (r"\b[Ww]hoever\b|\b[Ww]homever\b", "the rank, the caller, the thread"),
    "whichever": (r"\b[Ww]hichever\b", '"any", or what decides'),
    "What is": (
        rf"(?:{_BEGINS}|: )What (?:is|has|was|goes|comes|may|cannot)\b[^?\n]*$",
        "a subject: start with the thing that acts",
    ),
    "Who does": (rf"{_BEGINS}Who (?:\w+s|is|has|does)\b[^?\n]*$", "a subject: the rank that ..."),
    "one X a Y": (rf"\b(?:an?|one|two|\d+) (?:{_A_UNIT})s? an? (?:{_A_UNIT})\b", "per, or each"),
    "our own term": (r"\b(?:baton|desk|thaw(?:s|ed|ing)?|cloakroom)\b", "the field's term"),
    "is told": (
        r"\b(?:is|are|was|were|be|been) told\b(?! apart)",
        "is notified, gets the error, is reported to",
    ),
    "hears": (r"\bhears?\b", "receives, learns, is notified"),
    "goes by": (r"\b(?:go|goes|going) by\b", "uses, is sent by"),
    "through with": (r"\bthrough with\b", "has finished, is done with"),
    "that is none": (r"\bthat is none\b|\bwhich there (?:is|are) not\b", "is not valid"),
    "says otherwise": (r"\bsays? otherwise\b|\bsaid aloud\b", "the setting or the value itself"),
    "met an exception": (r"\b(?:met|meets?) an? (?:exception|error)\b", "caught, got, raised"),
}
"""A name of each, the expression, and what to write instead."""

ALLOWED = {
    # To mend with the next change of these files.
    "pycomm/doctor/firewall.py: What is": 2,
    "pycomm/doctor/join.py: that is none": 1,
    "pycomm/doctor/rate_findings.py: What is": 1,
    "pycomm/doctor/report.py: What is": 1,
    "pycomm/doctor/system.py: whichever": 2,
}
"""Lines that stay as they are, "path: name", and how many of them there are."""


def files(commit: str) -> Iterator[tuple[str, str]]:
    """The texts of the work tree, or of a commit, by path."""
    listing = ["git", "ls-tree", "-r", "--name-only", commit] if commit else ["git", "ls-files"]
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


def found(path: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, line and name of each. A heading of a document may be "What is missing"."""
    for number, line in enumerate(text.splitlines(), 1):
        if path.endswith(".md") and line.startswith("#"):
            continue
        for name, (expression, _) in WORDS.items():
            if re.search(expression, line):
                yield number, line.strip(), name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", action="store_true", help="only how many there are of each")
    parser.add_argument("--at", default="", metavar="COMMIT", help="not the work tree")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    lines = []
    try:
        texts = list(files(options.at))
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"words: skipped, as git lists no files here ({error})")
        return 0
    for path, text in texts:
        per_file: Counter[str] = Counter()
        for number, line, name in found(path, text):
            per_file[name] += 1
            if per_file[name] > ALLOWED.get(f"{path}: {name}", 0):
                counts[name] += 1
                lines.append(f"{path}:{number}: {line}\n    {name}: write {WORDS[name][1]}")
    if options.count:
        for name in WORDS:
            print(f"{counts[name]:6d}  {name}")
        print(f"{counts.total():6d}  in all")
    elif lines:
        print("\n".join(lines))
        print(f"words: {len(lines)} to mend")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
