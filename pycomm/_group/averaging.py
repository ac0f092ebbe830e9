"""Averages whole models between ranks, and finds the ranks that share a host."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm._native import loader

_CHUNK_NBYTES = 32 << 20
SMALL_FLOATS = (torch.float16, torch.bfloat16)
"""Added up, and divided, in float32."""


def ring_nbytes(nbytes: int, ranks: int) -> int:
    """The bytes that one rank sends in an all-reduce of ``nbytes``: 2(N-1)/N times as much."""
    return 2 * (ranks - 1) * nbytes // ranks


def exact_all_reduce(
    tensor: torch.Tensor, group: Any, *, async_op: bool = False, about: str = ""
) -> Any:
    """``dist.all_reduce`` in the tensor's own dtype: a codec of the group does not apply.

    ``about``: its subject. Ranks with another one get a CollectiveMismatchError, over pycomm.
    """
    extension = loader.loaded()  # None: there is no group of pycomm
    with contextlib.nullcontext() if extension is None else extension.ExactSums(about):
        return dist.all_reduce(tensor, group=group, async_op=async_op)


def device_of(group: Any) -> torch.device:
    """Where small tensors for ``group`` are made: the CPU, unless it serves none there."""
    types = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in types or not types else min(types))


def weight_ratio(weight: float, group: Any) -> float:
    """The ranks of ``group`` times this one's share of all their weights: 1 if they are alike.

    Collective. Also 1 if all weights are 0.
    """
    ranks = dist.get_world_size(group)
    weights = torch.zeros(ranks, dtype=torch.float64)
    weights[dist.get_rank(group)] = weight
    weights = weights.to(device_of(group))
    exact_all_reduce(weights, group)
    of_ranks: list[float] = weights.tolist()
    return ratios_of(of_ranks)[dist.get_rank(group)]


def ratios_of(weights: Sequence[float]) -> list[float]:
    """Each rank's weight by the mean weight, exactly 1 if they are alike; the same on all ranks."""
    if all(weight == weights[0] for weight in weights):
        return [1.0] * len(weights)
    total = math.fsum(weights)
    return [len(weights) * weight / total for weight in weights]


def bits_of(number: float) -> int:
    """A float64 among whole numbers that ranks exchange."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def float_of(bits: int) -> float:
    """The inverse of ``bits_of``."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


def average_(tensors: Mapping[str, torch.Tensor], group: Any, ratio: float = 1.0) -> int:
    """Replaces each tensor by its mean over the group; the same bits on all ranks.

    Small floats are added and divided in fp32. A codec of the group does not apply.

    Args:
        tensors: By name. Over pycomm a rank with other names gets a CollectiveMismatchError; over
            NCCL and gloo nobody compares them.
        ratio: Of ``weight_ratio()``: how much this rank counts. 0: not at all, even if it has NaN.

    Returns:
        The bytes that were given to all_reduce.
    """
    ranks = dist.get_world_size(group)
    nbytes = 0
    about = f"the averages of {', '.join(tensors)}"
    for chunk in chunks(tensors.values()):
        flat = torch.cat([_travelling(tensor).flatten() for tensor in chunk])
        if ratio == 0.0:
            flat.zero_()
        elif ratio != 1.0:
            flat *= ratio
        wire = torch.view_as_real(flat) if flat.is_complex() else flat
        exact_all_reduce(wire, group, about=about)
        flat /= ranks
        nbytes += flat.nbytes
        for tensor, part in zip(
            chunk, torch.split(flat, [each.numel() for each in chunk]), strict=True
        ):
            tensor.copy_(part.view(tensor.shape))
    return nbytes


def _travelling(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.float() if detached.dtype in SMALL_FLOATS else detached


def chunks(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Lists of one dtype and device, about 32 MiB each; their order follows from the tensors."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in by_kind.values():
        chunk: list[torch.Tensor] = []
        nbytes = 0
        for tensor in alike:
            chunk.append(tensor)
            nbytes += tensor.nbytes
            if nbytes >= _CHUNK_NBYTES:
                yield chunk
                chunk, nbytes = [], 0
        if chunk:
            yield chunk


def host_identity() -> str:
    """Equal on two ranks when they run on one host, in one network namespace."""
    return loader.native.host_identity()
