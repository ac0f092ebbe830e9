"""Checks, before anything is averaged, that all ranks train the same model."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm.errors import ConfigMismatchError

_HASH_PARTS = 2  # 64 bits each: one int64 tensor carries them on any backend


def check_same_on_all_ranks(
    group: Any,
    device: torch.device,
    *,
    options: Mapping[str, object],
    parameters: Iterable[tuple[str, torch.Tensor]],
    buffers: Iterable[tuple[str, torch.Tensor]],
) -> str:
    """Compares names, shapes, dtypes, strides and options; not values. Returns them, a line each.

    All ranks see the same bytes, so either none raises or all do, with the same text.

    Raises:
        ConfigMismatchError: Naming the first thing that differs, and the ranks.

    Cost: an all-gather of 24 bytes per rank; another, of the descriptions, only if they differ.
    """
    lines = [f"option\t{name}\t{value!r}" for name, value in options.items()]
    lines += [_describe("parameter", name, tensor) for name, tensor in parameters]
    lines += [_describe("buffer", name, tensor) for name, tensor in buffers]
    description = "\n".join(lines)
    text = description.encode()
    digest = hashlib.sha256(text).digest()
    parts = [
        int.from_bytes(digest[8 * part : 8 * part + 8], "little", signed=True)
        for part in range(_HASH_PARTS)
    ]
    mine = torch.tensor([len(text), *parts], dtype=torch.int64, device=device)
    digests = _gather(mine, group)
    if all(torch.equal(other, mine) for other in digests):
        return description
    sizes = [int(other[0]) for other in digests]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    texts = [
        bytes(other[:size].tolist()).decode()
        for other, size in zip(_gather(padded, group), sizes, strict=True)
    ]
    raise ConfigMismatchError(_first_difference(texts, dist.get_process_group_ranks(group)))


def checksum_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of their bits, in order: from 1 to 2**63 - 1. Copies them to the host, one by one."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = tensor.detach().flatten().cpu().contiguous()
        digest.update(flat.view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little") >> 1 or 1


def gather_numbers(numbers: Sequence[int], group: Any, device: torch.device) -> list[list[int]]:
    """The numbers of each rank, which has as many. Collective; waits on the host.

    Cost: an all-gather of 8 bytes for each number.
    """
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    return [other.tolist() for other in _gather(mine, group)]


def _describe(kind: str, name: str, tensor: torch.Tensor) -> str:
    """Its kind, name and properties, separated by tabs."""
    strided = tensor.layout == torch.strided
    layout = f"strides {tuple(tensor.stride())}" if strided else str(tensor.layout)
    shape = "×".join(str(size) for size in tensor.shape) or "scalar"
    return f"{kind}\t{name}\t{shape} {tensor.dtype} ({layout})"


def _gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def _first_difference(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """The first difference between the first rank and the first that differs from it.

    ``ranks`` has their numbers in the job, by their number in the group.
    """
    different = [rank for rank, text in enumerate(texts) if text != texts[0]]
    rank = different[0]
    first, named = ranks[0], [ranks[each] for each in different]
    others = f"; ranks {named} differ from rank {first}" if len(named) > 1 else ""
    return (
        "the models on the ranks differ: "
        + first_difference(texts[0], texts[rank], f"rank {first}", f"rank {named[0]}")
        + f"{others}. "
        + "All ranks must wrap the same model with the same options."
    )


def first_difference(text: str, other_text: str, of: str, of_other: str) -> str:
    """Of two descriptions that differ; ``of`` and ``of_other``: whose they are."""
    lines = itertools.zip_longest(text.split("\n"), other_text.split("\n"))
    mine, other = next((mine, other) for mine, other in lines if mine != other)
    return _compare(mine, other, of, of_other)


def _compare(first: str | None, other: str | None, zero: str, rank: str) -> str:
    if first is None or other is None:
        kind, name, what = (first or other or "").split("\t")
        has, lacks = (zero, rank) if other is None else (rank, zero)
        return f"{kind} {name!r}, {what}, exists on {has} and not on {lacks}"
    kind, name, what = first.split("\t")
    other_kind, other_name, other_what = other.split("\t")
    if (kind, name) == (other_kind, other_name):
        return f"{kind} {name!r} is {what} on {zero} and {other_what} on {rank}"
    return f"where {zero} has {kind} {name!r}, {rank} has {other_kind} {other_name!r}"
