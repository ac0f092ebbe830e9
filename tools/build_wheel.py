"""Build the wheel that runs with every supported minor of torch; print what it holds.

    python tools/build_wheel.py                     # the newest release of each minor
    python tools/build_wheel.py 2.13.0 2.15.0       # these
    python tools/build_wheel.py ===2.13.0           # this very build, which is the CUDA one
    python tools/build_wheel.py --check dist/torch_pycomm-….whl
    python tools/build_wheel.py --unpack      # only the headers: another tool builds the wheel

Torch's C++ interfaces change with each minor, so the wheel holds one module for each, and pycomm
loads the one that fits. The parts that include no torch are compiled once and linked into each.
Headers and libraries come from torch's own wheels for Linux, which are downloaded (0.2 to 0.9 GB
each), and of which build/torch keeps what is needed. Where nvcc is installed, the wheel also holds
libpycomm_cuda.so, which needs no torch.

Each symbol that a module leaves undefined, but for Python's own, is looked for in the libraries of
the torch that it is for: a module that another torch's headers went into may load and then crash.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import native

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "torch"
DIST = ROOT / "dist"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"  # in the names of wheels for this Python
SYSTEM_LIBRARY = re.compile(r"(libc|libm|libstdc\+\+|libgcc_s|ld-linux-[^.]+)\.so\.")


def releases() -> Sequence[str]:
    """The newest release of each supported minor that torch has a wheel of for this Python."""
    versions = native.torch_range(ROOT)
    found: Sequence[str] = versions.RELEASES
    return found[: found.index(versions.newest()) + 1]


# --- torch ----------------------------------------------------------------------------------------


def download(version: str, folder: Path) -> Path:
    """Torch's wheel for this interpreter: the small CPU build if an index has it.

    "===2.13.0", as pip writes it, is the build without a suffix in any case: the CUDA one.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--only-binary=:all:", "--dest", str(folder)]
    small = [
        *pip,
        "--retries",
        "1",
        "--timeout",
        "15",
        "--extra-index-url",
        CPU_INDEX,
        f"torch=={version}+cpu",
    ]
    exact = version.startswith("===")
    if not exact and (
        subprocess.run(small, stderr=subprocess.DEVNULL, check=False).returncode == 0
    ):
        return next(folder.glob("torch-*.whl"))
    if not exact:
        print(f"no CPU wheel of torch {version} was found: downloading the CUDA one (0.9 GB)")
    plain = f"torch{version}" if exact else f"torch=={version}"
    if subprocess.run([*pip, plain], check=False).returncode != 0:
        raise SystemExit(
            f"torch {version} could not be downloaded for Python {VERSION}; pip's error is above. "
            "Try: name the releases that you need, as in make wheel ARGS='2.13.0 2.14.1'"
        )
    return next(folder.glob("torch-*.whl"))


def unpacked(version: str) -> Path:
    """The folder with this torch's headers and libraries, downloaded if need be."""
    release = version.removeprefix("===")
    flavour = "-plain" if version.startswith("===") else ""
    folder = KEPT / f"{release}{flavour}-{sys.implementation.cache_tag}"
    if not folder.is_dir():
        KEPT.mkdir(parents=True, exist_ok=True)
        wanted = [
            "torch/version.py",
            *(f"torch/lib/lib{name}.so" for name in native.TORCH_LIBRARIES),
        ]
        with tempfile.TemporaryDirectory(dir=KEPT) as scratch:
            print(f"downloading torch {version}", flush=True)
            with zipfile.ZipFile(download(version, Path(scratch))) as archive:
                names = archive.namelist()
                headers = [name for name in names if name.startswith("torch/include/")]
                archive.extractall(Path(scratch) / "part", [*wanted, *headers])
            (Path(scratch) / "part").rename(folder)  # whole, or not at all
    return folder


# --- what a wheel must be -------------------------------------------------------------------------


def symbols(library: Path, *options: str) -> set[str]:
    """The dynamic symbols of a library, as nm names them, without versions."""
    command = ["nm", "--dynamic", "--format=posix", *options, str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[0].partition("@")[0] for line in listed.splitlines()}


def system_libraries() -> list[Path]:
    """Those of C, C++ and the loader that this process has, or that are beside them."""
    ctypes.CDLL("libstdc++.so.6")  # maps the others, too
    mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines()}
    return [path for path in mapped if SYSTEM_LIBRARY.match(path.name)]


def undefined(module: Path, torch: native.Torch) -> set[str]:
    """What a module needs that neither its torch nor the system defines.

    Python's symbols, which the interpreter that loads it gives, are not looked for.
    """
    needed = symbols(module, "--undefined-only")
    given = {name for name in needed if name.startswith(("_ITM_", "__gmon_start__", "Py", "_Py"))}
    found: set[str] = set()
    for name in native.TORCH_LIBRARIES:
        found |= symbols(Path(torch.libraries) / f"lib{name}.so", "--defined-only")
    for path in system_libraries():
        found |= symbols(path, "--defined-only")
    return needed - given - found


def look(wheel: Path, torches: Sequence[native.Torch]) -> list[str]:
    """Prints what is in the wheel; returns what is wrong with it."""
    wrong = []
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)
        for torch in torches:
            module = native.module_in(Path(scratch) / "pycomm", torch)
            if not module.is_file():
                wrong.append(f"no module for torch {torch.version}")
                continue
            missing = undefined(module, torch)
            if missing:
                wrong.append(f"torch {torch.version} does not define {', '.join(sorted(missing))}")
            exported = symbols(module, "--defined-only")
            dynamic = subprocess.run(
                ["readelf", "--dynamic", str(module)], capture_output=True, text=True, check=True
            ).stdout
            if re.search(r"\((RPATH|RUNPATH)\)", dynamic):
                wrong.append(f"the module for torch {torch.version} names folders to search")
            print(
                f"  {module.parent.name}: {module.stat().st_size / 1e6:.2f} MB, "
                f"{len(exported)} symbols exported, built with torch {torch.version}"
            )
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")
    return wrong


# --- building -------------------------------------------------------------------------------------


def named(folders: Sequence[Path]) -> str:
    """These folders as PYCOMM_TORCHES has them: patterns, between colons."""
    return os.pathsep.join(glob.escape(str(folder)) for folder in folders)


def check_path() -> None:
    """Ends the program if PYCOMM_TORCHES cannot name folders of this checkout."""
    if os.pathsep in str(ROOT):
        raise SystemExit(
            f"a wheel cannot be built in {ROOT}, because its path has {os.pathsep!r}. "
            "Try: another folder"
        )


def build(folders: Sequence[Path], target: Path = DIST) -> Path:
    """Builds the wheel, named for the Linux that it runs on, into a folder."""
    target.mkdir(exist_ok=True)
    env = os.environ | {"PYCOMM_TORCHES": named(folders)}
    tools = str(Path(sys.executable).parent)
    env["PATH"] = f"{tools}{os.pathsep}{env.get('PATH', os.defpath)}"
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as scratch:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation"]
        command += ["--no-deps", "--wheel-dir", scratch, str(ROOT)]
        subprocess.run(command, env=env, check=True)
        plain = next(Path(scratch).glob("*.whl"))
        repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", scratch + "/named"]
        for name in native.TORCH_LIBRARIES:
            repair += ["--exclude", f"lib{name}.so"]
        subprocess.run([*repair, str(plain)], env=env, check=True)
        wheel = next(Path(scratch, "named").glob("*.whl"))
        return Path(shutil.move(wheel, target / wheel.name))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="version")
    parser.add_argument("--unpack", action="store_true", help="only fetch what is built against")
    parser.add_argument("--check", metavar="WHEEL", type=Path, help="only look at this wheel")
    options = parser.parse_args()
    check_path()
    if not (options.unpack or options.check):
        # First of all, so that nobody takes one of other sources for this one, if this one fails.
        for old in DIST.glob(f"torch_pycomm-*-{TAG}-*.whl"):
            old.unlink()
    folders = [unpacked(version) for version in options.versions or releases()]
    if options.unpack:
        return 0
    wheel = options.check or build(folders)
    wrong = look(wheel, [native.Torch.unpacked(folder) for folder in folders])
    for each in wrong:
        print(f"wrong: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
