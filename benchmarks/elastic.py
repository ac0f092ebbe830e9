"""What `elastic=` costs a step: `python benchmarks/elastic.py`.

See wrapper_cost.py. No rank dies.
"""

from __future__ import annotations

import argparse
import sys

from wrapper_cost import Rows, Trial, compare


def trial(options: argparse.Namespace) -> Trial:
    import pycomm

    wire = {"wire_dtype": options.wire_dtype}
    return Trial([wire | {"elastic": elastic} for elastic in (None, pycomm.Elastic())])


if __name__ == "__main__":
    WIRES = Rows("--wire-dtype", str, "wire", ("fp32", "fp16", "int8"))
    sys.exit(compare("elastic", __doc__ or "", "elastic", WIRES, trial))
