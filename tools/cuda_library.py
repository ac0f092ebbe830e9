"""Build libpycomm_cuda.so with CMake and nvcc; needs no GPU and no torch.

python tools/cuda_library.py            build it in build/cuda and look at what came out; CI's step
python tools/cuda_library.py --install  and put it beside the package's extension

Without nvcc both say so and end well. More CMake arguments in $CMAKE_ARGS; nvcc is looked for in
$CUDACXX, in $PATH, in $CUDA_HOME/bin and in /usr/local/cuda/bin.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import machine

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cuda"
NAME = "libpycomm_cuda.so"
ENTRY = "pycomm_cuda_table"
# What linkers add to every library.
_OF_THE_LINKER = {"_init", "_fini", "_edata", "_end", "__bss_start"}


def find_nvcc() -> Path | None:
    """The CUDA compiler of this machine, or None."""
    named = os.environ.get("CUDACXX")
    candidates = [shutil.which(named) if named else None, shutil.which("nvcc")]
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        candidates.append(shutil.which("nvcc", path=f"{home}/bin") if home else None)
    return next((Path(found) for found in candidates if found), None)


def build(nvcc: Path, folder: Path = BUILD) -> Path:
    """Builds the library in `folder`. Raises CalledProcessError where CMake or nvcc refuses."""
    machine.drop_moved_build(folder, ROOT)
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-DPYCOMM_CUDA=ON"]
    configure += ["-DPYCOMM_TESTS=OFF", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
    if shutil.which("ninja") and not (folder / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja"]
    configure += os.environ.get("CMAKE_ARGS", "").split()
    subprocess.run(configure, stdout=subprocess.DEVNULL, check=True)
    jobs = str(machine.jobs(1.0))
    command = ["cmake", "--build", str(folder), "-j", jobs, "--target", "pycomm_cuda"]
    subprocess.run(command, stdout=sys.stderr, check=True)
    return folder / NAME


def install(library: Path, package: Path) -> Path:
    """Puts the library where the extension looks for it. Replaces, so that a process that has the
    old one open keeps it."""
    target = package / NAME
    package.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".so.new")
    shutil.copy2(library, partial)
    partial.replace(target)
    return target


def architectures(nvcc: Path) -> tuple[str, ...]:
    """What cmake/CudaArchitectures.cmake chooses for this compiler."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"release (\d+)\.(\d+)", said)
    knows_blackwell = version is not None and (int(version[1]), int(version[2])) >= (12, 8)
    return ("sm_80", "sm_90", "sm_100") if knows_blackwell else ("sm_80", "sm_90")


def inspect(library: Path, expected: tuple[str, ...]) -> str:
    """What the library exports, needs and holds; raises ValueError for what must not be so."""
    table = getattr(ctypes.CDLL(str(library)), ENTRY)
    table.restype = ctypes.POINTER(ctypes.c_uint32)
    version, nbytes = table()[0], table()[1]
    nm = ["nm", "--dynamic", "--defined-only", "--format=just-symbols", str(library)]
    listed = subprocess.run(nm, capture_output=True, text=True, check=True).stdout
    exported = [name for name in listed.split() if name not in _OF_THE_LINKER]
    if exported != [ENTRY]:
        raise ValueError(f"{library} exports {', '.join(exported)} where only {ENTRY} should be")
    readelf = ["readelf", "--dynamic", str(library)]
    dynamic = subprocess.run(readelf, capture_output=True, text=True, check=True).stdout
    needed = [line for line in dynamic.splitlines() if "NEEDED" in line]
    if any(name in line for line in needed for name in ("cuda", "nccl", "torch", "c10")):
        raise ValueError(f"{library} needs another library than the system's: {needed}")
    code = library.read_bytes()
    missing = [name for name in expected if name.encode() not in code]
    if missing and "CMAKE_CUDA_ARCHITECTURES" not in os.environ.get("CMAKE_ARGS", ""):
        raise ValueError(f"{library} has no code for {', '.join(missing)}")
    return (
        f"{library.name}: table version {version} of {nbytes} bytes, "
        f"{library.stat().st_size >> 10} KiB, exports {ENTRY} alone, code for "
        + ", ".join(name for name in expected if name not in missing)
    )


def main() -> int:
    nvcc = find_nvcc()
    if nvcc is None:
        print(f"SKIPPED: {NAME} is not built, because no nvcc was found on this machine")
        return 0
    library = build(nvcc)
    print(inspect(library, architectures(nvcc)))
    if "--install" in sys.argv[1:]:
        print(f"installed as {install(library, ROOT / 'pycomm')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
