"""Wire codecs: encodings of float32 sums. Formats and errors: docs/codecs.md."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from pycomm._group.creation import native_backend
from pycomm._native import loader
from pycomm._settings import WIRE_DTYPES, wire_dtype_name

CODECS = tuple(name for name in WIRE_DTYPES if name != "fp32")
"""Names of all codecs that change bytes."""


@dataclasses.dataclass(frozen=True)
class CodecStats:
    """Counters of a group's codec on this rank since the group was made.

    Example::

        stats = pycomm.codecs.codec_stats()
        print(f"{stats.bytes_sent} bytes in place of {stats.bytes_sent + stats.bytes_saved}")
    """

    elements_sent: int
    """Values that this rank has sent encoded: contributions and results."""
    bytes_sent: int
    """The bytes of those."""
    bytes_saved: int
    """How many bytes more they would have been in their own dtype."""
    overflows: int
    """Finite values that encoding or adding up on this rank turned into infinities, being beyond or
    next to the largest float32. Infinities and NaNs that were there before are passed on and do not
    count."""


def codec_stats(group: dist.ProcessGroup | None = None) -> CodecStats:
    """Bytes saved by a group's ``Options.wire_dtype``, and its loss, on this rank. Does not block.

    Args:
        group: Default: the default group.

    Raises:
        ValueError: The group is not pycomm's, or there is no group.
    """
    backend = native_backend(group)
    return CodecStats(**loader.native.codec_stats(backend))


def all_reduce(
    tensor: torch.Tensor,
    wire_dtype: str | torch.dtype | None,
    *,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    residual: torch.Tensor | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``dist.all_reduce`` of one tensor that travels as ``wire_dtype`` instead of the group's own.

    A call that a group with that ``Options.wire_dtype`` would not encode (a small tensor, another
    dtype or operation) is not encoded here either. All ranks must pass the same.

    Args:
        tensor: As for ``dist.all_reduce``.
        wire_dtype: "bf16", "fp16" or "int8"; None or "fp32" for its own dtype; ``torch.float16``
            and the like.
        op: As for ``dist.all_reduce``.
        group: A group of pycomm; default: the default group.
        residual: (as tensor) float32, contiguous. Error feedback: the same tensor in every call,
            zeros in the first. Its values travel with ``tensor``. Then it holds the loss of
            encoding on this rank: of these values, and of the sums that the rank made. So nothing
            is lost for good. For float32 and ``ReduceOp.SUM`` only. Zeros if nothing is encoded.
        async_op: Whether to return at once, with the operation.

    Returns:
        None when the sum is in ``tensor``; with ``async_op`` the operation. As for
        ``dist.all_reduce``, a CPU tensor blocks the calling thread and a CUDA tensor orders the
        current stream.

    Raises:
        ValueError: The group is not pycomm's, or ``wire_dtype`` is none.
        InvalidArgumentError: A dtype, shape or operation does not fit, before anything is sent.
        PycommError: The operation failed; with ``async_op`` from ``wait()``.
    """
    work = loader.native.all_reduce_as(
        native_backend(group),
        tensor,
        "fp32"
        if wire_dtype is None
        else wire_dtype_name("codecs.all_reduce: wire_dtype", wire_dtype),
        residual,
        op,
        async_op,
    )
    if async_op:
        return work
    work.wait()
    return None


def encode(codec: str, values: torch.Tensor, *, error: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes that ``values`` travel as.

    Blocks of 256 values are counted from the first one: rows cut at multiples of 256 have the same
    bytes as the whole.

    Args:
        codec: "bf16", "fp16" or "int8".
        values: (any shape) float32, float64, float16 or bfloat16; contiguous, CPU.
        error: (as values) Gets the loss, ``values - decode(encode(values))``, and 0 if that is not
            finite; float32, as values must be then. May be ``values``.

    Returns:
        uint8, one dimension. A finite value beyond the largest float32 becomes infinite.

    Raises:
        InvalidArgumentError: An argument does not fit.
        UnsupportedError: Another dtype.
    """
    codes: torch.Tensor
    codes, _ = loader.native.encode(wire_dtype_name("codec", codec), values, error)
    return codes


def decode_sum(
    codec: str, rows: list[torch.Tensor], output: torch.Tensor, *, divisor: int = 1
) -> None:
    """Adds up encoded rows in float32, from the first to the last, divides, and stores.

    Args:
        codec: As for ``encode``.
        rows: Results of ``encode`` for as many values as output has elements; one row at least.
        output: Same dtypes as for ``encode``; contiguous, CPU.
        divisor: 1 or more.

    Raises:
        InvalidArgumentError: An argument does not fit.
        UnsupportedError: Another dtype.
    """
    loader.native.sum_decoded(wire_dtype_name("codec", codec), rows, output, divisor)
