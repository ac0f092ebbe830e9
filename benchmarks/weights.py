"""What `weight="samples"` costs a step: `python benchmarks/weights.py`.

See wrapper_cost.py. In the second row rank 1's loader is late by two milliseconds in each step, so
that rank 0 enters backward first. All batches are equally large.
"""

from __future__ import annotations

import sys

from wrapper_cost import Rows, compare

if __name__ == "__main__":
    LATE = Rows("--late-ms", float, "late ms", (0.0, 2.0))
    WRAPPERS = [{"weight": None}, {"weight": "samples"}]
    sys.exit(compare("weights", __doc__ or "", "samples", LATE, lambda _: WRAPPERS))
