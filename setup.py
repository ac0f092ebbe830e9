"""Builds pycomm._C with torch's BuildExtension. Everything static stands in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import setuptools

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import cuda_library  # noqa: E402
import units  # noqa: E402
from machine import extension_objects, jobs  # noqa: E402

TORCH_MISSING = """\
torch is needed to build: pip install torch==2.13.0 --index-url \
https://download.pytorch.org/whl/cpu first, then pip install --no-build-isolation ."""
SETUPTOOLS_OLD = "setuptools 77.0.3 or newer is needed to build: pip install --upgrade setuptools"

# A folder of files that include torch's headers keeps its compiler at up to this much memory.
GIB_PER_COMPILER = 1.7

COMPILE_ARGS = [
    "-O3",
    "-fvisibility=hidden",
    "-D_GNU_SOURCE",
    # The same bits on every CPU: see cmake/Flags.cmake.
    "-ffp-contract=off",
    "-Wall",
    # A method of c10d::Backend that a torch release renames must not silently stop being an
    # override.
    "-Werror=suggest-override",
]


def relative(paths: Iterable[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def git_commit() -> str:
    """HEAD of this checkout; empty in an sdist, also in one unpacked inside another checkout."""
    try:
        git = ["git", "-C", str(ROOT), "rev-parse", "--show-toplevel", "HEAD"]
        top, commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )[:2]
    except (OSError, ValueError, subprocess.CalledProcessError):
        return ""
    return commit if Path(top) == ROOT else ""


def build_cuda_library(package: Path, torch_has_cuda: bool) -> None:
    """Builds libpycomm_cuda.so into `package`, as PYCOMM_BUILD_CUDA says.

    0: not. 1: or fail. auto, the default: where torch is a CUDA build and there is an nvcc; if that
    fails the package is installed without it, since all else works.
    """
    wanted = os.environ.get("PYCOMM_BUILD_CUDA", "").strip().lower() or "auto"
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"PYCOMM_BUILD_CUDA={wanted!r} is not allowed: use 'auto', '0' or '1'")
    if wanted == "0" or (wanted == "auto" and not torch_has_cuda):
        return
    nvcc = cuda_library.find_nvcc()
    if nvcc is None:
        if wanted == "1":
            raise SystemExit(
                "PYCOMM_BUILD_CUDA=1, and no nvcc was found. Try: install a CUDA toolkit, or put "
                "its bin folder into PATH"
            )
        print("pycomm: no nvcc, so CUDA tensors will not be served: see docs/cuda.md")
        return
    try:
        cuda_library.install(cuda_library.build(nvcc), package)
    except (OSError, subprocess.CalledProcessError) as error:
        if wanted == "1":
            raise SystemExit(f"libpycomm_cuda.so could not be built: {error}") from None
        print(f"pycomm: libpycomm_cuda.so could not be built ({error}); CUDA tensors will not be")
        print("served. PYCOMM_BUILD_CUDA=1 makes this an error, PYCOMM_BUILD_CUDA=0 skips it")


def extension_keywords() -> dict[str, object]:
    """What setup() needs to build the extension; imports torch."""
    # This checkout may be installed in place already: do not load it while it is being built.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    os.environ.setdefault("MAX_JOBS", str(jobs(GIB_PER_COMPILER)))
    torch_minor = ".".join(torch.__version__.split(".")[:2])

    class BuildCExtension(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            # One object folder per Python and torch, also for pip's temporary builds: ninja then
            # finds what is still good. It compares files better than setuptools does, so setuptools
            # always asks it.
            self.build_temp = str(extension_objects(ROOT, torch.__version__))
            self.force = True

        def run(self) -> None:
            super().run()
            lines = f'TORCH_VERSION = "{torch_minor}"\nGIT_COMMIT = "{git_commit()}"\n'
            package = ROOT / "pycomm" if self.inplace else Path(self.build_lib) / "pycomm"
            package.mkdir(parents=True, exist_ok=True)
            build_cuda_library(package, torch.version.cuda is not None)
            (package / "_build_info.py").write_text(f'"""Written by setup.py."""\n\n{lines}')

    debug = [] if "-g" in os.environ.get("CFLAGS", "").split() else ["-g0"]
    extension = CppExtension(
        "pycomm._C",
        # The largest first: with few cores, the last one decides when all are done.
        sources=relative([*reversed(units.torch_units(ROOT)), *units.sources(ROOT, "core")]),
        depends=relative(
            path for folder in units.folders(ROOT, "core", "torch") for path in folder.rglob("*.h")
        ),
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args={"cxx": [*COMPILE_ARGS, *debug]},
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildCExtension}}


def main() -> None:
    if tuple(int(part) for part in setuptools.__version__.split(".")[:2]) < (77, 0):
        raise SystemExit(SETUPTOOLS_OLD)
    # An sdist is only files; egg_info is what pip asks for before it knows what it will do.
    if set(sys.argv[1:]) & {"sdist", "egg_info", "clean"}:
        setuptools.setup()
        return
    try:
        keywords = extension_keywords()
    except ImportError as error:
        if error.name != "torch":
            raise
        raise SystemExit(TORCH_MISSING) from None
    setuptools.setup(**keywords)


main()
