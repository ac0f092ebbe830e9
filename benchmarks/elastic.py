"""What `elastic=` costs a step: `python benchmarks/elastic.py`.

Two wrappers of the same model, without and with `elastic`, take turns in blocks of steps, on the
same batches. The step is one of some milliseconds of computing. No rank dies. The gradients of both
wrappers are compared bit for bit.
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
    transport: str, wire_dtype: str | None, ranks: int, width: int, pairs: int
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
        pycomm.DistributedDataParallel(copy.deepcopy(net), wire_dtype=wire_dtype, elastic=elastic)
        for elastic in (None, pycomm.Elastic())
    ]
    batch = torch.randn(32, width, generator=torch.Generator().manual_seed(rank))

    def block(model: nn.Module) -> float:
        took = []
        for _ in range(STEPS):
            dist.barrier()
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
    parser.add_argument("--wire-dtype")
    add_rank_options(parser)
    options = parser.parse_args()
    if ran_as_rank(
        options,
        lambda: measure(
            options.transport, options.wire_dtype, options.ranks, options.width, options.pairs
        ),
    ):
        return 0
    for key, value in header("elastic", sys.argv[1:]).items():
        print(f"{key}: {value}")
    print(f"{'transport':>10}{'wire':>6}{'None ms':>10}{'elastic ms':>12}", end="")
    print("  elastic / None [95 %]  wrong")
    wrong = 0
    for transport in ("auto", "tcp"):
        for wire in ("fp32", "fp16", "int8"):
            chosen = ["--transport", transport, "--wire-dtype", wire]
            for name in ("ranks", "width", "pairs"):
                chosen += [f"--{name}", str(getattr(options, name))]
            lines: list[bytes] = []
            run_ranks(options.ranks, chosen, 300, lines.append)
            found = json.loads(lines[0])
            plain, elastic = found["times"]
            wrong += found["wrong"]
            ratio = paired_ratio("elastic", plain, elastic)
            medians = [sorted(each)[len(each) // 2] for each in (plain, elastic)]
            print(
                f"{transport:>10}{wire:>6}{medians[0]:10.3f}{medians[1]:12.3f}"
                f"  {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]  {found['wrong']:10}",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
