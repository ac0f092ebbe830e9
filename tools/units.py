"""What the compiler is given of the folders that include torch: a few large files, or every file.

Parsing torch's headers takes 10 to 18 of the 15 to 28 seconds that such a file takes to compile, so
each folder becomes one unit that includes all its files: 81 CPU seconds instead of 399.
PYCOMM_UNITY=0 compiles every file by itself, which rebuilds one changed file faster and shows a
missing include.
"""

from __future__ import annotations

import os
from pathlib import Path


def folders(root: Path, *kinds: str) -> list[Path]:
    """The folders of csrc/floors.txt that are of these kinds, lowest floor first."""
    lines = (root / "csrc" / "floors.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return [root / "csrc" / folder for _, folder, kind in rows if kind in kinds]


def sources(root: Path, *kinds: str) -> list[Path]:
    """Every .cc file of those folders, in a fixed order."""
    return [path for folder in folders(root, *kinds) for path in sorted(folder.rglob("*.cc"))]


def wanted() -> bool:
    """Whether whole folders are compiled at once: PYCOMM_UNITY is not "0"."""
    value = os.environ.get("PYCOMM_UNITY", "").strip() or "1"
    if value not in ("0", "1"):
        raise SystemExit(f"PYCOMM_UNITY={value!r} is not allowed: use '0' or '1'")
    return value == "1"


def torch_units(root: Path) -> list[Path]:
    """What to compile of the folders that include torch. Units are written under build/units."""
    if not wanted():
        return sources(root, "torch")
    units = []
    for folder in folders(root, "torch"):
        names = [path.relative_to(root / "csrc") for path in sorted(folder.rglob("*.cc"))]
        text = "".join(f'#include "{name}"\n' for name in names)
        unit = root / "build" / "units" / f"{folder.name}.cc"
        unit.parent.mkdir(parents=True, exist_ok=True)
        if not unit.exists() or unit.read_text(encoding="utf-8") != text:
            unit.write_text(text, encoding="utf-8")
        units.append(unit)
    return units
