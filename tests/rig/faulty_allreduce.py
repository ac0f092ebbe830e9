"""The all_reduce table over an operation with a fault, chosen by FAULT: for test_benchmarks.py.

FAULT is a fault, or several with commas: the first at 4 KiB, the next at 8 KiB, and so on.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import harness
import torch
import torch.distributed as dist
from allreduce import AllReduce


class FaultyAllReduce(AllReduce):
    def call(self, place: harness.Place, output: torch.Tensor, source: torch.Tensor) -> None:
        faults = os.environ["FAULT"].split(",")
        fault = faults[output.numel().bit_length() - 11 if len(faults) > 1 else 0]
        if fault == "nothing_sent":
            return
        mine = source.clone()
        super().call(place, output, source)
        if fault == "other_op":
            output.copy_(mine)
            dist.all_reduce(output, op=dist.ReduceOp.MAX, group=place.group)
        elif fault == "added_twice":
            output += mine
        elif fault == "one_element_of_one_rank" and place.rank == 1:
            output[-1] += 1
        elif fault == "nan":
            output[0] = float("nan")
        elif fault == "shifted":
            output.copy_(output.roll(256))
        elif fault == "rank_exits" and place.rank == 1:
            os._exit(7)
        elif fault == "rank_sleeps" and place.rank == 1:
            time.sleep(600)


if __name__ == "__main__":
    sys.exit(harness.main(FaultyAllReduce()))
