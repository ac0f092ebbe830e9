"""Compile what includes torch's headers against every torch minor that pycomm supports.

    python tools/torch_minors.py                # those that are not installed
    python tools/torch_minors.py 2.11.0 --jobs 4

Only the syntax and the types are checked (no code is made), some 4 minutes a minor. The headers
come from torch's wheel for macOS, by a tenth the smallest and of the same sources: it is downloaded
(80 MB), and its headers are kept under build/torch-headers. What each minor does when it runs is
not seen here.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "torch-headers"
MINORS = ["2.11.0", "2.12.0", "2.13.0"]  # as `dependencies` in pyproject.toml allows
_PLATFORMS = ["macosx_11_0_arm64", "macosx_14_0_arm64"]


def headers(version: str) -> Path:
    """The folder of this torch's headers, downloaded if need be."""
    folder = KEPT / version
    if not (folder / "torch" / "include").is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
            command += ["--only-binary=:all:", "--implementation=cp", "--python-version=3.11"]
            command += [f"--platform={name}" for name in _PLATFORMS]
            subprocess.run([*command, f"torch=={version}"], check=True)
            wheel = next(Path(scratch).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                wanted = [name for name in archive.namelist() if name.startswith("torch/include/")]
                archive.extractall(folder, wanted)
    return folder / "torch" / "include"


def sources() -> list[Path]:
    """The files of the floors that see torch."""
    lines = (ROOT / "csrc" / "floors.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    folders = [ROOT / "csrc" / folder for _, folder, kind in rows if kind == "torch"]
    return [path for folder in folders for path in sorted(folder.rglob("*.cc"))]


def complaint(source: Path, include: Path) -> str:
    """What the compiler says of one file; empty if it is content."""
    command = ["g++", "-std=c++20", "-fsyntax-only", "-D_GNU_SOURCE", "-DTORCH_EXTENSION_NAME=_C"]
    command += ["-Wno-attributes", "-Werror=suggest-override", f"-I{ROOT / 'csrc'}"]
    for folder in (
        include,
        include / "torch/csrc/api/include",
        Path(sysconfig.get_path("include")),
    ):
        command += ["-isystem", str(folder)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr or f"exit code {done.returncode}"


def installed() -> str:
    """The minor that the extension is built with anyway."""
    import torch

    return ".".join(torch.__version__.split(".")[:2])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="version")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    versions = options.versions or [
        each for each in MINORS if not each.startswith(f"{installed()}.")
    ]
    failed = 0
    for version in versions:
        include = headers(version)
        files = sources()
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            said = list(pool.map(lambda source, of=include: complaint(source, of), files))
        wrong = [(file, text) for file, text in zip(files, said, strict=True) if text]
        for file, text in wrong:
            print(f"torch {version}: {file.relative_to(ROOT)}\n{text[:2000]}")
        print(f"torch {version}: {len(files) - len(wrong)} of {len(files)} files compile")
        failed += len(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
