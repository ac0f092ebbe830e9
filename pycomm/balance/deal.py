"""Which samples of a dataset each rank trains on, as a function of seed, epoch, step and shares."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """The indices of a dataset in the order of an epoch: (length,) int64, on the CPU.

    The generator's seed is a hash, since epoch 1 of seed 0 must not be epoch 0 of seed 1.
    """
    if not shuffle:
        return torch.arange(length)
    hashed = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(hashed, "little") >> 1)
    return torch.randperm(length, generator=generator)


def rank_part(order: torch.Tensor, step: int, shares: Sequence[int], rank: int) -> list[int]:
    """A rank's indices: step k has the k-th piece of the order, cut into the ranks' shares.

    The pieces do not depend on shares or on the number of ranks. Example, 8 samples in order,
    shares 3 and 1: step 0 is [0 1 2 | 3], and step 1 is [4 5 6 | 7].
    """
    begin = step * sum(shares) + sum(shares[:rank])
    part: list[int] = order[begin : begin + shares[rank]].tolist()
    return part
