"""A copy of the sources in which one line is broken, and what a program of mutations prints.

Each program has a list of mutations; `main()` does what its command line asks for. Programs may run
at the same time if each has a scratch folder of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import filecmp
import io
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO, TypeVar

ROOT = Path(__file__).resolve().parents[4]


class Change(Protocol):
    """One line of a file."""

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


# --- what a program does and prints ---------------------------------------------------------------


class Verdict(NamedTuple):
    """Of one mutation."""

    row: str
    """Of the table."""
    complaint: str = ""
    """Why it is not as expected."""
    noticed: bool = True


@dataclasses.dataclass
class Tally:
    """What came of the mutations so far."""

    noticed: set[str] = dataclasses.field(default_factory=set)
    wrong: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, change: Change, verdict: Verdict) -> None:
        """Prints its row."""
        print(verdict.row, flush=True)
        if verdict.complaint:
            self.wrong.append(f"{change.name}: {verdict.complaint}")
        if verdict.noticed:
            self.noticed.add(change.name)


def parser(about: str) -> argparse.ArgumentParser:
    """`about`: the program's docstring, whose first line says what it is for."""
    made = argparse.ArgumentParser(description=about.splitlines()[0] if about else None)
    made.add_argument("--work", type=Path, help="scratch folder; made and removed if not given")
    made.add_argument("--only", nargs="*", default=[], help="parts of mutations' names")
    made.add_argument("--check", action="store_true", help="only whether each still applies")
    made.add_argument("--out", type=Path, help="write what it prints to this file as well")
    return made


def chosen(changes: Sequence[SomeChange], only: Sequence[str]) -> list[SomeChange]:
    """Those whose names have one of the parts."""
    return [each for each in changes if not only or any(part in each.name for part in only)]


class _Both(io.TextIOBase):
    """Writes to two streams."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()


def _command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Without its scratch folder and the file that it writes."""
    words = ["python", f"tests/cpp/proof/programs/{Path(sys.argv[0]).name}"]
    for name, value in vars(options).items():
        if name not in ("work", "out") and value != parser.get_default(name):
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def _commit() -> str:
    sys.path.append(str(ROOT / "tools"))
    import native

    return native.git_commit(ROOT) or "unknown"


def _header(command: str) -> str:
    lines = {
        "command": command,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_at_start": f"{os.getloadavg()[0]:.2f}",
    }
    return "".join(f"# {name:<14} {value}\n" for name, value in lines.items())


def main(
    parser: argparse.ArgumentParser,
    changes: Sequence[SomeChange],
    misplaced: Callable[[Path], list[str]],
    attempt: Callable[[Path, Sequence[SomeChange], argparse.Namespace], Tally],
) -> int:
    """What the command line asks for. The last line counts the mutations that were noticed.

    Args:
        parser: Of `parser()`, with more options.
        changes: All mutations.
        misplaced: Those that do not apply to a tree, in words.
        attempt: Tries some mutations in a scratch folder, and prints a table.
    """
    options = parser.parse_args()
    wrong = misplaced(ROOT)
    if wrong or options.check:
        print("\n".join(wrong) or f"all {len(changes)} mutations apply")
        return 1 if wrong else 0
    tried = chosen(changes, options.only)
    if not tried:
        parser.error(f"no mutation has {' or '.join(map(repr, options.only))} in its name")
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        if options.out:
            out = stack.enter_context(options.out.open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(_Both(sys.stdout, out)))
        print(_header(_command(parser, options)), flush=True)
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="pycomm-mutations-"))
        tally = attempt((options.work or Path(scratch)).resolve(), tried, options)
        print("\n".join(["", *tally.wrong, *tally.notes]))
        print(f"# {'minutes':<14} {(time.monotonic() - began_s) / 60:.0f}")
        print(
            f"{len(tally.noticed)} of {len(tried)} mutations noticed, "
            f"{len(tally.wrong)} not as expected"
        )
    return 1 if tally.wrong else 0


# --- the copy -------------------------------------------------------------------------------------


def _copy_if_other(source: str, target: str) -> None:
    # With its time where there is none, so that objects that were copied too are not older. A
    # scratch folder that is used again holds objects of mutations, which have to be.
    if not os.path.exists(target):
        shutil.copy2(source, target)
    elif not filecmp.cmp(source, target, shallow=False):
        shutil.copy(source, target)


def copy_folder(source: Path, target: Path) -> None:
    """Makes `target` a copy, and leaves nothing else there."""
    for path in sorted(target.rglob("*"), reverse=True):
        if not path.is_dir() and not (source / path.relative_to(target)).exists():
            path.unlink()
    shutil.copytree(source, target, copy_function=_copy_if_other, dirs_exist_ok=True)


def copy_parts(copy: Path, parts: Sequence[str]) -> None:
    """Folders and files of the repository."""
    for part in parts:
        if (ROOT / part).is_dir():
            copy_folder(ROOT / part, copy / part)
        else:
            _copy_if_other(str(ROOT / part), str(copy / part))


def copy_sources(copy: Path) -> None:
    copy_parts(copy, ("csrc", "cmake", "tests/cpp", "CMakeLists.txt"))


class Objects:
    """Folders with what is built, as they are without a mutation.

    What a mutation changes there is put back, so that nothing is compiled again for its end.
    """

    def __init__(self, copy: Path, *folders: str) -> None:
        self._pairs = [(copy / folder, copy / "unbroken" / folder) for folder in folders]

    def keep(self) -> None:
        for folder, kept in self._pairs:
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept)

    def put_back(self) -> None:
        for folder, kept in self._pairs:
            for file in kept.rglob("*"):
                now = folder / file.relative_to(kept)
                if file.is_file() and (not now.exists() or _time_of(now) != _time_of(file)):
                    shutil.copy2(file, now)


def _time_of(file: Path) -> int:
    return file.stat().st_mtime_ns


@contextlib.contextmanager
def broken(file: Path, change: Change, objects: Objects | None = None) -> Iterator[None]:
    """In the block the file is broken. `objects` were kept before."""
    source, before = file.read_text(), file.stat()
    file.write_text(source.replace(change.old, change.new))
    try:
        yield
    finally:
        file.write_text(source)
        if objects is not None:
            objects.put_back()
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # older than its objects


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
