"""Builds pycomm._C against the installed torch. Static metadata is in pyproject.toml; sources,
flags and units are in tools/native.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import cuda_library  # noqa: E402
import native  # noqa: E402

TORCH_MISSING = """\
torch is needed to build: pip install torch==2.15.0 --index-url \
https://download.pytorch.org/whl/cpu first, then pip install --no-build-isolation ."""
SETUPTOOLS_OLD = "setuptools 77.0.3 or newer is needed to build: pip install --upgrade setuptools"
UNTESTED_TORCH = "PYCOMM_UNTESTED_TORCH"


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


def check_torch(version: str) -> None:
    """Ends the program where this torch is not supported, unless it is to be tried all the same."""
    why = native.torch_range(ROOT).why_unsupported(version)
    if why and os.environ.get(UNTESTED_TORCH, "").strip() != "1":
        raise SystemExit(f"{why}; {UNTESTED_TORCH}=1 builds against it all the same")


def extension_keywords() -> dict[str, object]:
    """What setup() needs to build the extension; imports torch."""
    # This checkout may be installed in place already: do not load it while it is being built.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch

    check_torch(torch.__version__)
    minor = native.torch_range(ROOT).torch_minor(torch.__version__)

    class BuildCExtension(build_ext):
        def finalize_options(self) -> None:
            super().finalize_options()
            self.force = True  # else a newer file stays in place, which may be for another torch

        def build_extension(self, ext: setuptools.Extension) -> None:
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                built = native.build_extension(native.Torch.installed())
            except subprocess.CalledProcessError as error:
                raise SystemExit(f"pycomm: the extension did not compile ({error})") from None
            shutil.copy2(built, target)

        def run(self) -> None:
            super().run()
            lines = f'TORCH_VERSION = "{minor}"\nGIT_COMMIT = "{git_commit()}"\n'
            package = ROOT / "pycomm" if self.inplace else Path(self.build_lib) / "pycomm"
            package.mkdir(parents=True, exist_ok=True)
            build_cuda_library(package, torch.version.cuda is not None)
            (package / "_build_info.py").write_text(f'"""Written by setup.py."""\n\n{lines}')

    return {
        "ext_modules": [setuptools.Extension("pycomm._C", sources=[])],
        "cmdclass": {"build_ext": BuildCExtension},
        # What is built here runs with this minor only. A range would let pip replace torch by one
        # for which it was not built.
        "install_requires": [f"torch=={minor}.*", "numpy"],
    }


def main() -> None:
    if tuple(int(part) for part in setuptools.__version__.split(".")[:2]) < (77, 0):
        raise SystemExit(SETUPTOOLS_OLD)
    # An sdist is only files; egg_info is what pip asks for before it knows what it will do.
    if set(sys.argv[1:]) & {"sdist", "egg_info", "clean"}:
        setuptools.setup(install_requires=[native.torch_range(ROOT).requirement(), "numpy"])
        return
    try:
        keywords = extension_keywords()
    except ImportError as error:
        if error.name != "torch":
            raise
        raise SystemExit(TORCH_MISSING) from None
    setuptools.setup(**keywords)


main()
