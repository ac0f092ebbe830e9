"""What error feedback's check for Inf and NaN costs a step: `python benchmarks/nonfinite.py`.

See wrapper_cost.py. A width of 2560 has 105 MB of gradients, all of which the check reads.
"""

from __future__ import annotations

import argparse
import sys

from wrapper_cost import Rows, Trial, compare


def trial(options: argparse.Namespace) -> Trial:
    wire = {"wire_dtype": options.wire_dtype, "error_feedback": True}
    return Trial([wire | {"drops_nonfinite_steps": drops} for drops in (False, True)])


if __name__ == "__main__":
    WIRES = Rows("--wire-dtype", str, "wire", ("int8",))
    sys.exit(compare("nonfinite", __doc__ or "", "checked", WIRES, trial))
