"""What `elastic=` costs a step: `python benchmarks/elastic.py`.

See wrapper_cost.py. No rank dies.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from wrapper_cost import Rows, compare


def wrappers(options: argparse.Namespace) -> list[dict[str, Any]]:
    import pycomm

    wire = {"wire_dtype": options.wire_dtype}
    return [wire | {"elastic": elastic} for elastic in (None, pycomm.Elastic())]


if __name__ == "__main__":
    WIRES = Rows("--wire-dtype", str, "wire", ("fp32", "fp16", "int8"))
    sys.exit(compare("elastic", __doc__ or "", "elastic", WIRES, wrappers))
