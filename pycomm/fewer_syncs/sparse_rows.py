"""The largest entries of rows of 4,096, in 14 bits each.

A row's ``top_k`` largest entries are sent in the order of their size, so sizes need few bits: each
sixteen of them share one magnitude. Of a row and of top_k = 64:

    64 positions in the row, 12 bits each     96 bytes, two positions in three bytes
    64 signs                                   8 bytes
    4 magnitudes, bfloat16                     8 bytes: the mean of 16 neighbours in that order

Each of the three parts is stored for all rows before the next one begins.
"""

from __future__ import annotations

import torch

ROW = 4096
GROUP = 16
"""Entries that share a magnitude; ``top_k`` is a multiple."""


def payload_nbytes(rows: int, top_k: int) -> int:
    """14 bits for each entry."""
    return rows * top_k * 14 // 8


def select(rows: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries to send.

    Args:
        rows: (any, 4096) float32.
        top_k: A multiple of 16.

    Returns:
        Positions, (any, top_k) int16, and values, (any, top_k) float32, as ``unpack`` will return
        them. NaN counts as the largest, then infinities; either makes the magnitude of its group
        one.
    """
    sizes, positions = rows.abs().topk(top_k, dim=1, sorted=True)
    magnitudes = sizes.view(-1, GROUP).mean(dim=1).bfloat16()
    values = magnitudes.float().repeat_interleave(GROUP).view(sizes.shape)
    negative = rows.gather(1, positions) < 0
    return positions.to(torch.int16), torch.where(negative, -values, values)


def pack(positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The bytes of a result of ``select``: ``payload_nbytes``, uint8."""
    first, second = positions.int().view(-1, 2).unbind(1)
    packed = torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], dim=1)
    bits = torch.arange(8, dtype=torch.int32, device=values.device)
    signs = (torch.signbit(values).int().view(-1, 8) << bits).sum(dim=1)
    magnitudes = values.view(-1, GROUP)[:, 0].abs().bfloat16()
    parts = [packed.flatten().to(torch.uint8), signs.to(torch.uint8), magnitudes.view(torch.uint8)]
    return torch.cat(parts)


def rows_of(payload: torch.Tensor, top_k: int, begin: int, end: int) -> torch.Tensor:
    """The bytes of rows ``begin`` to ``end``, as if only these had been packed."""
    entries = payload.numel() * 8 // 14
    parts = torch.split(payload, [entries * 3 // 2, entries // 8, entries // 8])
    sizes = [top_k * 3 // 2, top_k // 8, top_k // 8]  # of one row
    found = zip(parts, sizes, strict=True)
    return torch.cat([part[begin * size : end * size] for part, size in found])


def unpack(payload: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The reverse: positions as int64, for ``scatter_add_``, and values."""
    entries = payload.numel() * 8 // 14
    sizes = [entries * 3 // 2, entries // 8, entries // 8]
    packed, signs, halves = torch.split(payload, sizes)
    low, middle, high = packed.long().view(-1, 3).unbind(1)
    positions = torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=1)
    bits = torch.arange(8, dtype=torch.uint8, device=payload.device)
    negative = ((signs.unsqueeze(1) >> bits) & 1).bool().flatten()
    # A part may begin at any byte, and a bfloat16 only at an even one.
    magnitudes = halves.clone().view(torch.bfloat16).float().repeat_interleave(GROUP)
    values = torch.where(negative, -magnitudes, magnitudes)
    return positions.view(-1, top_k), values.view(-1, top_k)
