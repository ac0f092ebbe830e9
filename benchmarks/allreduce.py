"""Time all_reduce over several backends: `python benchmarks/allreduce.py --help`."""

from __future__ import annotations

import sys

import harness
from whole_sum import AllReduce

if __name__ == "__main__":
    sys.exit(harness.main(AllReduce()))
