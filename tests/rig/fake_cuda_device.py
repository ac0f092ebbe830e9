"""CUDA tensors without a GPU: a device that torch takes for CUDA's, as strict as CUDA may be.

``build`` compiles ``fake_cuda`` and the strict device of ``tests/cpp/cuda/fake_cudart``, with the
CUDA library's own table over it, into a second libpycomm_cuda.so; ``Device`` loads
it and makes tensors. A host access to their memory ends the process with a signal. In which order
streams run is drawn from a seed, which each process prints; ``FAKE_CUDA_SEED`` sets it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "tools"))

import native  # noqa: E402

_DLPACK_CUDA = 2
_DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


def build(folder: Path) -> Path:
    """Compiles the library. Raises CalledProcessError with the compiler's words in its output."""
    torch_folder = Path(torch.__file__).parent
    library = folder / "libpycomm_cuda.so"
    sources = [
        *sorted((ROOT / "tests/rig/fake_cuda").glob("*.cc")),
        *sorted((ROOT / "tests/cpp/cuda/fake_cudart").glob("*.cc")),
        *sorted((ROOT / "csrc/base").glob("*.cc")),
    ]
    includes = ["csrc", "tests/cpp/cuda", "tests/cpp/cuda/fake_cudart"]
    includes.append(str(torch_folder / "include"))
    compiler = native.compiler()
    flags = [native.STANDARD, "-fPIC", "-pthread", *native.flags(ROOT, "all", "fake")]
    flags += [f"-I{ROOT / include}" for include in includes]
    objects = []
    running = []
    for source in sources:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        objects.append(str(target))
        command = [*compiler, *flags, "-c", str(source), "-o", str(target)]
        running.append(subprocess.Popen(command))
        if len(running) == 2:
            _finish(running.pop(0))
    for each in running:
        _finish(each)
    link = [*compiler, "-shared", "-o", str(library), *objects, f"-L{torch_folder / 'lib'}"]
    subprocess.run([*link, "-lc10", "-ltorch_cpu", "-ldl", "-lpthread"], check=True)
    return library


def preloading(library: Path) -> dict[str, str]:
    """The environment in which torch finds a CUDA device when it starts; autograd insists on it."""
    torchs = Path(torch.__file__).parent / "lib"
    preload = [*os.environ.get("LD_PRELOAD", "").split(":"), str(library)]  # the sanitizers' first
    return {"LD_PRELOAD": ":".join(preload).lstrip(":"), "LD_LIBRARY_PATH": str(torchs)}


def build_or_skip(folder: Path) -> Path:
    """``build``, where it has a use."""
    if torch.cuda.is_available():
        pytest.skip("this torch has real CUDA devices: test_cuda.py uses them")
    if torch.version.cuda is not None:
        pytest.skip("this torch is a CUDA build: it registers hooks for CUDA, so the fake cannot")
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return _kept(folder)


def _digest() -> str:
    """A hash of all that the library is made of, and with."""
    folders = ("csrc", "tests/cpp/cuda", "tests/rig/fake_cuda")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    made_with = (torch.__version__, *native.compiler(), sys.executable)
    total = hashlib.sha256("\0".join(made_with).encode())
    for path in sorted(files):
        total.update(str(path).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def _kept(folder: Path) -> Path:
    """What an earlier session has built of the same sources, or a new build, which is kept.

    It takes some forty seconds of a core, and `make test` and `make ci_tests` need it both.
    """
    kept = ROOT / "build" / "fake_cuda" / f"{_digest()}.so"
    library = folder / "libpycomm_cuda.so"
    with contextlib.suppress(FileNotFoundError):  # or another session is just removing it
        shutil.copy2(kept, library)
        return library
    build(folder)
    kept.parent.mkdir(parents=True, exist_ok=True)
    for old in kept.parent.glob("*.so"):
        if old != kept:  # that may be there by now: from a session beside this one
            old.unlink(missing_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}")
    shutil.copy2(library, partial)
    partial.rename(kept)  # whole, or not there
    return library


def _finish(running: subprocess.Popen[bytes]) -> None:
    if running.wait() != 0:
        raise subprocess.CalledProcessError(running.returncode, running.args)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Device:
    """The fake library in this process. Make one before the group whose tensors it serves.

    ``nccl``: the library is also the NCCL that pycomm finds.
    """

    # For ever: memory of the device outlives its tensor.
    _kept: ClassVar[list[Any]] = []
    _arrays: ClassVar[dict[int, tuple[np.ndarray[Any, Any], int]]] = {}

    def __init__(self, library: Path, nccl: bool = False) -> None:
        from pycomm._native import loader

        self.library = ctypes.CDLL(str(library))
        self.library.fake_allocate.restype = ctypes.c_void_p
        self.library.fake_allocate.argtypes = (ctypes.c_int, ctypes.c_size_t)
        for name in ("fake_read", "fake_write"):
            getattr(self.library, name).argtypes = (
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
            )
        loader.CUDA_LIBRARY = library
        if nccl:
            loader.NCCL_LIBRARIES = [library]
            torch.cuda.is_available = lambda: True
        # torch's Python initialises the driver when it meets the first CUDA tensor.
        torch.cuda._lazy_init = lambda: None  # type: ignore[assignment]
        torch.cuda.get_device_capability = lambda *_: (8, 0)  # type: ignore[assignment]

    def tensor(self, array: np.ndarray[Any, Any], index: int = 0) -> torch.Tensor:
        """The array's values on "cuda:index", in memory that stays.

        ``synchronize`` writes what the tensor holds then to the array.
        """
        ptr = self.library.fake_allocate(index, array.nbytes)
        self._write(ptr, array)
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        managed = _ManagedTensor()
        managed.tensor = _Tensor(
            ptr,
            _DLPACK_CUDA,
            index,
            array.ndim,
            _DLPACK_CODES[array.dtype.kind],
            8 * array.itemsize,
            1,
            shape,
            None,
            0,
        )
        self._kept += [shape, managed]
        self._arrays[array.ctypes.data] = (array, ptr)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return from_dlpack(make(ctypes.addressof(managed), b"dltensor", None))

    def synchronize(self, index: int = 0) -> None:
        """Waits until the current stream has finished its work; arrays follow tensors."""
        self.library.fake_synchronize(index)
        self.fetch()

    def fetch(self) -> None:
        """Writes what tensors hold now to their arrays."""
        for array, ptr in self._arrays.values():
            target = ctypes.c_void_p(array.ctypes.data)
            assert self.library.fake_read(target, ctypes.c_void_p(ptr), array.nbytes) == 0

    def memory(self, array: np.ndarray[Any, Any]) -> int:
        """The array's bytes in memory of the device, which stays: its address."""
        ptr = int(self.library.fake_allocate(0, array.nbytes))
        self._write(ptr, array)
        return ptr

    def read(self, ptr: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Reads device memory into an array of the same shape and type."""
        array = np.empty_like(like)
        target = ctypes.c_void_p(array.ctypes.data)
        assert self.library.fake_read(target, ctypes.c_void_p(ptr), array.nbytes) == 0
        return array

    def _write(self, ptr: int, array: np.ndarray[Any, Any]) -> None:
        assert array.flags.c_contiguous
        source = ctypes.c_void_p(array.ctypes.data)
        assert self.library.fake_write(ctypes.c_void_p(ptr), source, array.nbytes) == 0
