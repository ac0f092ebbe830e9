#!/usr/bin/env python3
"""Make .venv with pinned packages and the extension built in place; do only what is not done yet.

    python3 tools/bootstrap.py [--group demo|test|lint|docs|integrations ...]
        [--no-build | --no-torch]

Needs the standard library only. If something is missing, one line says what to install. CUDA builds
of torch are never downloaded: the version asked for is `+cpu`, unless the machine's own wheels
already provide the plain one. While pip installs torch, the part of the extension that includes no
torch compiles.

PYCOMM_TORCH=2.14.1 (`make venv TORCH=2.14.1`) installs that release of torch. Later runs keep it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import machine
import native

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "pycomm-stamps"
REQUIREMENTS = ROOT / "tools" / "requirements"

GROUPS = ["demo", "test", "lint", "integrations", "docs", "wheel"]
TORCH = native.torch_range(ROOT).TESTED
NEWEST_TORCH = native.torch_range(ROOT).newest()
ASKED_TORCH = "PYCOMM_TORCH"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]
MINIMUM_PIP = (23, 2)  # the first whose --dry-run reports what it would take without fetching it
SWITCHED = "PYCOMM_BOOTSTRAP_SWITCHED"  # set after continuing with .venv's Python

# The extension and libpycomm_cuda.so are built again if one of these changes.
SOURCES = (".cc", ".cu", ".cuh", ".h", ".map", ".txt")
BUILD_TOOLS = ("cuda_library.py", "native.py")
BUILD_VARIABLES = ("CFLAGS", "CPPFLAGS", "CXX", "CXXFLAGS", "LDFLAGS", "PYCOMM_BUILD_CUDA")


def say(text: str) -> None:
    print(f"[bootstrap] {text}", flush=True)


def run(*command: str | Path) -> None:
    """Run a command to its end; on failure, end with its exit status and one line that names it."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT, check=False)
    if done.returncode != 0:
        line = " ".join(str(part) for part in command)
        print(f"[bootstrap] failed (exit {done.returncode}): {line}", file=sys.stderr)
        raise SystemExit(1)


def pip(*arguments: str | Path) -> None:
    # Compiling what is never imported would take longer than the rest of torch's installation.
    run(*PIP, "install", "-qq", "--no-compile", *arguments)


def digest(paths: Iterable[Path], *extra: str) -> str:
    """A hash of the files' names and contents, and of `extra`."""
    total = hashlib.sha256("\0".join((sys.version, str(ROOT), *extra)).encode())
    for path in sorted(paths):
        total.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


class Stamp:
    """Remembers in .venv that a step was done for exactly these inputs."""

    def __init__(self, name: str, value: str) -> None:
        self._path = STAMPS / name
        self._value = value

    def fresh(self) -> bool:
        return self._path.is_file() and self._path.read_text() == self._value

    def write(self) -> None:
        STAMPS.mkdir(exist_ok=True)
        self._path.write_text(self._value)


def pip_version() -> tuple[int, ...] | None:
    """The version of pip in .venv; None where none works, as after an interrupted first run."""
    code = "import pip; print('.'.join(pip.__version__.split('.')[:2]))"
    try:
        done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return tuple(int(part) for part in done.stdout.split("."))


def former_place() -> str:
    """The folder that .venv's scripts name, if it is not .venv; else empty.

    A copied or moved .venv has such scripts. Its interpreter and pip work all the same.
    """
    try:
        text = (VENV / "bin" / "activate").read_text()
    except OSError:
        return ""
    for value in re.findall(r"^\s*(?:export )?VIRTUAL_ENV=(.+)$", text, re.MULTILINE):
        if "$" not in value:  # else the script computes it
            named = shlex.split(value)[0]
            return "" if machine.same_folder(Path(named), VENV) else named
    return ""


def make_venv() -> None:
    former = former_place()
    if former:
        if VENV.is_symlink():
            # Never clear a folder outside of this checkout.
            raise SystemExit(
                f"[bootstrap] {VENV.name} is a link to {VENV.resolve()}, whose scripts name "
                f"{former}. Try: rm {VENV.name}"
            )
        say(f"{VENV.name} was made as {former}, which its scripts still name: making it again")
    version = None if former else pip_version()
    if version is None:
        say(f"making {VENV.name} with Python {sys.version.split()[0]} ({sys.executable})")
        run(sys.executable, "-m", "venv", "--clear", VENV)
        version = pip_version()
    if version is None or version < MINIMUM_PIP:
        pip("--upgrade", "pip>=23.2,<27")


def use_venvs_python() -> None:
    """Begins again with .venv's Python if this one has another version.

    The choice of torch and of Python's headers depends on the version.
    """
    code = "import sys; print(*sys.version_info[:2])"
    asked = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    major, minor = map(int, asked.stdout.split())
    if (major, minor) == sys.version_info[:2]:
        return
    line = f"{VENV.name} has Python {major}.{minor}; delete {VENV.name} to use {machine.VERSION}"
    if (major, minor) < machine.MINIMUM_PYTHON or SWITCHED in os.environ:
        raise SystemExit(f"[bootstrap] {line}")
    say(line)
    command = [str(PYTHON), str(Path(__file__).resolve()), *sys.argv[1:]]
    os.execve(PYTHON, command, os.environ | {SWITCHED: "1"})


def would_take(*requirement: str) -> dict[str, Any] | None:
    """What pip, as this machine has it configured, would install; None where it finds nothing."""
    command = [*PIP, "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
    command += ["--only-binary", ":all:", "--report", "-", *requirement]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        chosen: dict[str, Any] = json.loads(done.stdout)["install"][0]
    except (ValueError, LookupError):
        return None
    return chosen


def torch_versions() -> list[str]:
    """The versions of torch that pip, as this machine has it configured, finds; newest first."""
    command = [*PIP, "index", "versions", "torch"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return found[1].split(", ") if found else []


def asked_torch() -> str:
    """The release of torch that PYCOMM_TORCH names now or named in an earlier run; else empty."""
    asked = os.environ.get(ASKED_TORCH, "").strip()
    if asked:
        if not can_be_asked(asked):
            first, last = native.torch_range(ROOT).SUPPORTED[0], NEWEST_TORCH.rpartition(".")[0]
            raise SystemExit(
                f"[bootstrap] TORCH={asked} is not a release of torch {first} to {last}, which "
                f"pycomm supports with Python {machine.VERSION}. Try: TORCH={TORCH}"
            )
        return asked
    noted = STAMPS / "torch"
    kept = noted.read_text() if noted.is_file() else ""
    if not can_be_asked(kept):
        return ""
    say(f"keeping torch {kept}, which an earlier TORCH={kept} chose; TORCH=... chooses another")
    return kept


def can_be_asked(release: str) -> bool:
    """Whether this is the number of a supported release that this Python may have wheels of."""
    versions = native.torch_range(ROOT)
    minors = versions.SUPPORTED[: versions.SUPPORTED.index(versions.torch_minor(NEWEST_TORCH)) + 1]
    return bool(re.fullmatch(r"\d+\.\d+\.\d+", release)) and (
        versions.torch_minor(release) in minors
    )


def torch_arguments(release: str = "") -> list[str]:
    """pip's arguments for the CPU build of torch: the machine's own wheel, else torch's index.

    Without `release`: that of CI, else any supported release that the machine has a wheel of.
    """
    versions = native.torch_range(ROOT)
    wanted = release or TORCH
    for version in sorted(torch_versions(), key=lambda each: not each.startswith(f"{wanted}+")):
        number, _, build = version.partition("+")
        fits = number == release if release else not versions.why_unsupported(version)
        if build == "cpu" and fits:
            return [f"torch=={version}"]
    plain = would_take(f"torch=={wanted}")
    source = plain["download_info"] if plain else None
    if isinstance(source, dict) and str(source.get("url", "")).startswith("file:"):
        return [f"torch=={wanted}"]
    return [f"torch=={wanted}+cpu", "--extra-index-url", TORCH_INDEX]


def with_tools() -> dict[str, str]:
    """The environment, and .venv/bin before everything in PATH: ninja is there."""
    return os.environ | {"PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def compile_core() -> subprocess.Popen[bytes]:
    """Begins to compile what needs no torch, while torch is downloaded."""
    say("compiling the core meanwhile")
    quiet = subprocess.DEVNULL
    command = [str(PYTHON), str(ROOT / "tools" / "native.py"), "core"]
    return subprocess.Popen(
        command, cwd=ROOT, env=with_tools(), stdin=quiet, stdout=quiet, stderr=quiet
    )


def install(groups: list[str], build: bool) -> None:
    # Each group's file may include others, so the content of all of them decides.
    files = list(REQUIREMENTS.glob("*.txt"))
    release = asked_torch()
    # Without being asked, another release may have been installed than that of CI.
    torch = f"=={release}" if release else TORCH
    core = None
    try:
        for group in ["build", *groups]:
            stamp = Stamp(group, digest(files, group, torch))
            if stamp.fresh():
                continue
            say(f"installing tools/requirements/{group}.txt")
            pip("-r", REQUIREMENTS / f"{group}.txt")
            if group == "build":
                core = compile_core() if build else None
                chosen = torch_arguments(release)
                is_cpu = chosen[0].endswith("+cpu")
                size = "200 MB" if is_cpu else "with its CUDA packages, several GB"
                say(f"installing {chosen[0]} ({size})")
                pip(*chosen)
                if release:
                    Stamp("torch", release).write()
            stamp.write()
        if core:
            core.wait()  # an error comes again, with its text, when the extension is built
    finally:
        if core:
            core.terminate()


def install_cmake() -> None:
    """Put CMake into .venv where the system has none that is new enough."""
    if not machine.system_cmake() and not (VENV / "bin" / "cmake").exists():
        say(f"installing CMake {machine.PYPI_CMAKE} into {VENV.name}")
        pip(f"cmake=={machine.PYPI_CMAKE}")


def compile_in_place() -> None:
    """Run setup.py; show each file as it is compiled, and everything else only where it failed."""
    machine.find_headers(native.HEADERS)  # again, if build/ was removed since the first time
    env = with_tools()
    command = [str(PYTHON), "setup.py", "build_ext", "--inplace"]
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = []
    for line in child.stdout or []:
        lines.append(line)
        step = re.match(r"\[(\d+/\d+)\] (?:csrc|build/units)/(\S+)\.cc$", line)
        if step:
            say(f"compiled {step[1]}: {step[2]}")
        elif line.startswith("pycomm: "):  # setup.py's own lines
            say(line.strip())
    if child.wait() != 0:
        # What the compiler said, without how setuptools and torch came to call it.
        ends = [number for number, line in enumerate(lines) if line.startswith("Traceback ")]
        end = ends[0] if ends else len(lines)
        sys.stderr.writelines(lines[max(0, end - 100) : end] or lines)
        raise SystemExit(f"[bootstrap] the extension did not compile: {' '.join(command)}")


def installed_torch() -> str:
    """The name of torch's metadata in .venv, which has its version; empty if there is none."""
    return next(
        (path.name for path in VENV.glob("lib/python*/site-packages/torch-*.dist-info")), ""
    )


def extension_digest(metadata: str) -> str:
    """A hash of everything that the extension and libpycomm_cuda.so are built from and with."""
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in SOURCES]
    sources += (ROOT / "cmake").glob("*.cmake")
    sources += [ROOT / "tools" / name for name in BUILD_TOOLS]
    sources += [ROOT / "CMakeLists.txt", ROOT / "pycomm" / "_torch_range.py"]
    variables = [f"{name}={os.environ.get(name, '')}" for name in BUILD_VARIABLES]
    # Objects of the other way to compile stay; tools/fault_build.py links those of today's.
    return digest(sources, metadata, installed_torch(), str(native.wanted()), *variables)


def build_extension() -> None:
    metadata = digest([ROOT / "setup.py", ROOT / "pyproject.toml"])
    built = Stamp("extension", extension_digest(metadata))
    version = installed_torch().removeprefix("torch-").removesuffix(".dist-info")
    module = ROOT / "pycomm" / native.torch_range(ROOT).module_folder(version)
    kept = any(module.glob("_C.*.so"))
    kept = kept and any((ROOT / native.BUILD).glob("*.ninja"))
    if not (built.fresh() and kept):
        say("building the extension (minutes, the first time)")
        compile_in_place()
        built.write()
    installed = Stamp("editable", digest([], metadata, installed_torch()))
    if not installed.fresh():
        say("installing pycomm in place")
        # Everything is compiled by now; this adds the entry points and, through "compat", one .pth
        # line that names the checkout, which type checkers and editors can follow.
        pip(
            "--no-build-isolation",
            "--no-deps",
            "--config-settings",
            "editable_mode=compat",
            "-e",
            ROOT,
        )
        installed.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--group", action="append", default=[], choices=GROUPS)
    parser.add_argument("--no-build", action="store_true", help="packages only, no extension")
    parser.add_argument(
        "--no-torch", action="store_true", help="only what building layers 0 to 3 needs"
    )
    options = parser.parse_args()

    # The programs that this one starts would import another torch, or find no standard library.
    for name in ("PYTHONPATH", "PYTHONHOME"):
        os.environ.pop(name, None)
    if not (STAMPS / "build").exists():
        machine.require(native.HEADERS)
    lock = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(
        lock, fcntl.LOCK_EX
    )  # two `make` at once take turns; let go of when this process ends
    make_venv()
    use_venvs_python()
    install_cmake()
    if options.no_torch:
        return
    install(options.group, build=not options.no_build)
    if not options.no_build:
        build_extension()


if __name__ == "__main__":
    main()
