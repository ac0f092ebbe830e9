"""Link the extension with fault points into build/faults/pycomm; print its path.

Sources that include torch name no fault point, so their objects are those of the ordinary build;
the core comes from the C++ tests' build, which has fault points. What is left to do is one link.

    PYTHONPATH=build/faults PYCOMM_FAULT=frame.written:3:kill python train.py
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import cpp
import machine
import units

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "build" / "faults" / "pycomm"
TORCH_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")


def torch_objects(folder: Path, root: Path = ROOT) -> list[Path]:
    """Objects that include torch, of the last build of the extension; empty if there was none.

    Not all that the folder holds: a build with the other value of PYCOMM_UNITY, or of sources that
    are gone, leaves objects that nothing brings up to date.
    """
    if not (folder / "build.ninja").is_file():
        return []
    core = units.folders(root, "core")
    lines = re.sub(r"\$(.)", r"\1", (folder / "build.ninja").read_text())
    built = re.findall(r"^build (.+\.o): compile (.+)$", lines, re.MULTILINE)
    return [
        Path(made)
        for made, source in built
        if not any(Path(source).is_relative_to(folder) for folder in core)
    ]


def mirror_python_files(package: Path = PACKAGE) -> None:
    """Links the package's Python files into a folder, so that it can be imported from."""
    for source in (ROOT / "pycomm").rglob("*.py*"):
        if source.suffix in (".py", ".pyi"):
            link = package / source.relative_to(ROOT / "pycomm")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(source, link.parent))
    link = package.parent / "_pycomm_autoload.py"
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(ROOT / link.name, link.parent))


def main() -> int:
    import torch

    folder = machine.extension_objects(ROOT, torch.__version__)
    objects = torch_objects(folder)
    missing = [path for path in objects or [folder / "build.ninja"] if not path.is_file()]
    if missing:
        print(f"not built: {missing[0]}. Try: make fault_build", file=sys.stderr)
        return 1
    PACKAGE.mkdir(parents=True, exist_ok=True)
    lock = os.open(PACKAGE, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # the first of several processes builds; until this one ends
    core = cpp.build("plain", target="pycomm_core")
    if core is None:
        return 1
    extension = PACKAGE / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    inputs = [*objects, core / "libpycomm_core.a"]
    newest = max(path.stat().st_mtime_ns for path in inputs)
    if not extension.is_file() or extension.stat().st_mtime_ns <= newest:
        mirror_python_files()
        torch_library = Path(torch.__file__).parent / "lib"
        partial = extension.with_suffix(f".{os.getpid()}")
        command = [*os.environ.get("CXX", "c++").split(), "-shared", "-pthread", *map(str, inputs)]
        command += [f"-L{torch_library}", *(f"-l{name}" for name in TORCH_LIBRARIES)]
        if subprocess.run([*command, "-o", str(partial)], check=False).returncode != 0:
            partial.unlink(missing_ok=True)
            return 1
        partial.rename(extension)  # at once: a test that runs now has the old one open
    print(extension)
    return 0


if __name__ == "__main__":
    sys.exit(main())
