"""What this machine has, lacks and can spare: compiler, headers, CMake, GoogleTest, memory."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MINIMUM_PYTHON = (3, 10)
MINIMUM_CMAKE = (3, 21)
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
GOOGLETEST_SOURCES = Path("/usr/src/googletest/CMakeLists.txt")  # of Debian's package googletest
PYPI_CMAKE = "4.4.4"  # used where the system has none, or an older one


class Lack(NamedTuple):
    """Something missing, and the packages that bring it."""

    what: str
    debian: str
    fedora: str


PYTHON_LACK = Lack(
    f"Python {MINIMUM_PYTHON[0]}.{MINIMUM_PYTHON[1]} or newer", "python3", "python3.12"
)
VENV_LACK = Lack("Python's venv module", f"python{VERSION}-venv", "python3")
COMPILER_LACK = Lack(
    "a C++20 compiler (GCC 11 or newer, or clang 14 or newer; if yours is older, install a newer "
    "one and set CXX)",
    "g++",
    "gcc-c++",
)
HEADERS_LACK = Lack("Python's C headers", f"python{VERSION}-dev", "python3-devel")

# GCC 10 has these headers, too, but cannot compile pycomm. clang defines __GNUC__ as 4.
COMPILER_PROBE = """\
#if defined(__clang__) ? __clang_major__ < 14 : __GNUC__ < 11
#error "too old"
#endif
#include <span>
#include <bit>
"""


def succeeds(
    *command: str | Path,
    source: str | None = None,
    timeout: float = 60,
    cwd: str | Path | None = None,
) -> bool:
    """True if the command ran, within `timeout` seconds, and returned 0. Its output is dropped."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            input=source,
            stdin=subprocess.DEVNULL if source is None else None,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=timeout,
            cwd=cwd,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def memory_gib() -> float:
    """The memory this process may use: the machine's, or its control group's limit if lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total / 2**30


def jobs(gib_each: float, waiting: int = 0) -> int:
    """How many compilers to run at once: one a core, as long as each has `gib_each` of memory.

    ``waiting``: so many more of programs that mostly wait.
    """
    return max(1, min(len(os.sched_getaffinity(0)) + waiting, int(memory_gib() / gib_each)))


def compiler() -> str | None:
    """$CXX, else the first of c++, g++, clang++ that compiles C++20, as torch's headers need."""
    named = os.environ.get("CXX")
    for candidate in [named] if named else ["c++", "g++", "clang++"]:
        flags = ["-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
        if succeeds(*candidate.split(), *flags, source=COMPILER_PROBE):
            return candidate
    return None


def includes(header: str, *folders: Path) -> bool:
    """True if the compiler finds this header."""
    flags = [f"-I{folder}" for folder in folders]
    return succeeds(
        *(compiler() or "c++").split(),
        *flags,
        "-E",
        "-x",
        "c++",
        "-",
        source=f"#include <{header}>\n",
    )


def unpack_debian(packages: Sequence[str], folder: Path) -> bool:
    """Fetches packages of Debian or Ubuntu and unpacks them into a folder.

    Unlike installing them, that needs no root and changes nothing else. False if this is another
    system, or if the packages cannot be fetched.
    """
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return False
    print(f"fetching {' and '.join(packages)}, and unpacking under {folder}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    # apt's own processes may still write there after the signal to end.
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
        # A fresh image has no lists of packages. These are fetched for this one use.
        lists = Path(scratch) / "lists"
        (lists / "partial").mkdir(parents=True)
        own = ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={scratch}"]
        own += ["-o", "APT::Sandbox::User=root"]
        fetched = succeeds("apt-get", "-q", "download", *packages, timeout=120, cwd=scratch) or (
            succeeds("apt-get", "-q", *own, "update", timeout=120)
            and succeeds("apt-get", "-q", *own, "download", *packages, timeout=120, cwd=scratch)
        )
        if not fetched:
            print("they could not be fetched: is the network there, and a proxy set if needed?")
        files = sorted(Path(scratch).glob("*.deb"))
        part = Path(scratch) / "part"
        if not (fetched and all(succeeds("dpkg-deb", "-x", file, part) for file in files)):
            return False
        shutil.rmtree(folder / "usr", ignore_errors=True)
        (part / "usr").rename(folder / "usr")  # whole, or not at all
        return True


def unpacked_headers(folder: Path) -> list[Path]:
    """The folders to search where Debian's package of Python.h was unpacked; empty if not there."""
    include = folder / "usr" / "include"
    found = include / f"python{VERSION}"
    return [found, include] if (found / "Python.h").is_file() else []


def has_headers(unpacked: Path) -> bool:
    """Whether Python.h is there: the interpreter's own, or in its package, unpacked."""
    own = Path(sysconfig.get_paths()["include"])
    return (own / "Python.h").is_file() or bool(unpacked_headers(unpacked))


def find_headers(unpacked: Path) -> list[Path] | None:
    """Have Python.h: the interpreter's own, or its distribution's package, unpacked.

    Returns the folders to search besides the interpreter's own, most often none; None if there is
    no Python.h.
    """
    own = Path(sysconfig.get_paths()["include"])
    if (own / "Python.h").is_file():
        return []
    if not str(own).startswith("/usr/include/"):
        return None  # an interpreter that no distribution's package belongs to
    if not unpacked_headers(unpacked):
        unpack_debian([f"libpython{VERSION}-dev"], unpacked)
    return unpacked_headers(unpacked) or None


def lacks(headers: Path) -> list[Lack]:
    """Everything that building pycomm needs and this machine has not."""
    if sys.version_info < MINIMUM_PYTHON:
        return [PYTHON_LACK]
    found = []
    # Debian splits ensurepip off, without which venv makes an environment that has no pip.
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        found.append(VENV_LACK)
    if compiler() is None:
        found.append(COMPILER_LACK)
    elif find_headers(headers) is None:
        found.append(HEADERS_LACK)
    return found


def sentence(missing: list[Lack]) -> str:
    """One line that names what is missing and the command that installs it."""
    what = " and ".join(lack.what for lack in missing)
    debian = " ".join(lack.debian for lack in missing)
    fedora = " ".join(lack.fedora for lack in missing)
    debian_line = f"Debian, Ubuntu: sudo apt-get install {debian}"
    return f"pycomm needs {what}. {debian_line}   Fedora: sudo dnf install {fedora}"


def require(headers: Path) -> None:
    """End the program with one line if something is missing."""
    if sys.platform != "linux":
        raise SystemExit(f"pycomm runs on Linux only, and this is {sys.platform}")
    missing = lacks(headers)
    if missing:
        raise SystemExit(sentence(missing))


def system_cmake() -> bool:
    """True if the system has a CMake that is new enough."""
    path = shutil.which("cmake", path=os.environ.get("PATH", os.defpath))
    if path is None:
        return False
    output = subprocess.run(
        [path, "--version"], capture_output=True, text=True, check=False
    ).stdout.split()
    try:
        return tuple(int(part) for part in output[2].split(".")[:2]) >= MINIMUM_CMAKE
    except (LookupError, ValueError):
        return False


def drop_moved_build(folder: Path, root: Path) -> None:
    """Deletes a build folder that CMake made for another checkout: it was copied with this one.

    CMake refuses to configure such a folder.
    """
    try:
        cache = (folder / "CMakeCache.txt").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    source = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.+)$", cache, re.MULTILINE)
    if source is None or same_folder(Path(source[1]), root):
        return
    print(f"{folder} was made for {source[1]}: deleting it", flush=True)
    shutil.rmtree(folder)


def same_folder(one: Path, other: Path) -> bool:
    """Whether both names lead to the same folder. False if one does not exist."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def find_googletest(unpacked: Path) -> list[str] | None:
    """Have GoogleTest: the system's, else Debian's packages, unpacked.

    Returns the arguments for CMake; None if there is neither, so that CMake downloads the sources.
    """
    if includes("gmock/gmock.h") or GOOGLETEST_SOURCES.is_file():
        return []  # cmake/GoogleTest.cmake finds either
    prefix = unpacked / "usr"
    there = (prefix / "include" / "gmock").is_dir()
    # Without a network each attempt takes minutes, so it is made once a day.
    failed = unpacked / "failed"
    if not there and not (failed.is_file() and time.time() - failed.stat().st_mtime < 86400):
        there = unpack_debian(["libgtest-dev", "libgmock-dev"], unpacked)
        if not there:
            unpacked.mkdir(parents=True, exist_ok=True)
            failed.touch()
    return [f"-DCMAKE_PREFIX_PATH={prefix}"] if there else None
