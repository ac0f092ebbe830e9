#!/usr/bin/env python3
"""Make .venv with pinned packages and the extension built in place; do only what is not done yet.

    python3 tools/bootstrap.py [--group demo|test|lint|docs|integrations ...]
        [--no-build | --no-torch]

Needs the standard library only. If something is missing, one line says what to install. CUDA builds
of torch are never downloaded: the version asked for is `+cpu`, unless the machine's own wheels
already provide the plain one. While pip installs torch, the part of the extension that includes no
torch compiles.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
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
TORCH = native.torch_range(ROOT).newest()
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]
MINIMUM_PIP = (23, 2)  # the first whose --dry-run reports what it would take without fetching it


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


def make_venv() -> None:
    version = pip_version()
    if version is None:
        say(f"making {VENV.name} with Python {sys.version.split()[0]} ({sys.executable})")
        run(sys.executable, "-m", "venv", "--clear", VENV)
        version = pip_version()
    if version is None or version < MINIMUM_PIP:
        pip("--upgrade", "pip>=23.2,<27")


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


def torch_arguments() -> list[str]:
    """pip's arguments for the CPU build of torch: the machine's own wheel, else torch's index."""
    versions = native.torch_range(ROOT)
    for version in torch_versions():
        if version.endswith("+cpu") and not versions.why_unsupported(version):
            return [f"torch=={version}"]
    plain = would_take(f"torch=={TORCH}")
    source = plain["download_info"] if plain else None
    if isinstance(source, dict) and str(source.get("url", "")).startswith("file:"):
        return [f"torch=={TORCH}"]
    return [f"torch=={TORCH}+cpu", "--extra-index-url", TORCH_INDEX]


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
    core = None
    try:
        for group in ["build", *groups]:
            stamp = Stamp(group, digest(files, group, TORCH))
            if stamp.fresh():
                continue
            say(f"installing tools/requirements/{group}.txt")
            pip("-r", REQUIREMENTS / f"{group}.txt")
            if group == "build":
                core = compile_core() if build else None
                chosen = torch_arguments()
                say(f"installing {chosen[0]} (200 MB)")
                pip(*chosen)
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


def build_extension() -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cc", ".h", ".txt")]
    metadata = digest([ROOT / "setup.py", ROOT / "pyproject.toml"])
    sources += [ROOT / "tools" / "native.py", ROOT / "pycomm" / "_torch_range.py"]
    # Objects of the other way to compile stay; tools/fault_build.py links those of today's.
    built = Stamp("extension", digest(sources, metadata, installed_torch(), str(native.wanted())))
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
        "--no-torch", action="store_true", help="only what building floors 0 to 3 needs"
    )
    options = parser.parse_args()

    if not (STAMPS / "build").exists():
        machine.require(native.HEADERS)
    lock = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(
        lock, fcntl.LOCK_EX
    )  # two `make` at once take turns; let go of when this process ends
    make_venv()
    install_cmake()
    if options.no_torch:
        return
    install(options.group, build=not options.no_build)
    if not options.no_build:
        build_extension()


if __name__ == "__main__":
    main()
