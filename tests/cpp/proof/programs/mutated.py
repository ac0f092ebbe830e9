"""A copy of the sources in which one line is broken: mutations.py, mutated_tests.py."""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

ROOT = Path(__file__).resolve().parents[4]


class Change(Protocol):
    """One line of a file under csrc."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...


SomeChange = TypeVar("SomeChange", bound=Change)


def path_of(folder: Path, change: Change) -> Path:
    """The file, which lies in `folder` or a subfolder."""
    (path,) = folder.rglob(change.file)
    return path


def misplaced(tree: Path, under: Path, changes: Sequence[Change]) -> list[str]:
    """Those that do not apply to this tree, in words; their files are in its folder `under`."""
    found = []
    for change in changes:
        path = path_of(tree / under, change)
        count = path.read_text().count(change.old)
        if count != 1:
            place = path.relative_to(tree)
            found.append(f"{change.name}: its text stands {count} times in {place}, not once")
    return found


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--work", type=Path, help="scratch folder; made and removed if not given")
    made.add_argument("--only", nargs="*", default=[], help="parts of mutations' names")
    made.add_argument("--check", action="store_true", help="only whether each still applies")
    return made


def chosen(changes: Sequence[SomeChange], only: Sequence[str]) -> list[SomeChange]:
    """Those whose names have one of the parts."""
    return [each for each in changes if not only or any(part in each.name for part in only)]


def _copy_if_other(source: str, target: str) -> None:
    # Not the file's time: a scratch folder that is used again holds objects of mutations.
    if not os.path.exists(target) or not filecmp.cmp(source, target, shallow=False):
        shutil.copy(source, target)


def copy_folder(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=_copy_if_other, dirs_exist_ok=True)


def copy_sources(copy: Path) -> None:
    for part in ("csrc", "cmake", "tests/cpp"):
        copy_folder(ROOT / part, copy / part)
    _copy_if_other(str(ROOT / "CMakeLists.txt"), str(copy / "CMakeLists.txt"))


def build(copy: Path, folder: Path, target: str, arguments: Sequence[str] = ()) -> Path | None:
    """Build a program of `copy`: its path, or None if it does not compile."""
    if not (folder / "build.ninja").exists():
        configure = ["cmake", "-S", str(copy), "-B", str(folder), "-G", "Ninja"]
        configure += [
            "-DPYCOMM_TESTS=ON",
            "-DPYCOMM_FAULT_POINTS=ON",
            *arguments,
        ]  # as tools/cpp.py
        if shutil.which("ccache"):
            configure += ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    make = ["ninja", "-C", str(folder), "-j2", target]
    done = subprocess.run(make, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout[-2000:], file=sys.stderr)
        return None
    return folder / "tests" / "cpp" / target


@contextlib.contextmanager
def broken(file: Path, change: Change) -> Iterator[None]:
    source = file.read_text()
    file.write_text(source.replace(change.old, change.new))
    try:
        yield
    finally:
        file.write_text(source)
