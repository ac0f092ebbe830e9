"""A training step with gradients of ResNet-50's sizes: pycomm's DDP beside torch's over NCCL.

python benchmarks/cuda_ddp.py [--ranks 1] [--blocks 20]

"no_sync" is the same step without communication: what a row is above it is exposed.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
from cuda_ranks import Body, blocks_of, heading, open_groups, possible_backends, ratio, run
from torch import nn

import pycomm

WIDTH = 1024
LAYERS = 24  # 25.2 million parameters, as ResNet-50 has


def model() -> nn.Module:
    layers = [
        layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())
    ]
    return nn.Sequential(*layers).cuda()


def table(blocks: int, batch: int, command: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = open_groups(possible_backends(ranks))
    wrappers: dict[str, Any] = {}
    for name, group in groups.items():
        wrappers[f"torch DDP, {name}"] = nn.parallel.DistributedDataParallel(
            model(), process_group=group, gradient_as_bucket_view=True
        )
        if name.startswith("pycomm"):
            for wire in (None, "fp16"):
                wrappers[f"{name}, {wire or 'fp32'}"] = pycomm.DistributedDataParallel(
                    model(), process_group=group, wire_dtype=wire
                )
        if name == "pycomm:nccl":  # the buckets that are meant for Ethernet
            wrappers[f"{name}, fp16, 4 MiB"] = pycomm.DistributedDataParallel(
                model(), process_group=group, wire_dtype="fp16", bucket_cap_mb=4
            )
    samples = torch.randn(batch, WIDTH, device="cuda")

    def step(ddp: nn.Module) -> None:
        ddp(samples).sum().backward()

    bodies: dict[str, Body] = {name: (lambda ddp=ddp: step(ddp)) for name, ddp in wrappers.items()}
    alone = model()
    bodies["no_sync"] = lambda: step(alone)
    times = blocks_of(bodies, blocks, 5)
    if rank == 0:
        print(heading(command))
        print(f"# {ranks} ranks on {torch.cuda.device_count()} GPUs, batch {batch}")
        print(f"{'step':>28} {'ms':>9}  against no_sync, nine of ten")
        for name in bodies:
            median = statistics.median(times[name])
            print(f"{name:>28} {median:>9.3f}  {ratio(times, name, 'no_sync')}")
        exposed = {
            name: statistics.median(each) - statistics.median(times["no_sync"])
            for name, each in times.items()
        }
        theirs = exposed.get("torch DDP, nccl")
        ours = exposed.get("pycomm:nccl, fp16")
        if theirs is None or ours is None:
            print("exposed communication against NCCL's: needs a GPU a rank")
        else:
            step_ms = statistics.median(times["torch DDP, nccl"])
            met = "met" if ours <= theirs + 0.05 * abs(theirs) else "MISSED"
            print(f"exposed: {ours:.3f} ms of ours in fp16, {theirs:.3f} ms of NCCL's", end=", ")
            print(f"of a step of {step_ms:.3f} ms; at most 5 % more: {met}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument(
        "--shared-nccl", action="store_true", help="NCCL alone, for ranks that share a GPU"
    )
    given = parser.parse_args()
    command = f"python benchmarks/cuda_ddp.py --ranks {given.ranks} --batch {given.batch}"
    command += " --shared-nccl" * given.shared_nccl
    shared = given.shared_nccl
    run(given.ranks, table, given.blocks, given.batch, command, shared_nccl=shared)


if __name__ == "__main__":
    main()
