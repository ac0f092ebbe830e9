"""Compile what includes torch's headers against every torch minor that pycomm supports.

    python tools/torch_minors.py                # those that are not installed
    python tools/torch_minors.py 2.11.0 --jobs 4

Only the syntax and the types are checked (no code is made), under a minute per minor. The headers
come from torch's wheel for macOS, by a tenth the smallest and of the same sources: it is downloaded
(80 MB), and its headers are kept under build/torch-headers. What each minor does when it runs is
not seen here.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import native

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "torch-headers"
_PLATFORMS = ["macosx_11_0_arm64", "macosx_14_0_arm64"]


def headers(version: str) -> Path:
    """The folder of this torch's headers, downloaded if need be."""
    folder = KEPT / version
    if not (folder / "torch" / "include").is_dir():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as scratch:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
            command += ["--only-binary=:all:", "--implementation=cp", "--python-version=3.11"]
            command += [f"--platform={name}" for name in _PLATFORMS]
            subprocess.run([*command, f"torch=={version}"], check=True)
            wheel = next(Path(scratch).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                wanted = [name for name in archive.namelist() if name.startswith("torch/include/")]
                archive.extractall(Path(scratch) / "headers", wanted)
            shutil.rmtree(folder, ignore_errors=True)
            (Path(scratch) / "headers").rename(folder)  # whole, or not at all
    return folder / "torch" / "include"


def complaint(unit: Path, include: Path) -> str:
    """What the compiler says of one unit; empty if it is content."""
    folders = (include, include / "torch/csrc/api/include")
    command = [*native.compiler(), native.STANDARD, "-fsyntax-only", "-Wno-attributes"]
    command += [*native.flags(ROOT, "all", "torch"), f"-I{ROOT / 'csrc'}"]
    command += [word for folder in folders for word in ("-isystem", str(folder))]
    command += native.python_includes()
    done = subprocess.run([*command, str(unit)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr or f"exit code {done.returncode}"


def others() -> list[str]:
    """The first release of every minor but the one that the extension is built with anyway."""
    import torch

    versions = native.torch_range(ROOT)
    mine = versions.torch_minor(torch.__version__)
    return [f"{minor}.0" for minor in versions.SUPPORTED if minor != mine]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="version")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    failed = 0
    for version in options.versions or others():
        include = headers(version)
        files = [path for path, _ in native.units(ROOT, "torch")]
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            said = list(pool.map(lambda source, of=include: complaint(source, of), files))
        wrong = [(file, text) for file, text in zip(files, said, strict=True) if text]
        for file, text in wrong:
            print(f"torch {version}: {file.relative_to(ROOT)}\n{text[:2000]}")
        print(f"torch {version}: {len(files) - len(wrong)} of {len(files)} units compile")
        failed += len(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
