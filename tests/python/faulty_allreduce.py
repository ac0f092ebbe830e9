"""The all_reduce table over an operation with a fault, chosen by FAULT: for test_benchmarks.py."""

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
        fault = os.environ["FAULT"]
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
