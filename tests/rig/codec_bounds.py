"""What one pass through a codec may cost, as csrc/numeric/codec.h promises it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BLOCK = 256
CODECS = ("bf16", "fp16", "int8")
BYTES_PER_BLOCK = {"bf16": 512, "fp16": 514, "int8": 258}


def bound(codec: str, values: Floats) -> Floats:
    """The largest error of each value, whose blocks are counted from the first."""
    blocks = np.arange(values.size) // BLOCK
    largest = np.zeros(blocks[-1] + 1 if values.size else 0)
    np.maximum.at(largest, blocks, np.abs(values))
    m, v = largest[blocks], np.abs(values)
    if codec == "bf16":
        return np.maximum(v * 2.0**-8, 2.0**-134)
    if codec == "fp16":
        return np.maximum.reduce([v * 2.0**-11, m * 2.0**-39, np.full_like(v, 2.0**-150)])
    if codec == "int8":
        return np.maximum(m / 125, m / 126 + 2.0**-133) / 2 + v * 2.0**-24
    raise ValueError(codec)


def sum_bound(codec: str, rows: Floats, divisor: int = 1) -> Floats:
    """Of an all_reduce of the rows: one rounding of each row, those of the sum in float32 (less
    than 2^-22 of the sum of magnitudes, for up to four ranks), and one of the result."""
    lost = sum(bound(codec, row) for row in rows) + np.abs(rows).sum(0) * 2.0**-22
    lost = lost / divisor
    # The result that is rounded may be larger than the exact one by what was lost before.
    exact = np.abs(rows.sum(0)) / divisor + lost
    result: Floats = lost + bound(codec, exact)
    return result
