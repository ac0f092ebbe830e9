"""Prepare a page of the site: documents outside docs/, links that leave docs/, the list of results.

docs/conf.py calls these functions while Sphinx reads the pages. They know nothing of Sphinx.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

# Documents that stay where GitHub looks for them. The site shows each as the page named here, whose
# own text is one sentence for readers of the repository.
BORROWED = {
    "index": "README.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "benchmarks": "benchmarks/README.md",
    "examples": "examples/README.md",
}
# Folders that a page lists.
LISTED = {"benchmarks/results": "results"}
RESULTS_MARK = "<!-- the table of results -->"
_DOORS = re.compile(r"^<!-- doors: begin -->\n(.*?)^<!-- doors: end -->", re.MULTILINE | re.DOTALL)
_HELP = re.compile(r"^<!-- help: (\w+) -->$", re.MULTILINE)

_FENCE = re.compile(r"^(```+).*?^\1 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_ELSEWHERE = re.compile(r"^([a-z]+:|#)")


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Apply `change` to the parts of a Markdown text that are no code."""
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def relinked(text: str, folder: Path, page_folder: Path) -> str:
    """Rewrite the relative links of a document in `folder` for a page in `page_folder`.

    A link to a borrowed document becomes one to its page. A link to a file outside docs/ stays one
    to that file, which Sphinx copies into the site.
    """
    pages = {ROOT / path: DOCS / f"{name}.md" for name, path in BORROWED.items()}
    pages |= {ROOT / path: DOCS / f"{name}.md" for path, name in LISTED.items()}

    def rewrite(link: re.Match[str]) -> str:
        if _ELSEWHERE.match(link[2]):
            return link[0]
        path, hash_sign, fragment = link[2].partition("#")
        target = Path(os.path.normpath(folder / path))
        target = pages.get(target, target)
        return f"{link[1]}{os.path.relpath(target, page_folder)}{hash_sign}{fragment}{link[3]}"

    return outside_fences(text, lambda part: _LINK.sub(rewrite, part))


def results_table(folder: Path) -> str:
    """A Markdown table of the published measurements: newest first, with the commit of each."""
    rows = []
    for path in folder.glob("*.txt"):
        name, date = re.fullmatch(r"(.*)-(\d{4}-\d\d-\d\d[a-z]?)", path.stem).groups()  # type: ignore[union-attr]
        text = path.read_text()
        commits = re.findall(r"\bcommit:? +([0-9a-f]{7,12})\b", text, re.IGNORECASE)
        commit = f"`{commits[0][:7]}`" if commits else "in the file"
        more = " and others" if len({each[:7] for each in commits}) > 1 else ""
        rows.append((date, f"| [{name}](../{path.relative_to(ROOT)}) | {date} | {commit}{more} |"))
    rows.sort(key=lambda row: row[1])
    rows.sort(key=lambda row: row[0], reverse=True)
    return "\n".join(["| measured | date | commit |", "|---|---|---|", *(row for _, row in rows)])


def help_text(command: str) -> str:
    """What `python -m pycomm COMMAND --help` prints."""
    from pycomm.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return printed.getvalue().rstrip()


def page(name: str, text: str) -> str:
    """The text that Sphinx gets for the page `name`, whose file has `text`."""
    if name in BORROWED:
        source = ROOT / BORROWED[name]
        own, tree, toctrees = text.partition("```{toctree}")
        borrowed = relinked(source.read_text(), source.parent, DOCS)
        if doors := _DOORS.search(own):
            title, _, rest = borrowed.partition("\n\n")
            borrowed = f"{title}\n\n{doors[1]}\n{rest}"
        return borrowed + "\n" + tree + toctrees
    if RESULTS_MARK in text:
        text = text.replace(RESULTS_MARK, results_table(ROOT / "benchmarks" / "results"))
    text = _HELP.sub(lambda mark: help_text(mark[1]), text)
    folder = (DOCS / name).parent
    return relinked(text, folder, folder)
