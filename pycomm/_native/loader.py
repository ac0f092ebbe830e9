"""Loads the native part once: the module that was built for this minor version of torch.

There is one module per minor, ``pycomm/torch_2_13/_C…so``, since torch's C++ interfaces change with
each. A build from source has one of them, a wheel one for each supported minor.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from pycomm import errors
from pycomm._native import callback_names, process_end
from pycomm._torch_range import (
    FROM_SOURCES,
    OWN_ENVIRONMENT,
    is_newer,
    module_name,
    torch_minor,
    why_unsupported,
)
from pycomm._version import __version__

if TYPE_CHECKING:
    from pycomm import _C

    native = _C

_PACKAGE = Path(__file__).resolve().parent.parent
CUDA_LIBRARY = _PACKAGE / "libpycomm_cuda.so"
"""What the extension loads when the first CUDA tensor comes; setup.py puts it there."""
NCCL_LIBRARIES = [
    Path(torch.__file__).resolve().parent.parent / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
]
"""Where NCCL is looked for, after the one that this process has loaded and before the system's."""
_REBUILD = "build pycomm in this environment, from its sources: pip install --no-build-isolation ."
LOG_LEVELS = {"TRACE": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING}

logger = logging.getLogger("pycomm")

_extension: ModuleType | None = None


def built_for() -> list[str]:
    """The minor versions of torch for which a module was built, in order."""
    package = importlib.import_module("pycomm")
    minors = {
        tuple(map(int, file.parent.name.removeprefix("torch_").split("_")))
        for folder in package.__path__
        for suffix in importlib.machinery.EXTENSION_SUFFIXES
        for file in Path(folder).glob(f"torch_*/_C{suffix}")
        if re.fullmatch(r"torch_\d+_\d+", file.parent.name)
    }
    return [".".join(map(str, minor)) for minor in sorted(minors)]


def check_torch(built: Sequence[str], installed: str) -> None:
    """Raises TorchVersionError unless one of these builds is for the torch ``installed``.

    Loading another would fail with an undefined symbol, or worse, would not fail.
    """
    if torch_minor(installed) in built:
        return
    folder = _PACKAGE
    in_sources = (folder.parent / "setup.py").is_file()
    if not built:
        if in_sources:
            raise errors.TorchVersionError(
                "this is pycomm's source folder, and the extension is not built here "
                f"({folder.parent}). "
                f"Try: another folder if pycomm is installed, else make venv, or {_REBUILD}"
            )
        raise errors.TorchVersionError(f"pycomm's extension is not built. Try: {_REBUILD}")
    ways = [f"pip install 'torch=={built[-1]}.*', {OWN_ENVIRONMENT}"]
    if not why_unsupported(installed):
        ways.insert(0, _REBUILD)
    elif is_newer(installed):
        ways.insert(0, FROM_SOURCES)
    if in_sources:
        ways.insert(0, "leave this source folder, if pycomm is installed elsewhere")
    raise errors.TorchVersionError(
        f"the pycomm in {folder}, {__version__}, was built for torch {', '.join(built)}, and torch "
        f"{installed} is installed. Try: {'; or: '.join(ways)}"
    )


def why_no_nccl() -> str:
    """Why NCCL cannot run this process's collectives; empty if it may. Loads nothing."""
    if not torch.cuda.is_available():
        return "has no GPU that torch can use"
    if not CUDA_LIBRARY.exists():
        return f"has no {CUDA_LIBRARY.name} beside pycomm's extension"
    return ""


def load() -> ModuleType:
    """The extension, loaded and set up. ``loader.native`` is the same, with types for mypy.

    Raises:
        TorchVersionError: It is not built, or for another torch.
    """
    global _extension
    if _extension is not None:
        return _extension
    check_torch(built_for(), torch.__version__)
    try:
        extension = importlib.import_module(module_name(torch.__version__))
    except ImportError as error:
        raise errors.TorchVersionError(
            f"pycomm's extension could not be loaded: {error}. Try: {_REBUILD}"
        ) from error
    extension.set_exception_types(dict(errors.BY_CODE))
    process_end.await_callbacks(extension)
    callback_names.wrap_futures(extension)
    _extension = extension
    return extension


def __getattr__(name: str) -> ModuleType:
    if name == "native":
        return load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def loaded() -> ModuleType | None:
    """The extension if this process uses it already; never loads it."""
    return _extension


def set_debug_level(extension: ModuleType, level: str) -> None:
    """Sends the native part's lines of ``level`` and above to the logger "pycomm"."""
    extension.set_log_callback(_log_line, level)


def _log_line(level: str, line: str) -> None:
    logger.log(LOG_LEVELS.get(level, logging.WARNING), "%s", line)
