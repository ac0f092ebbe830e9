#!/usr/bin/env python3
"""Write the tables of the documents that follow from the code.

    python tools/doc_tables.py [options] [errors] [which-split] [integrations]  # no name: all

options: what pycomm/_settings.py says of each option, into docs/options.md and Options' docstring.
errors: the docstrings of pycomm/errors.py, into docs/errors.md. One is the meaning, an empty line,
and "Try: " with what to try. which-split: bytes and seconds per step of each way to split, as
pycomm/doctor/splits.py computes them, into docs/which-split.md. integrations: what the last run of
`make integrations` left in docs/integrations.json, into docs/integrations.md.

The first two need the standard library only. A test fails where a page says something else.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import importlib.util
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def between(text: str, begin: str, end: str, new: str, where: Path) -> str:
    """``text`` with ``new`` between the first ``begin`` and the first ``end`` behind it."""
    head, found, rest = text.partition(begin)
    _, also, tail = rest.partition(end)
    if not found or not also:
        raise ValueError(f"{where} lacks its marks {begin!r} and {end!r}")
    return f"{head}{begin}{new}{end}{tail}"


def write(files: Mapping[Path, str]) -> None:
    """Writes those that differ, and prints their names."""
    for path, text in files.items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


# --- options

BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"
ARGS, RAISES = "    Args:\n", "\n    Raises:\n"
WIDTH = 100


def settings_of(root: Path) -> ModuleType:
    """pycomm/_settings.py alone: the package would import torch."""
    spec = importlib.util.spec_from_file_location("_settings", root / "pycomm" / "_settings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_settings"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def default_text(setting: Any) -> str:
    """As ``python -m pycomm env`` has it."""
    return "automatic" if setting.default in ("", (0, 0)) else str(setting.default)


def options_table(settings: ModuleType) -> str:
    """The table of docs/options.md."""
    lines = ["| field | values | default | variable | also read |", "|---|---|---|---|---|"]
    for setting in settings.SETTINGS:
        default = default_text(setting)
        cells = [
            f"`{setting.field}`",
            setting.doc,
            default if default == "automatic" else f"`{default}`",
            f"`{setting.variable}`",
            ", ".join(f"`{name}`" for name in setting.fallbacks),
        ]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines)


def arguments(settings: ModuleType) -> str:
    """The lines below "Args:" of the docstring of Options."""
    parts = []
    for setting in settings.SETTINGS:
        text = re.sub(r"\[([^]]+)\]\(#[^)]*\)", r"\1 (docs/options.md)", setting.doc)
        text = re.sub(r"\[([^]]+)\]\(([^)#]+)[^)]*\)", r"\1 (docs/\2)", text)
        text = re.sub(r"(\(docs/[^)]*\))$", r"\1.", text)
        names = [f"`{name}`" for name in (setting.variable, *setting.fallbacks)]
        text += f" {names[0]}{', then ' * (len(names) > 1)}{', '.join(names[1:])}; "
        text += f"default: {default_text(setting)}."
        parts += textwrap.wrap(
            f"{setting.field}: {text}".replace("`", "``"),
            WIDTH,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(parts) + "\n"


def options(root: Path) -> dict[Path, str]:
    """What docs/options.md and pycomm/options.py must be."""
    settings = settings_of(root)
    page, source = root / "docs" / "options.md", root / "pycomm" / "options.py"
    return {
        page: between(page.read_text(), BEGIN, END, f"\n\n{options_table(settings)}\n\n", page),
        source: between(source.read_text(), ARGS, RAISES, arguments(settings), source),
    }


# --- errors

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


def errors(root: Path) -> dict[Path, str]:
    """What docs/errors.md must be."""
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


# --- which split

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
def splits_of(code: Any) -> Mapping[str, Callable[[float, int, int], float]]:
    """By the functions of pycomm/doctor/splits.py."""
    return {
        "DDP, fp32": lambda p, m, _: code.ddp_nbytes(p, m),
        "DDP, fp16": lambda p, m, _: code.ddp_nbytes(p, m, value_nbytes=code.FP16_NBYTES),
        "DDP, int8": lambda p, m, _: code.ddp_nbytes(p, m, value_nbytes=code.INT8_NBYTES),
        "every 32nd step": lambda p, m, _: code.ddp_nbytes(p, m, every=32),
        "pipeline": lambda _, m, width: code.pipeline_nbytes(TOKENS, width, m),
        "FSDP, `reshard_after_forward=False`": lambda p, m, _: code.fsdp_nbytes(
            p, m, reshard=False
        ),
        "FSDP": lambda p, m, _: code.fsdp_nbytes(p, m),
        "FSDP, 4 microbatches": lambda p, m, _: code.fsdp_nbytes(p, m, microbatches=4),
    }


def split_table(size: str) -> str:
    """One size of model. A cell is of 2 machines and of 4."""
    code = importlib.import_module("pycomm.doctor.splits")
    seconds_text = importlib.import_module("pycomm.doctor.screen").seconds_text
    parameters, width = WIDTHS[size]
    head = [f"{size} parameters", "MB", *(f"{link:g} Gbit/s" for link in LINKS_GBIT)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, nbytes_of in splits_of(code).items():
        nbytes = [nbytes_of(parameters, machines, width) for machines in MACHINES]
        cells = [name, " / ".join(f"{one / 1e6:,.0f}" for one in nbytes)]
        for link in LINKS_GBIT:
            few, many = (seconds_text(code.wire_seconds(one, link)) for one in nbytes)
            cells.append(f"{few.removesuffix(' s')} / {many}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def which_split(root: Path) -> dict[Path, str]:
    """What docs/which-split.md must be."""
    page = root / "docs" / "which-split.md"
    text = "\n\n".join(map(split_table, WIDTHS))
    marks = "<!-- tables: begin -->", "<!-- tables: end -->"
    return {page: between(page.read_text(), *marks, f"\n\n{text}\n\n", page)}


# --- integrations


def integrations_table(record: Mapping[str, Any]) -> str:
    """What pytest's --integration-results has written, as Markdown."""
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
    cases: dict[tuple[str, ...], list[str]] = {}  # of tests that differ by their case only
    for row in rows:
        result = row["outcome"] + (f": {row['note']}" if row["note"] else "")
        what, _, case = row["what"].partition(" [")
        if not case.endswith("]"):
            what, case = row["what"], ""
        cases.setdefault((row["library"], row["version"], what, result), []).append(case[:-1])
    for (library, version, what, result), names in cases.items():
        shown = f"{what} [{'; '.join(names)}]" if names != [""] else what
        cells = (library, version, shown, result)
        lines.append(
            "| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |"
        )
    return "\n".join(lines)


def integrations(root: Path) -> dict[Path, str]:
    """What docs/integrations.md must be."""
    page = root / "docs" / "integrations.md"
    record = json.loads((root / "docs" / "integrations.json").read_text())
    marks = "<!-- table: begin -->", "<!-- table: end -->"
    return {page: between(page.read_text(), *marks, f"\n\n{integrations_table(record)}\n\n", page)}


TABLES = {
    "options": options,
    "errors": errors,
    "which-split": which_split,
    "integrations": integrations,
}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if unknown := set(sys.argv[1:]) - set(TABLES):
        raise SystemExit(f"no table is named {', '.join(unknown)}: use {', '.join(TABLES)}")
    for name in sys.argv[1:] or TABLES:
        write(TABLES[name](ROOT))
