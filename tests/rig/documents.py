"""The documents as tests see them: their code blocks, and pycomm as a reader has it, installed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

from processes import child_environment

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TABLE_ROW = re.compile(r"^\|(.+)\|$", re.MULTILINE)


def read(name: str) -> str:
    """A document by its path within the project."""
    return (ROOT / name).read_text()


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [body for tongue, body in _FENCE.findall(text) if tongue == language]


def table(text: str, *header: str) -> list[list[str]]:
    """The rows, as cells without surrounding spaces, of the one table with this header."""
    line = re.escape("| " + " | ".join(header) + " |")
    found = re.findall(rf"^{line}\n\|[-|: ]+\|\n((?:\|.*\|\n?)+)", text, re.MULTILINE)
    assert len(found) == 1, f"{len(found)} tables with the header {header}"
    rows = _TABLE_ROW.findall(str(found[0]))
    return [[cell.strip() for cell in row.split("|")] for row in rows]


def code(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def installed_environment(folder: Path) -> dict[str, str]:
    """For children: pycomm counts as installed, so torch finds the backend by itself.

    Where it is not, a made-up distribution in ``folder`` has the entry points that pyproject.toml
    gives it.
    """
    env = child_environment()
    if not importlib.metadata.entry_points(group="torch.backends", name="pycomm"):
        lines = re.findall(
            r'^\[project\.entry-points\."(.+)"\]\n(pycomm) = "(.+)"$',
            read("pyproject.toml"),
            re.MULTILINE,
        )
        assert lines, "pyproject.toml has no entry points"
        metadata = folder / "torch_pycomm-0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: torch-pycomm\nVersion: 0\n"
        )
        (metadata / "entry_points.txt").write_text(
            "".join(f"[{group}]\n{name} = {target}\n" for group, name, target in lines)
        )
        env["PYTHONPATH"] = os.pathsep.join([str(folder), env["PYTHONPATH"]])
    return env


def run_by_torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of the folder as a user does who has installed pycomm; it has to succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        cwd=folder,
        env=installed_environment(folder / "installed"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
