"""Fail where a Markdown document links to a file or a heading's file that does not exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# [text](target), without images' titles; code fences are cut out first.
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r"^([a-z]+:|#)")


def broken_links(root: Path) -> list[str]:
    """`file: target` for each relative link under `root` that leads nowhere."""
    documents = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("tests/**/*.md")]
    found = []
    for document in sorted(documents):
        for target in LINK.findall(FENCE.sub("", document.read_text())):
            if (
                not ELSEWHERE.match(target)
                and not (document.parent / target.split("#")[0]).exists()
            ):
                found.append(f"{document.relative_to(root)}: {target}")
    return found


def main() -> int:
    found = broken_links(ROOT)
    for line in found:
        print(f"no such file: {line}")
    print(f"docs: {len(found)} broken links" if found else "docs: every link leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
