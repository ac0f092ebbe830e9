#!/usr/bin/env python3
"""Write what the docstrings of the exceptions say into docs/errors.md.

    python tools/errors_table.py

Needs the standard library only: it reads pycomm/errors.py without importing it. A docstring is the
meaning, an empty line, and "Try: " with what to try. A test fails where the page says something
else.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from options_table import between, write

ROOT = Path(__file__).resolve().parent.parent
BASES = ("PycommError", "PycommBackendError", "PycommNetworkError")
WITHOUT_CODE = (
    ("pycomm/errors.py", "TorchVersionError", "pycomm.errors"),
    ("pycomm/service/client.py", "RefusedError", "pycomm.service"),
)


@dataclasses.dataclass(frozen=True)
class Error:
    """One class, as its source has it."""

    name: str
    bases: tuple[str, ...]
    meaning: str
    to_try: str


def classes(source: Path) -> dict[str, Error]:
    """The public exceptions of a module, in order. Raises ValueError for one without "Try: "."""
    found = {}
    for node in ast.parse(source.read_text()).body:
        is_error = isinstance(node, ast.ClassDef) and re.fullmatch(r"[A-Z]\w*Error", node.name)
        if isinstance(node, ast.ClassDef) and is_error:
            bases = tuple(ast.unparse(base) for base in node.bases)
            meaning, _, to_try = (ast.get_docstring(node) or "").partition("\n\nTry: ")
            if node.name not in BASES and not (meaning and to_try):
                raise ValueError(f"{source}: {node.name} lacks its meaning, or its line 'Try: '")
            advice = _cell(to_try[:1].upper() + to_try[1:])
            found[node.name] = Error(node.name, bases, _cell(meaning), advice)
    return found


def codes(source: Path) -> dict[str, str]:
    """BY_CODE, with the names of the classes."""
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "BY_CODE":
            assert isinstance(node.value, ast.Dict)
            keys = [ast.literal_eval(key) for key in node.value.keys if key is not None]
            return dict(zip(keys, map(ast.unparse, node.value.values), strict=True))
    raise ValueError(f"{source} has no BY_CODE")


def _cell(text: str) -> str:
    """A docstring's text on one line of Markdown: one backtick for two, and links to pages."""
    text = " ".join(text.split()).replace("``", "`")
    return re.sub(
        r"docs/([a-z-]+)\.md((?:#[a-z_-]+)?)",
        lambda link: f"[{link[1].replace('-', ' ')}]({link[1]}.md{link[2]})",
        text,
    )


def _ancestors(known: Mapping[str, Error], name: str) -> list[str]:
    found: list[str] = []
    for base in known[name].bases if name in known else ():
        found += [base, *_ancestors(known, base)]
    return list(dict.fromkeys(found))


def _pythons(known: Mapping[str, Error], name: str) -> list[str]:
    """Its ancestors that are Python's own."""
    return [base for base in _ancestors(known, name) if hasattr(builtins, base)]


def _quoted(names: Sequence[str]) -> str:
    """ "`A`, `B` and `C`"."""
    ticked = [f"`{name}`" for name in names]
    return " and ".join(filter(None, (", ".join(ticked[:-1]), *ticked[-1:])))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    lines += [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return "\n".join(lines)


def _link(code: str) -> str:
    return f"[`{code}`](#{code.lower()})"


def sections_of_codes(known: Mapping[str, Error], by_code: Mapping[str, str]) -> str:
    """A section for each code, so that a search or a link leads to the one that is meant."""
    sections = ["In alphabetical order: " + ", ".join(map(_link, sorted(by_code))) + "."]
    for code, name in by_code.items():
        torchs = "Network" if "PycommNetworkError" in _ancestors(known, name) else "Backend"
        also = "".join(f" and Python's `{each}`" for each in _pythons(known, name))
        error = known[name]
        classes = f"Class `{name}`, which is also torch's `Dist{torchs}Error`{also}."
        sections.append(
            f"### `{code}`\n\n{classes}\n\n{error.meaning}\n\n**To try:** {error.to_try}"
        )
    return "\n\n".join(sections)


def table_of_families(known: Mapping[str, Error], by_code: Mapping[str, str]) -> str:
    rows = []
    bare = {"TorchVersionError", *BASES, *by_code.values()}
    for family in (error for name, error in known.items() if name not in bare):
        members = {
            code: name for code, name in by_code.items() if family.name in _ancestors(known, name)
        }
        pythons: dict[str, list[str]] = {}
        for code, name in members.items():
            for each in _pythons(known, name):
                pythons.setdefault(each, []).append(code)
        also = [
            f"`{each}`" + (f" for {_quoted(some)}" if len(some) < len(members) else "")
            for each, some in pythons.items()
        ]
        listed = ", ".join(map(_link, members))
        rows.append([f"`{family.name}`", listed, "; ".join(also), family.to_try])
    return _table(("class", "codes", "also Python's", "what a program can do"), rows)


def table_without_codes(root: Path) -> str:
    rows = []
    for path, name, module in WITHOUT_CODE:
        error = classes(root / path)[name]
        rows.append([f"`{module}.{name}`", _quoted(error.bases), error.meaning, error.to_try])
    return _table(("class", "also Python's", "meaning", "what to try"), rows)


def written(root: Path) -> dict[Path, str]:
    """What the page must be."""
    page, source = root / "docs" / "errors.md", root / "pycomm" / "errors.py"
    known, by_code = classes(source), codes(source)
    text = page.read_text()
    for name, part in (
        ("codes", sections_of_codes(known, by_code)),
        ("without codes", table_without_codes(root)),
        ("families", table_of_families(known, by_code)),
    ):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        text = between(text, begin, end, f"\n\n{part}\n\n", page)
    return {page: text}


if __name__ == "__main__":
    write(written(ROOT))
