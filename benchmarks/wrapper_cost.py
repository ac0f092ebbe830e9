"""What an option of pycomm's wrapper costs a step: the loop that weights.py and elastic.py share.

Two wrappers of the same model, without and with the option, take turns in blocks of steps, on the
same batches. The step is one of some milliseconds of computing. The gradients of both wrappers are
compared bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from launching import add_rank_options, ran_as_rank, run_ranks
from report import header, paired_ratio
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

STEPS = 40


@dataclasses.dataclass(frozen=True)
class Rows:
    """One row of the table for each value of an option of the program."""

    flag: str
    kind: type
    heading: str
    values: Sequence[Any]


def compare(
    table: str, about: str, option: str, rows: Rows, variants: Callable[[Any], list[dict[str, Any]]]
) -> int:
    """Prints the table, as the program that is started; 1 if gradients differ.

    ``variants``: of a rank's options, the wrapper's arguments without and with ``option``.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--transport", default="")
    parser.add_argument(rows.flag, type=rows.kind, default=rows.values[0])
    add_rank_options(parser)
    options = parser.parse_args()
    if ran_as_rank(options, lambda: measure(options, variants(options))):
        return 0
    for key, value in header(table, sys.argv[1:]).items():
        print(f"{key}: {value}")
    print(f"{'transport':>10}{rows.heading:>9}{'None ms':>10}{option + ' ms':>12}", end="")
    print(f"  {option} / None [95 %]  wrong")
    wrong = 0
    for transport in ("auto", "tcp"):
        for value in rows.values:
            chosen = ["--transport", transport, rows.flag, str(value)]
            for name in ("ranks", "width", "pairs"):
                chosen += [f"--{name}", str(getattr(options, name))]
            lines: list[bytes] = []
            run_ranks(options.ranks, chosen, 300, lines.append)
            found = json.loads(lines[0])
            wrong += found["wrong"]
            ratio = paired_ratio(option, *found["times"])
            medians = [sorted(each)[len(each) // 2] for each in found["times"]]
            print(
                f"{transport:>10}{value!s:>9}{medians[0]:10.3f}{medians[1]:12.3f}"
                f"  {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]  {found['wrong']:10}",
                flush=True,
            )
    return 1 if wrong else 0


def measure(options: argparse.Namespace, variants: list[dict[str, Any]]) -> dict[str, object]:
    """As one rank: the medians of blocks, in ms, and how many gradients differ."""
    import pycomm

    timeout = timedelta(seconds=120)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout
    )
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "pycomm",
        store=store,
        rank=rank,
        world_size=options.ranks,
        timeout=timeout,
        pg_options=pycomm.Options(transport=options.transport),
    )
    late_s = getattr(options, "late_ms", 0.0) * 1e-3 if rank == 1 else 0.0
    torch.manual_seed(0)
    layers = [(nn.Linear(options.width, options.width), nn.Tanh()) for _ in range(4)]
    net = nn.Sequential(*(layer for pair in layers for layer in pair))
    models = [pycomm.DistributedDataParallel(copy.deepcopy(net), **each) for each in variants]
    batch = torch.randn(32, options.width, generator=torch.Generator().manual_seed(rank))

    def block(model: nn.Module) -> float:
        took = []
        for _ in range(STEPS):
            dist.barrier()
            if late_s:
                time.sleep(late_s)
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
    for pair in range(options.pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            times[which].append(block(models[which]))
    dist.destroy_process_group()
    return {"times": times, "wrong": wrong}
