"""The functions of libpycomm_cuda.so, called from Python: for tests and benchmarks of its kernels.

The layout is that of csrc/device/cuda_table.h; the library says its size, which is compared here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = 7
NO_KERNEL = -1
MAX_SEGMENTS = 1900
MAX_SOURCES = 1024
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
SIZES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}  # of a bucket's elements
CODECS = {"bf16": 1, "fp16": 2, "int8": 3}
OPS = {"sum": 1, "avg": 2, "product": 3, "min": 4, "max": 5}
_FUNCTIONS = (
    "error_name",
    "error_text",
    "set_device",
    "check_device",
    "device_uuid",
    "allocate_pinned",
    "free_pinned",
    "allocate_device",
    "free_device",
    "copy",
    "create_event",
    "destroy_event",
    "record",
    "stream_wait",
    "create_stream",
    "destroy_stream",
    "when_reached",
    "is_capturing",
    "has_reduce",
    "pack",
    "unpack",
    "write_exponent",
    "reduce",
    "encode",
    "decode",
)


class CudaError(RuntimeError):
    """What the library refused, with its own words."""


class Segment(ctypes.Structure):
    """A run of a bucket that is one run of memory: it ends at ``end`` elements of its launch."""

    _fields_ = (("ptr", ctypes.c_void_p), ("end", ctypes.c_uint64))


class BucketArgs(ctypes.Structure):
    """One launch of the pack or unpack kernel."""

    _fields_ = (
        ("bucket", ctypes.c_void_p),
        ("stats", ctypes.c_void_p),
        ("numel", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("factor", ctypes.c_float),
        ("segments", Segment * MAX_SEGMENTS),
    )


class ExponentArgs(ctypes.Structure):
    """One launch of the kernel that writes a bucket's tail."""

    _fields_ = (
        ("stats", ctypes.c_void_p),
        ("tail", ctypes.c_void_p),
        ("numel", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
    )


class ReduceArgs(ctypes.Structure):
    """One launch of the reduce kernel, which computes ``head`` and ``vectors`` itself."""

    _fields_ = (
        ("dst", ctypes.c_void_p),
        ("numel", ctypes.c_uint64),
        ("head", ctypes.c_uint64),
        ("vectors", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("divisor", ctypes.c_uint32),
        ("sources", ctypes.c_void_p * MAX_SOURCES),
    )


class CodecArgs(ctypes.Structure):
    """One launch of the encode or decode kernel."""

    _fields_ = (
        ("codec", ctypes.c_uint8),
        ("numel", ctypes.c_uint64),
        ("parts", ctypes.c_uint64),
        ("values", ctypes.c_void_p),
        ("encoded", ctypes.c_void_p),
        ("overflows", ctypes.c_void_p),
    )


class Bucket:
    """Gradients, one after the other, as launches of the kernels: (first element, arguments).

    Made once and used again, as it takes longer than a kernel for hundreds of gradients.
    """

    def __init__(self, gradients: Sequence[tuple[int, int]]) -> None:
        """``gradients``: pointers and numels; pointer 0 is a parameter without a gradient."""
        self.launches: list[tuple[int, BucketArgs]] = []
        begin = 0
        present = [(ptr, numel) for ptr, numel in gradients if numel > 0]
        for first in range(0, len(present), MAX_SEGMENTS):
            args = BucketArgs()
            for ptr, numel in present[first : first + MAX_SEGMENTS]:
                args.numel += numel
                args.segments[args.count] = Segment(ptr or None, args.numel)
                args.count += 1
            self.launches.append((begin, args))
            begin += args.numel


Gradients = Sequence[tuple[int, int]] | Bucket


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

    def _call(self, name: str, *arguments: Any, does: str) -> None:
        types = [type(argument) for argument in arguments]
        result = ctypes.CFUNCTYPE(ctypes.c_int, *types)(getattr(self._table, name))(*arguments)
        if result == NO_KERNEL:
            raise CudaError(f"there is no kernel that {does}")
        if result != 0:
            raise CudaError(f"CUDA: the launch of the {name} kernel failed. {self._words(result)}")

    def _words(self, error: int) -> str:
        """What CUDA calls the error, and what it has to say about it."""
        ask = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)
        name = ask(self._table.error_name)(error)
        return f"{name.decode()} ({ask(self._table.error_text)(error).decode()})"

    def _bucket(
        self,
        name: str,
        gradients: Gradients,
        grad: str,
        wire: str,
        bucket: int,
        factor: float,
        stats: int,
        stream: int,
    ) -> None:
        plan = gradients if isinstance(gradients, Bucket) else Bucket(gradients)
        for begin, args in plan.launches:
            args.bucket = bucket + begin * SIZES[wire]
            args.stats = stats or None
            args.factor = factor
            self._call(
                name,
                ctypes.c_uint8(DTYPES[grad]),
                ctypes.c_uint8(DTYPES[wire]),
                ctypes.pointer(args),
                ctypes.c_void_p(stream),
                does=f"{name}s {grad} gradients as {wire}",
            )

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
        self._bucket("pack", gradients, grad, wire, bucket, factor, stats, stream)

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
        self._bucket("unpack", gradients, grad, wire, bucket, factor, 0, stream)

    def write_exponent(self, stats: int, tail: int, numel: int, rank: int, stream: int = 0) -> None:
        """tail[rank] = the code of the stats' largest magnitude, the others 0; float16."""
        args = ExponentArgs(stats, tail, numel, rank)
        does = "writes a bucket's tail"
        self._call("write_exponent", ctypes.pointer(args), ctypes.c_void_p(stream), does=does)

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
        args = ReduceArgs(dst=dst, numel=numel, count=len(sources))
        args.divisor = len(sources) if op == "avg" else 1
        args.sources[: len(sources)] = sources
        self._call(
            "reduce",
            ctypes.c_uint8(DTYPES[dtype]),
            ctypes.c_uint8(OPS[op]),
            ctypes.pointer(args),
            ctypes.c_void_p(stream),
            does=f"folds {dtype} by {op}",
        )

    def encode(self, codec: str, values: int, numel: int, encoded: int, stream: int = 0) -> None:
        """encoded = the wire codec's bytes of ``numel`` float32 values."""
        self._codec("encode", codec, values, numel, encoded, stream)

    def decode(self, codec: str, encoded: int, numel: int, values: int, stream: int = 0) -> None:
        """values = what the wire codec's bytes stand for."""
        self._codec("decode", codec, values, numel, encoded, stream)

    def _codec(
        self, name: str, codec: str, values: int, numel: int, encoded: int, stream: int
    ) -> None:
        args = CodecArgs(CODECS[codec], numel, 1, values, encoded, None)
        self._call(name, ctypes.pointer(args), ctypes.c_void_p(stream), does=f"{name}s {codec}")
