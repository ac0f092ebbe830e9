"""Inputs whose results are exact in every dtype, and the count of elements that came out wrong.

A check is worth something only if right is one bit pattern. So inputs are small positive whole
numbers: no sum of them is rounded in any order of adding, and leaving out any rank, or adding one
twice, changes every element of a sum. The expected result is computed in int64 by numpy, from the
seeds alone and not from what any rank sent.

Numbers repeat with a prime period, so that whatever lands in the wrong place by a power of two, by
a segment or by a rank's chunk is seen. Example with period 3 and two ranks, seven elements:

    rank 0   1 6 2 1 6 2 1
    rank 1   4 1 3 4 1 3 4
    sum      5 7 5 5 7 5 5     a shift by 1, 2 or 4 elements shows
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

Pattern = npt.NDArray[np.int64]

PERIOD = 8191

# Above this, not every whole number is a value of the dtype.
_EXACT_UP_TO = {
    torch.bfloat16: 1 << 8,
    torch.float16: 1 << 11,
    torch.float32: 1 << 24,
    torch.float64: 1 << 53,
}

_REDUCE: dict[str, Callable[[Pattern], Pattern]] = {
    "sum": lambda stacked: np.add.reduce(stacked),
    "avg": lambda stacked: np.add.reduce(stacked) // len(stacked),
    "prod": lambda stacked: np.multiply.reduce(stacked),
    "min": lambda stacked: np.minimum.reduce(stacked),
    "max": lambda stacked: np.maximum.reduce(stacked),
}

REDOPS = tuple(_REDUCE)


def pattern(rank: int, seed: int, ranks: int, redop: str) -> Pattern:
    """Make one period of a rank's input, as int64."""
    numbers = np.random.default_rng([seed, rank]).integers(1, 7, PERIOD)
    if redop == "prod":
        return numbers % 2 + 1  # 1 or 2: products are powers of two
    # A sum that the number of ranks divides, so that the average is whole too.
    return numbers * ranks if redop == "avg" else numbers


def reduced_pattern(seed: int, ranks: int, redop: str) -> Pattern:
    """Make one period of the reduction over all ranks' inputs, as int64."""
    return _REDUCE[redop](np.stack([pattern(rank, seed, ranks, redop) for rank in range(ranks)]))


def check_exact(dtype: torch.dtype, ranks: int, redop: str) -> None:
    """Raise ValueError where a dtype cannot hold every partial result exactly."""
    if redop == "prod":
        if dtype == torch.float16 and ranks > 15:
            raise ValueError(f"a product over {ranks} ranks may overflow {dtype}")
        return
    largest = 6 * ranks * (ranks if redop == "avg" else 1)
    if largest > _EXACT_UP_TO.get(dtype, largest):
        raise ValueError(f"{redop} over {ranks} ranks is not exact in {dtype}")


def _periods(flat: torch.Tensor, numbers: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
    whole = flat.numel() // PERIOD * PERIOD
    return flat[:whole].view(-1, PERIOD), torch.from_numpy(numbers).to(flat.dtype)


def fill(flat: torch.Tensor, numbers: Pattern) -> None:
    """Write the pattern over and over into a contiguous 1-D tensor."""
    rows, values = _periods(flat, numbers)
    rows.copy_(values.expand_as(rows))
    rest = flat[rows.numel() :]
    rest.copy_(values[: rest.numel()])


def count_wrong(flat: torch.Tensor, numbers: Pattern, tolerance: float = 0.0) -> int:
    """Count the elements of a contiguous 1-D tensor that differ from the repeated pattern.

    Integer dtypes wrap, as the reduction does. NaN is wrong. A tolerance is for values that were
    rounded on the wire.
    """
    rows, values = _periods(flat, numbers)
    rest = flat[rows.numel() :]

    def count(found: torch.Tensor, right: torch.Tensor) -> int:
        if tolerance == 0.0:
            return int((found != right).sum())
        return int((~((found - right).abs() <= tolerance)).sum())

    return count(rows, values) + count(rest, values[: rest.numel()])


def rounding_on_the_wire(codec: str, ranks: int) -> float:
    """Return by how much a sum over ranks may differ when it travels in a codec.

    fp16 holds these sums exactly. The others round each rank's part and then the sum: int8 by half
    of 1/127 of the largest value of a block.
    """
    largest = 6.0 * ranks
    steps = {"bf16": 1 / 256, "int8": 1 / 254}
    return 2 * largest * steps.get(codec, 0.0)
