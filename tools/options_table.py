#!/usr/bin/env python3
"""Write what pycomm/_settings.py says of each option into docs/options.md and Options' docstring.

    python tools/options_table.py

Needs the standard library only. A test fails where one of the two says something else.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
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


def table(settings: ModuleType) -> str:
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


def between(text: str, begin: str, end: str, new: str, where: Path) -> str:
    """``text`` with ``new`` between the first ``begin`` and the first ``end`` behind it."""
    head, found, rest = text.partition(begin)
    _, also, tail = rest.partition(end)
    if not found or not also:
        raise ValueError(f"{where} lacks its marks {begin!r} and {end!r}")
    return f"{head}{begin}{new}{end}{tail}"


def written(root: Path) -> dict[Path, str]:
    """What each of the two files must be."""
    settings = settings_of(root)
    page, source = root / "docs" / "options.md", root / "pycomm" / "options.py"
    return {
        page: between(page.read_text(), BEGIN, END, f"\n\n{table(settings)}\n\n", page),
        source: between(source.read_text(), ARGS, RAISES, arguments(settings), source),
    }


def write(files: Mapping[Path, str]) -> None:
    """Writes those that differ, and prints their names."""
    for path, text in files.items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    write(written(ROOT))
