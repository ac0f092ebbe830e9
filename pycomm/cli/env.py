"""``python -m pycomm env``: installed versions, settings and their sources, and problems."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import _pycomm_autoload
from pycomm import errors
from pycomm._group import secrets
from pycomm._native import loader
from pycomm._settings import SETTINGS, is_misspelled, unknown_variables, variable_error
from pycomm._version import __version__
from pycomm.options import Options, fault_points

_DISTRIBUTION = "torch-pycomm"


@dataclasses.dataclass(frozen=True)
class Report:
    """All that the command prints."""

    versions: Mapping[str, str]
    interfaces: Sequence[Mapping[str, Any]]
    options: Sequence[Mapping[str, Any]]
    secret: Mapping[str, str]
    """Whether this host has a secret: "state" is "configured", "none" or "cannot be used". One that
    is configured also has its public "key_id" and its "origin". The secret itself is never here."""
    problems: Sequence[str]
    notes: Sequence[str]
    """What a user may want to know, and no job fails of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command; ``pycomm.cli`` has made its parser."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; 1 if it has problems."""
    report = collect(os.environ)
    print(json.dumps(dataclasses.asdict(report), indent=2) if arguments.json else as_text(report))
    return 1 if report.problems else 0


def collect(environ: Mapping[str, str]) -> Report:
    """Gathers the report. Problems are part of the report: it never raises for them."""
    problems = [*_registration_problems(), *_name_clashes()]
    library = loader.CUDA_LIBRARY
    versions = {
        "pycomm": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "built for torch": ", ".join(loader.built_for()) or "not built",
        library.name: "built" if library.exists() else "not built: CPU tensors only",
        "numpy": _version_of("numpy"),
        "platform": platform.platform(),
    }
    interfaces: list[Mapping[str, Any]] = []
    try:
        extension = loader.native
        versions |= {"simd": extension.simd_level(), **extension.build_info()}
        interfaces = [dict(interface) for interface in extension.list_interfaces()]
    except errors.TorchVersionError as error:
        problems.append(str(error))
    options, wrong = _options(environ)
    secret, unusable = secrets.state(environ)
    problems += [*wrong, *unusable, *_other_problems(environ, any_wrong=bool(wrong))]
    unlike = [each for each in unknown_variables(environ) if not is_misspelled(each)]
    notes = [variable_error(each) for each in unlike]
    return Report(versions, interfaces, options, secret, problems, notes)


def as_text(report: Report) -> str:
    """The report for a terminal."""
    parts = [
        _table("", [(name, value) for name, value in report.versions.items()]),
        _table(
            "interfaces",
            [
                (row["name"], row["address"], "loopback" if row["loopback"] else "")
                for row in report.interfaces
            ],
        ),
        _table(
            "options",
            [(row["option"], _shown(row["value"]), row["origin"]) for row in report.options],
        ),
        _table("secret", [_secret_row(**report.secret)]),
        _table("problems", [(problem,) for problem in report.problems]),
        _table("notes", [(note,) for note in report.notes]),
    ]
    return "\n\n".join(part for part in parts if part)


def _secret_row(state: str, key_id: str = "", origin: str = "") -> tuple[str, ...]:
    return (state, f"key id {key_id}", origin) if key_id else (state,)


def _shown(value: object) -> str:
    return "automatic" if value in ("", (0, 0)) else str(value)


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([title + ":", *("  " + line for line in lines)] if title else lines)


def _options(environ: Mapping[str, str]) -> tuple[list[dict[str, Any]], list[str]]:
    rows: list[dict[str, Any]] = []
    unknown = unknown_variables(environ)
    problems = [variable_error(name) for name in unknown if is_misspelled(name)]
    for setting in SETTINGS:
        value: object = None
        try:
            value, origin = Options().find(setting, environ)
        except ValueError as error:
            problems.append(str(error))
            origin = "not allowed"
        rows.append(
            {
                "option": setting.field,
                "value": value,
                "origin": origin,
                "variable": setting.variable,
            }
        )
    return rows, problems


def _other_problems(environ: Mapping[str, str], *, any_wrong: bool) -> list[str]:
    """What else init_process_group() would raise for these variables."""
    problems = []
    if not any_wrong:  # settings that are good one by one may not go together
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of unlike names, which are notes here
                Options().resolve(environ)
        except ValueError as error:
            problems.append(str(error))
    try:
        if spec := fault_points():
            loader.native.arm_fault_points(spec)
    except (ValueError, errors.PycommError) as error:
        problems.append(str(error))
    return problems


def _registration_problems() -> list[str]:
    problems = []
    if _pycomm_autoload.failure is not None:
        problems.append(f"torch could not register the backend: {_pycomm_autoload.failure!r}")
    group = importlib.metadata.entry_points(group="torch.backends", name="pycomm")
    if not list(group):
        problems.append(
            "torch does not find the backend by itself, as pycomm is not installed: "
            "import pycomm before init_process_group"
        )
    return problems


def _name_clashes() -> list[str]:
    """Another distribution, a driver for industrial controllers, has a package of the same name."""
    owners = set(importlib.metadata.packages_distributions().get("pycomm", []))
    return [
        f"the distribution {owner!r} has a package named pycomm, too. "
        f"Try: pip uninstall {owner}, then install {_DISTRIBUTION} again"
        for owner in sorted(owners - {_DISTRIBUTION})
    ]


def _version_of(module: str) -> str:
    try:
        return str(importlib.import_module(module).__version__)
    except ImportError:
        return "not installed"
