"""One training run end to end on a slow link, for time_to_loss.py.

    PYCOMM_ALGO=ring python benchmarks/switch.py --hosts 0,1,2,3 --mbit 78 --burst-kb 20 -- \\
        time_to_loss_check.py FOLDER --method fp16
    python benchmarks/switch.py ... -- time_to_loss_check.py FOLDER --method streaming

The model is small, so the link is slow. --mbit is chosen such that r, the time of a ring for the
gradients in fp32 divided by the time of computing them, is that of 62.5 million parameters on a
gigabit. The burst of the token bucket is smaller in proportion. PYCOMM_ALGO=ring has small buckets
take the algorithm of large ones; sums that are encoded, as StreamingDiLoCo's, have no ring.

A step computes for --compute seconds: the cores compute during a part of it, and a gradient appears
when its place in the backward pass is reached, evenly by bytes over the last two thirds of the
step. Seed 0 trains with the rates of FOLDER/curves. Evaluations are not timed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from quality import Text
from report import header
from time_to_loss_curves import load, save, train
from time_to_loss_pace import Pace
from time_to_loss_product import BY_NAME, SEEDS, STEPS, Run, best_rates
from torch import nn


class PacedSteps:
    """Has a step of ``model`` compute for a fixed time; called before each step."""

    def __init__(self, seconds: float) -> None:
        self._pace = Pace(seconds)
        self._made = self._total = 0

    def __call__(self, model: nn.Module) -> None:
        if self._total == 0:
            for parameter in model.parameters():
                self._total += parameter.numel()
                parameter.register_hook(self._on_gradient)
        self._made = 0
        self._pace.begin()

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        self._made += gradient.numel()
        self._pace.until((1 + 2 * self._made / self._total) / 3)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path)
    add("--method", choices=list(BY_NAME), required=True)
    add("--compute", type=float, default=0.099, help="seconds of a step; default: %(default)s")
    add("--bucket", type=float, default=0.1, help="bucket_cap_mb; default: %(default)s")
    add("--steps", type=int, default=STEPS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("pycomm")
    rates = best_rates(load(options.folder / "curves"), BY_NAME[options.method])
    assert rates is not None, "tuning is not done"
    run = Run(options.method, *rates, SEEDS[0], options.steps)
    found = train(Text(), run, PacedSteps(options.compute), options.bucket)
    if dist.get_rank() == 0:
        found |= {"compute_s": options.compute}
        found |= {"facts": header("time_to_loss_check", argv)}
        found["algo"] = os.environ.get("PYCOMM_ALGO", "")
        (options.folder / "check").mkdir(exist_ok=True)
        save(options.folder / "check", f"{options.method}-steps{options.steps}.json", found)
        print(f"# {options.method} {found['losses'][-1]:.4f} {found['seconds'][-1]:.2f} s")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
