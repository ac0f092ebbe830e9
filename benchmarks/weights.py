"""What `weight="samples"` costs a step: `python benchmarks/weights.py`.

Two wrappers of the same model, without and with weights, take turns in blocks of steps, on the same
batches. The step is one of some milliseconds of computing. In the second row rank 1's loader is
late by two milliseconds in each step, so that rank 0 enters backward first. The gradients of both
wrappers are compared bit for bit, as all batches are equally large.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from launching import add_rank_options, ran_as_rank, run_ranks
from report import header, paired_ratio
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

STEPS = 40


def measure(
    transport: str, ranks: int, width: int, late_ms: float, pairs: int
) -> dict[str, object]:
    import pycomm

    timeout = timedelta(seconds=120)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout
    )
    rank = int(os.environ["RANK"])
    options = pycomm.Options(transport=transport)
    dist.init_process_group(
        "pycomm", store=store, rank=rank, world_size=ranks, timeout=timeout, pg_options=options
    )
    torch.manual_seed(0)
    net = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh()))
    )
    models = [
        pycomm.DistributedDataParallel(copy.deepcopy(net), weight=weight)
        for weight in (None, "samples")
    ]
    batch = torch.randn(32, width, generator=torch.Generator().manual_seed(rank))

    def block(model: nn.Module) -> float:
        took = []
        for _ in range(STEPS):
            dist.barrier()
            if rank == 1 and late_ms:
                time.sleep(late_ms * 1e-3)
            began = time.perf_counter()
            model.zero_grad()
            model(batch).square().mean().backward()
            took.append(time.perf_counter() - began)
        return sorted(took)[STEPS // 2] * 1e3

    for model in models:
        block(model)
    wrong = sum(
        not torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True)
    )
    times: list[list[float]] = [[], []]
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            times[which].append(block(models[which]))
    dist.destroy_process_group()
    return {"times": times, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--transport", default="")
    parser.add_argument("--late-ms", type=float, default=0.0)
    add_rank_options(parser)
    options = parser.parse_args()
    if ran_as_rank(
        options,
        lambda: measure(
            options.transport, options.ranks, options.width, options.late_ms, options.pairs
        ),
    ):
        return 0
    for key, value in header("weights", sys.argv[1:]).items():
        print(f"{key}: {value}")
    print(f"{'transport':>10}{'late ms':>9}{'None ms':>10}{'samples ms':>12}", end="")
    print("  samples / None [95 %]  wrong")
    wrong = 0
    for transport in ("auto", "tcp"):
        for late in (0.0, 2.0):
            chosen = ["--transport", transport, "--late-ms", str(late)]
            for name in ("ranks", "width", "pairs"):
                chosen += [f"--{name}", str(getattr(options, name))]
            lines: list[bytes] = []
            run_ranks(options.ranks, chosen, 300, lines.append)
            found = json.loads(lines[0])
            plain, weighed = found["times"]
            wrong += found["wrong"]
            ratio = paired_ratio("samples", plain, weighed)
            medians = [sorted(each)[len(each) // 2] for each in (plain, weighed)]
            print(
                f"{transport:>10}{late:9.1f}{medians[0]:10.3f}{medians[1]:12.3f}"
                f"  {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]  {found['wrong']:10}",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
