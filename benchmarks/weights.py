"""What `weight="samples"` costs a step: `python benchmarks/weights.py --width 512 768`.

See wrapper_cost.py. Each rank computes 32 rows in each step. Rows of the table:

    control  Both wrappers have no weights: what the table itself is off by.
    equal    Both ranks count alike, so that nothing is multiplied.
    unequal  Rank 0 counts as 24 samples, and rank 1 as 40, so that gradients are multiplied as they
             are packed. Both compute as long, so that neither waits for the other.
    late     As `equal`; rank 1's loader is late by two milliseconds in each step, so that rank 0
             enters backward first.
"""

from __future__ import annotations

import argparse
import sys

from wrapper_cost import Rows, Trial, compare

ROWS = Rows("--row", str, "row", ("control", "equal", "unequal", "late"))


def trial(options: argparse.Namespace) -> Trial:
    return Trial(
        [{"weight": None}, {"weight": None if options.row == "control" else "samples"}],
        samples=(24, 40) if options.row == "unequal" else None,
        late_s=0.002 if options.row == "late" else 0.0,
    )


if __name__ == "__main__":
    sys.exit(compare("weights", __doc__ or "", "samples", ROWS, trial))
