"""What data-parallel wrappers cost in memory: `python benchmarks/ddp_memory.py --help`.

Every way trains the same model (25 M parameters in linear layers) for a few steps in processes of
its own, and says, in MB over what the same training without a wrapper needs:

    resident   after the last step, gradients included. Memory that ranks share counts in parts: the
               kernel's proportional set size
    peak       the highest resident set of the whole run. Memory that ranks share counts on each of
               them, so this overstates a way whose buckets are shared

Both are the mean over the ranks. A way is `backend` or `backend#how`, as in ddp.py: `gloo`
(torch's wrapper, gradients as bucket views), `pycomm#torch` the same over pycomm, `pycomm` our
wrapper, `pycomm:tcp` without shared memory, and each of them with `#fp16`; `none` trains alone. Our
wrapper also takes `#bf16` and `#int8`. Of another checkout that is built in place:

    PYTHONPATH=../before ../before/.venv/bin/python benchmarks/ddp_memory.py --ways pycomm#int8
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ddp import wrapped
from launching import add_rank_options, run_ranks
from report import header
from torch import nn
from world import World

WAYS = "none,gloo,pycomm#torch,pycomm,pycomm:tcp,gloo#fp16,pycomm#fp16"
WIDTH, LAYERS, STEPS = 1024, 24, 4
MB = 1e6


def kilobytes(path: str, key: str) -> int:
    """A line `key: 123 kB` of a file in /proc/self."""
    lines = Path("/proc/self", path).read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def train(world: World, way: str) -> dict[str, float]:
    """Resident and peak bytes of this rank after the training."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    model: Any = module if way == "none" else wrapped(module, way, world.groups[way])
    batch = torch.randn(8, WIDTH)
    for _ in range(STEPS):
        model.zero_grad()
        model(batch).square().mean().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    gc.collect()
    world.barrier()
    return {
        "resident": 1024.0 * kilobytes("smaps_rollup", "Pss"),
        "peak": 1024.0 * kilobytes("status", "VmHWM"),
    }


def run_as_rank(options: argparse.Namespace) -> None:
    world = World.join(launched=options.parent_pid is not None, timeout_s=options.timeout)
    world.open_groups(["gloo" if options.way == "none" else options.way])
    mine = train(world, options.way)
    every = [json.loads(text) for text in world.exchange(json.dumps(mine))]
    if world.rank == 0:
        mean = {key: sum(each[key] for each in every) / len(every) for key in mine}
        os.write(options.results_fd, json.dumps(mean).encode() + b"\n")
    world.close()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    add_rank_options(parser)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.parent_pid is not None:
        run_as_rank(options)
        return 0
    found: dict[str, dict[str, float]] = {}
    ways = options.ways.split(",")
    for way in ["none", *(each for each in ways if each != "none")]:
        mean: list[bytes] = []
        run_ranks(options.ranks, [*argv, "--way", way], options.timeout, mean.append)
        found[way] = json.loads(mean[0])
    facts = header("ddp_memory", argv)
    print(*(f"# {name}: {value}" for name, value in facts.items()), sep="\n")
    numel = LAYERS * (WIDTH + 1) * WIDTH
    print(f"# {options.ranks} ranks, {numel} parameters, gradients {4 * numel / MB:.0f} MB")
    print(f"{'way':16}{'resident':>12}{'peak':>12}   MB over none")
    for way in ways:
        over = {key: (found[way][key] - found["none"][key]) / MB for key in found[way]}
        print(f"{way:16}{over['resident']:12.1f}{over['peak']:12.1f}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
