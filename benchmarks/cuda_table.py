"""The functions of libpycomm_cuda.so, called from Python: for tests and benchmarks of its kernels.

The layout is that of csrc/cuda/c_api.h; the library says its size, which is compared here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = 5
DTYPES = {
    "uint8": 0,
    "int8": 1,
    "int32": 5,
    "int64": 7,
    "float16": 9,
    "bfloat16": 10,
    "float32": 11,
    "float64": 12,
    "float8_e4m3fn": 15,
    "float8_e5m2": 16,
}
CODECS = {"bf16": 1, "fp16": 2, "fp8": 3, "int8": 4}
OPS = {"sum": 1, "avg": 2, "product": 3, "min": 4, "max": 5}
_FUNCTIONS = (
    "check_device",
    "device_uuid",
    "copy",
    "is_capturing",
    "pack",
    "unpack",
    "reduce",
    "encode",
    "decode",
    "stager_create",
    "stager_destroy",
    "stager_stop",
    "stager_take",
    "stager_give",
    "stager_to_host",
    "stager_to_device",
    "stager_wait_on",
    "nccl_probe",
    "nccl_create",
    "nccl_destroy",
    "nccl_origin",
    "nccl_start",
    "nccl_done",
    "nccl_free_work",
    "nccl_poll",
    "nccl_abort",
)


class CudaError(RuntimeError):
    """What the library refused, with its own words."""


class Failure(ctypes.Structure):
    """PycommCudaError."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("summary", ctypes.c_char * 512),
        ("hint", ctypes.c_char * 256),
        ("cause", ctypes.c_char * 512),
        ("rank", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("sequence", ctypes.c_int64),
        ("numel", ctypes.c_int64),
        ("elapsed_ms", ctypes.c_int64),
        ("op", ctypes.c_char * 48),
        ("dtype", ctypes.c_char * 24),
        ("phase", ctypes.c_char * 24),
        ("group", ctypes.c_char * 128),
    )


class Gradient(ctypes.Structure):
    """PycommCudaGradient."""

    _fields_ = (("ptr", ctypes.c_void_p), ("numel", ctypes.c_uint64))


Gradients = Sequence[tuple[int, int]] | ctypes.Array[Gradient]


class _Table(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32),
        ("nbytes", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in _FUNCTIONS),
    )


class CudaTable:
    """One loaded library. Pointers are integers; a stream is torch's ``cuda_stream``."""

    def __init__(self, library: Path) -> None:
        entry = ctypes.CDLL(str(library)).pycomm_cuda_table
        entry.restype = ctypes.POINTER(_Table)
        self._table = entry().contents
        if (self._table.version, self._table.nbytes) != (VERSION, ctypes.sizeof(_Table)):
            raise CudaError(f"{library} has another interface than this file")

    def _call(self, name: str, *arguments: Any) -> None:
        failure = ctypes.pointer(Failure())
        types = [type(argument) for argument in (*arguments, failure)]
        function = ctypes.CFUNCTYPE(ctypes.c_uint16, *types)(getattr(self._table, name))
        if function(*arguments, failure) != 0:
            failure = failure.contents
            raise CudaError(f"{failure.summary.decode()} {failure.cause.decode()}".strip())

    def pack(
        self,
        gradients: Gradients,
        grad: str,
        wire: str,
        bucket: int,
        *,
        factor: float = 1.0,
        stats: int = 0,
        stream: int = 0,
    ) -> None:
        """bucket = wire(gradients * factor); ``gradients``: pointers and numels."""
        self._call(
            "pack",
            gradient_list(gradients),
            ctypes.c_size_t(len(gradients)),
            ctypes.c_uint8(DTYPES[grad]),
            ctypes.c_uint8(DTYPES[wire]),
            ctypes.c_void_p(bucket),
            ctypes.c_float(factor),
            ctypes.c_void_p(stats),
            ctypes.c_void_p(stream),
        )

    def unpack(
        self,
        gradients: Gradients,
        grad: str,
        wire: str,
        bucket: int,
        *,
        factor: float = 1.0,
        stream: int = 0,
    ) -> None:
        """gradients = grad(bucket * factor)."""
        self._call(
            "unpack",
            gradient_list(gradients),
            ctypes.c_size_t(len(gradients)),
            ctypes.c_uint8(DTYPES[grad]),
            ctypes.c_uint8(DTYPES[wire]),
            ctypes.c_void_p(bucket),
            ctypes.c_float(factor),
            ctypes.c_void_p(stream),
        )

    def reduce(
        self,
        dtype: str,
        op: str,
        dst: int,
        sources: Sequence[int],
        numel: int,
        *,
        stream: int = 0,
    ) -> None:
        """dst = the fold of the sources; avg divides by their number."""
        pointers = (ctypes.c_void_p * len(sources))(*sources)
        self._call(
            "reduce",
            ctypes.c_uint8(DTYPES[dtype]),
            ctypes.c_uint8(OPS[op]),
            ctypes.c_void_p(dst),
            pointers,
            ctypes.c_size_t(len(sources)),
            ctypes.c_uint64(numel),
            ctypes.c_uint32(len(sources)),
            ctypes.c_void_p(stream),
        )

    def encode(self, codec: str, values: int, numel: int, encoded: int, stream: int = 0) -> None:
        """encoded = the wire codec's bytes of ``numel`` float32 values."""
        self._codec("encode", codec, values, numel, encoded, ctypes.c_void_p(0), stream=stream)

    def decode(self, codec: str, encoded: int, numel: int, values: int, stream: int = 0) -> None:
        """values = what the wire codec's bytes stand for."""
        self._codec("decode", codec, encoded, numel, values, stream=stream)

    def _codec(
        self, name: str, codec: str, src: int, numel: int, dst: int, *more: Any, stream: int
    ) -> None:
        self._call(
            name,
            ctypes.c_uint8(CODECS[codec]),
            ctypes.c_void_p(src),
            ctypes.c_uint64(numel),
            ctypes.c_uint64(1),
            ctypes.c_void_p(dst),
            *more,
            ctypes.c_void_p(stream),
        )


def gradient_list(gradients: Gradients) -> ctypes.Array[Gradient]:
    """The same as an array of PycommCudaGradient; of hundreds it takes longer than a kernel."""
    if isinstance(gradients, ctypes.Array):
        return gradients
    return (Gradient * len(gradients))(*[Gradient(ptr or None, numel) for ptr, numel in gradients])
