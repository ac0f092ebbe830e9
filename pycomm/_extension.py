"""Loads the native part once: the module that was built for this minor version of torch.

There is one module per minor, ``pycomm/torch_2_13/_C…so``, since torch's C++ interfaces change with
each. A build from source has one of them, a wheel one for each supported minor.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.machinery
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from pycomm import errors
from pycomm._torch_range import is_newer, module_name, torch_minor, why_unsupported
from pycomm._version import __version__

CUDA_LIBRARY = Path(__file__).resolve().parent / "libpycomm_cuda.so"
"""What the extension loads when the first CUDA tensor comes; setup.py puts it there."""
NCCL_LIBRARIES = [
    Path(torch.__file__).resolve().parent.parent / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
]
"""Where NCCL is looked for, after the one that this process has loaded and before the system's."""
_REBUILD = "build pycomm in this environment, from its sources: pip install --no-build-isolation ."
_EXIT_TIMEOUT_MS = 2000
LOG_LEVELS = {"TRACE": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING}

logger = logging.getLogger("pycomm")

_extension: Extension | None = None


class Extension(Protocol):
    """What Python calls in the native module."""

    def create_backend(
        self,
        store: Store,
        rank: int,
        size: int,
        group_name: str,
        timeout_ms: int,
        options: dict[str, Any],
    ) -> Any:
        """Joins the group: blocks, without the GIL, until all ranks are there."""

    def empty_shared(self, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros in the memory that peers on this host can map."""

    def last_error(self, backend: Any) -> dict[str, Any] | None:
        """The record of the group's first error. Raises TypeError for another library's backend."""

    def backend_error(self, backend: Any) -> Any:
        """torch's ``ErrorType``. Raises TypeError for another library's backend."""

    def flight_record(self, backend: Any) -> str:
        """The flight record of the group alone, as JSON."""

    def write_flight_record(self, path: str) -> None:
        """Writes the flight record of all groups."""

    def goes_by_nccl(self, backend: Any, device: torch.device) -> bool:
        """Whether collectives of this device's tensors go by NCCL; collective the first time.
        Raises TypeError for another library's backend."""

    def rank_hosts(self, backend: Any) -> Sequence[str]:
        """The host name of each rank."""

    def topology_text(self, backend: Any) -> str:
        """How the ranks are spread over hosts, in words."""

    def host_identity(self) -> str:
        """Equal in two processes of one host and network namespace."""

    def describe_backend(self, backend: Any) -> str:
        """How the ranks reach each other, in a few words."""

    def codec_stats(self, backend: Any) -> Mapping[str, int]:
        """The fields of ``CodecStats``."""

    def all_reduce_as(
        self,
        backend: Any,
        tensor: torch.Tensor,
        codec: str,
        lost: torch.Tensor | None,
        op: Any,
        async_op: bool,
    ) -> Any:
        """An all_reduce that travels as ``codec``: its Work."""

    def encode(
        self, codec: str, values: torch.Tensor, error: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, int]:
        """The codes and how many values overflowed."""

    def encoded_nbytes(self, codec: str, numel: int) -> int:
        """Of that many encoded values."""

    def sum_decoded(
        self, codec: str, codes: Sequence[torch.Tensor], output: torch.Tensor, divisor: int = 1
    ) -> None:
        """output = sum of the decoded rows / divisor."""

    def set_exception_types(self, types: Mapping[str, type[Exception]]) -> None:
        """By error code; each is called as ``cls(text, record)``."""

    def set_log_callback(self, callback: Callable[[str, str], None] | None, level: str) -> None:
        """``callback(level, line)`` is called from a thread that may wait for the GIL."""

    def shutdown_all(self, timeout_ms: int) -> None:
        """Aborts what is outstanding in all groups and joins all native threads. Idempotent."""

    def arm_fault_points(self, spec: str) -> None:
        """Raises UnsupportedError unless this is a test build."""

    def fail_future(self, future: Any, error: BaseException) -> None:
        """Completes a ``torch.futures.Future`` with this very exception."""

    def IssueChain(
        self, hook_ordinal: int, index: int, codec: str | None = None
    ) -> AbstractContextManager[object]:
        """While entered, what this thread and its futures' callbacks issue belongs to one chain,
        whose sums travel as ``codec``; None: as the group's."""

    def list_interfaces(self) -> Sequence[Mapping[str, Any]]:
        """``name``, ``address``, ``family`` ("ipv4" or "ipv6") and ``loopback`` of each address."""

    def choose_address(
        self,
        interface: str,
        family: str,
        store_host: str,
        everyone: Sequence[tuple[str, str]],
        rank: int,
    ) -> Mapping[str, str]:
        """``address``, ``interface`` and ``why``: what this process would listen on as ``rank`` of
        ``everyone``, who are pairs of ``host_identity()`` and address. If nobody is known yet, the
        first guess. Raises NoInterfaceError."""

    def simd_level(self) -> str:
        """The instructions chosen for reducing, "avx2"."""

    def build_info(self) -> Mapping[str, str]:
        """Compiler, its version and the language standard."""


def built_for() -> list[str]:
    """The minor versions of torch that there is a module for, in order."""
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
    folder = Path(__file__).resolve().parent
    in_sources = (folder.parent / "setup.py").is_file()
    if not built:
        if in_sources:
            raise errors.TorchVersionError(
                "this is pycomm's source folder, and the extension is not built here "
                f"({folder.parent}). "
                f"Try: another folder if pycomm is installed, else make venv, or {_REBUILD}"
            )
        raise errors.TorchVersionError(f"pycomm's extension is not built. Try: {_REBUILD}")
    ways = [f"pip install 'torch=={built[-1]}.*'"]
    if not why_unsupported(installed):
        ways.insert(0, _REBUILD)
    elif is_newer(installed):
        ways.insert(0, "a newer pycomm")
    if in_sources:
        ways.insert(0, "leave this source folder, if pycomm is installed elsewhere")
    raise errors.TorchVersionError(
        f"the pycomm in {folder}, {__version__}, was built for torch {', '.join(built)}, and torch "
        f"{installed} is installed. Try: {'; or: '.join(ways)}"
    )


def why_no_nccl() -> str:
    """Why CUDA tensors of this process cannot go by NCCL; empty if they may. Loads nothing."""
    if not torch.cuda.is_available():
        return "has no GPU that torch can use"
    if not CUDA_LIBRARY.exists():
        return f"has no {CUDA_LIBRARY.name} beside pycomm's extension"
    return ""


def load() -> Extension:
    """The extension, loaded and set up.

    Raises:
        TorchVersionError: It is not built, or for another torch.
    """
    global _extension
    if _extension is not None:
        return _extension
    check_torch(built_for(), torch.__version__)
    try:
        module = importlib.import_module(module_name(torch.__version__))
    except ImportError as error:
        raise errors.TorchVersionError(
            f"pycomm's extension could not be loaded: {error}. Try: {_REBUILD}"
        ) from error
    extension = cast(Extension, module)
    extension.set_exception_types(dict(errors.BY_CODE))
    _join_threads_at_exit(extension)
    _extension = extension
    return extension


def loaded() -> Extension | None:
    """The extension if this process uses it already; never loads it."""
    return _extension


def set_debug_level(extension: Extension, level: str) -> None:
    """Sends the native part's lines of ``level`` and above to the logger "pycomm"."""
    extension.set_log_callback(_log_line, level)


def _log_line(level: str, line: str) -> None:
    logger.log(LOG_LEVELS.get(level, logging.WARNING), "%s", line)


def _join_threads_at_exit(extension: Extension) -> None:
    owner = os.getpid()

    def join() -> None:
        # A forked child has no such threads to join, and must not speak for its parent.
        if os.getpid() == owner:
            extension.shutdown_all(_EXIT_TIMEOUT_MS)

    atexit.register(join)
