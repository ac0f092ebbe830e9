"""Builds the extension against the installed torch, or, for a wheel that fits several, against each
torch that PYCOMM_TORCHES names (tools/build_wheel.py sets it).

Static metadata is in pyproject.toml; sources, flags and units are in tools/native.py.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import cuda_library  # noqa: E402
import machine  # noqa: E402
import native  # noqa: E402

TORCH_MISSING = """\
pycomm is built against torch, and there is none in this build environment. If torch {first} to \
{last} is installed, pip's build isolation hides it. Try: pip install --no-build-isolation .   \
If it is not installed, first: pip install torch=={newest} --index-url \
https://download.pytorch.org/whl/cpu"""
SETUPTOOLS_OLD = "setuptools 77.0.3 or newer is needed to build: pip install --upgrade setuptools"
UNTESTED_TORCH = "PYCOMM_UNTESTED_TORCH"
# Folders with an unpacked wheel of torch each, as PATH lists folders; * and ? stand for names.
TORCHES = "PYCOMM_TORCHES"
# These need no torch: an sdist is only files, and pip asks for egg_info before it builds anything.
FILES_ONLY = {"sdist", "egg_info", "clean"}
BUILDING = {"build", "build_ext", "build_py", "install", "install_lib", "develop", "editable_wheel"}
BUILDING |= {"bdist", "bdist_egg", "bdist_rpm", "bdist_wheel"}


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
    """Ends the program if this torch is not supported, unless it is to be tried all the same."""
    why = native.torch_range(ROOT).why_unsupported(version)
    if why and os.environ.get(UNTESTED_TORCH, "").strip() != "1":
        raise SystemExit(f"{why}; {UNTESTED_TORCH}=1 builds against it all the same")


def torches() -> list[native.Torch]:
    """Those to build against. Raises ImportError if that is the installed one, and there is
    none."""
    named = []
    for pattern in filter(None, os.environ.get(TORCHES, "").split(os.pathsep)):
        folders = sorted(glob.glob(pattern))
        if not folders:
            raise SystemExit(
                f"{TORCHES} names {pattern}, and there is no such folder. Try: "
                "python tools/build_wheel.py --unpack"
            )
        named += [native.Torch.unpacked(Path(folder)) for folder in folders]
    for torch in named:
        check_torch(torch.version)
    # This checkout may be installed in place already: do not load it while it is being built.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    if not named:
        from torch import __version__ as installed

        check_torch(installed)
        named = [native.Torch.installed()]
    return named


class BuildPython(build_py):
    """Deletes first what a build of other sources has left behind: it would get into the wheel."""

    def run(self) -> None:
        package = Path(self.build_lib) / "pycomm"
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        (package / cuda_library.NAME).unlink(missing_ok=True)  # that of a build in place


def put(built: Path, target: Path) -> None:
    """Copies a module to where it is loaded from, at once: a process may load it meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    shutil.copy2(built, partial)
    partial.replace(target)


def build_command(found: list[native.Torch]) -> type[build_ext]:
    """What builds a module for each torch."""

    class BuildModules(build_ext):
        def finalize_options(self) -> None:
            super().finalize_options()
            self.force = True  # else a newer file stays in place, which may be of other sources

        def build_extension(self, ext: setuptools.Extension) -> None:
            torch = found[self.extensions.index(ext)]
            try:
                built = native.build_extension(torch)
            except subprocess.CalledProcessError as error:
                raise SystemExit(
                    f"pycomm's extension for torch {torch.version} did not compile; the compiler's "
                    f"error is above ({error}). Try: MAX_JOBS=1, if a compiler was killed"
                ) from None
            put(built, Path(self.get_ext_fullpath(ext.name)))

        def copy_extensions_to_source(self) -> None:
            """As setuptools' own, which deletes the old module before it writes the new one."""
            for ext, torch in zip(self.extensions, found, strict=True):
                built = self.get_ext_filename(self.get_ext_fullname(ext.name))
                put(Path(self.build_lib) / built, native.module_in(ROOT / "pycomm", torch))

        def run(self) -> None:
            package = ROOT / "pycomm" if self.inplace else Path(self.build_lib) / "pycomm"
            kept = [native.module_in(package, torch) for torch in found]
            for module in kept:
                module.parent.mkdir(parents=True, exist_ok=True)
            super().run()
            # A module for another torch would be one of other sources, soon.
            for module in package.glob(f"torch_*/{native.extension_name()}"):
                if module not in kept:
                    print(f"pycomm: removing {native.near(module)}, built for another torch")
                    module.unlink()
            # A wheel for several torches may be installed beside a CUDA build of any.
            several = bool(os.environ.get(TORCHES))
            build_cuda_library(package, several or any(torch.has_cuda for torch in found))
            (package / "_build_info.py").write_text(
                f'"""Written by setup.py."""\n\nGIT_COMMIT = "{native.git_commit(ROOT)}"\n'
            )

    return BuildModules


def extension_keywords() -> dict[str, object]:
    """What setup() needs to build the extension."""
    versions = native.torch_range(ROOT)
    found = torches()
    if not machine.has_headers(native.HEADERS):
        raise SystemExit(machine.sentence([machine.HEADERS_LACK]))
    names = [versions.module_name(torch.version) for torch in found]
    if len(set(names)) != len(names):
        both = ", ".join(torch.version for torch in found)
        raise SystemExit(f"{TORCHES} names two releases of one minor of torch: {both}")
    if os.environ.get(TORCHES):
        # No upper bound: pip would replace a newer torch by an old one. pycomm itself says, when it
        # is used, that it has no module for a torch that came later.
        requirement = f"torch>={versions.SUPPORTED[0]}"
    else:
        # The module that is built here works with this minor version of torch only.
        requirement = f"torch=={versions.torch_minor(found[0].version)}.*"
    return {
        "ext_modules": [setuptools.Extension(name, sources=[]) for name in names],
        "cmdclass": {"build_ext": build_command(found), "build_py": BuildPython},
        "install_requires": [requirement, "numpy"],
    }


def main() -> None:
    if tuple(int(part) for part in setuptools.__version__.split(".")[:2]) < (77, 0):
        raise SystemExit(SETUPTOOLS_OLD)
    arguments = set(sys.argv[1:])
    if arguments & FILES_ONLY and not arguments & BUILDING:
        setuptools.setup(install_requires=[native.torch_range(ROOT).requirement(), "numpy"])
        return
    if sys.platform != "linux":
        raise SystemExit(f"pycomm runs on Linux only, and this is {sys.platform}")
    try:
        keywords = extension_keywords()
    except ImportError as error:
        if error.name != "torch":
            raise
        versions = native.torch_range(ROOT)
        first, last = versions.SUPPORTED[0], versions.SUPPORTED[-1]
        text = TORCH_MISSING.format(first=first, last=last, newest=versions.newest())
        raise SystemExit(text) from None
    setuptools.setup(**keywords)


if __name__ == "__main__":  # also under pip
    main()
