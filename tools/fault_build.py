"""Link the extension with fault points into build/faults/pycomm; print its path.

Sources that include torch name no fault point, so their objects are those of the ordinary build;
the core comes from the C++ tests' build, which has fault points. What is left to do is one link.

    PYTHONPATH=build/faults PYCOMM_FAULT=frame.written:3:kill python train.py
"""

from __future__ import annotations

import os
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


def torch_objects(folder: Path) -> list[Path]:
    """The objects of today's sources: a folder may hold those of removed ones."""
    paths = [path.relative_to(ROOT) for path in units.torch_units(ROOT)]
    return [folder / path.with_suffix(".o") for path in paths]


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

    objects = torch_objects(machine.extension_objects(ROOT, torch.__version__))
    if missing := [path for path in objects if not path.is_file()]:
        print(f"not built: {missing[0]}. Try: make fault_build", file=sys.stderr)
        return 1
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
        command = [os.environ.get("CXX", "c++"), "-shared", "-pthread", *map(str, inputs)]
        command += [f"-L{torch_library}", *(f"-l{name}" for name in TORCH_LIBRARIES)]
        if subprocess.run([*command, "-o", str(partial)], check=False).returncode != 0:
            partial.unlink(missing_ok=True)
            return 1
        partial.rename(extension)  # at once: a test that runs now has the old one open
    print(extension)
    return 0


if __name__ == "__main__":
    sys.exit(main())
