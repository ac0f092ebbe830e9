"""Link the extension with fault points into build/faults/pycomm; print its path.

Sources that include torch name no fault point, so their objects are those of the ordinary build;
the core comes from the C++ tests' build, which has fault points. So this program only links.

    PYTHONPATH=build/faults PYCOMM_FAULT=frame.written:3:kill python train.py
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import cpp
import native

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "build" / "faults" / "pycomm"


def mirror_python_files(package: Path = PACKAGE) -> None:
    """Links the package's Python files into a folder, so that it can be imported from."""
    sources = [path for path in (ROOT / "pycomm").rglob("*.py*") if path.suffix in (".py", ".pyi")]
    for source in [*sources, ROOT / "_pycomm_autoload.py"]:
        link = package.parent / source.relative_to(ROOT)
        target = os.path.relpath(source, link.parent)
        if not link.is_symlink() or os.readlink(link) != target:  # else somebody may be reading it
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(target)


def main() -> int:
    torch = native.Torch.installed()
    objects = native.built_torch_objects(torch)
    missing = [path for path in objects or [native.build_file(torch)] if not path.is_file()]
    if missing:
        print(f"not built: {missing[0]}. Try: make fault_build", file=sys.stderr)
        return 1
    extension = native.module_in(PACKAGE, torch)
    extension.parent.mkdir(parents=True, exist_ok=True)
    # The lock of tools/bootstrap.py, which compiles the same objects: until this process ends.
    fcntl.flock(os.open(ROOT, os.O_RDONLY), fcntl.LOCK_EX)
    core = cpp.build("plain", target="pycomm_core")
    if core is None or not native.update(torch, objects):
        return 1
    inputs = [*objects, core / "libpycomm_core.a"]
    mirror_python_files()
    newest = max(path.stat().st_mtime_ns for path in inputs)
    # What it was linked from: objects of another torch may be older than it.
    noted, names = PACKAGE / "inputs.txt", "\n".join(map(str, inputs))
    same = noted.is_file() and noted.read_text() == names
    if not same or not extension.is_file() or extension.stat().st_mtime_ns <= newest:
        partial = extension.with_suffix(f".{os.getpid()}")
        if subprocess.run(
            native.link_command(partial, inputs, torch), cwd=ROOT, check=False
        ).returncode:
            partial.unlink(missing_ok=True)
            return 1
        partial.rename(extension)  # at once: a test that runs now has the old one open
        noted.write_text(names)
    print(extension)
    return 0


if __name__ == "__main__":
    sys.exit(main())
