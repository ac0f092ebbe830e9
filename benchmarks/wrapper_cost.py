"""What an option of pycomm's wrapper costs a step: the loop that several programs share.

Two wrappers of the same model, without and with the option, take turns in blocks of steps, on the
same batches. The step is one of some milliseconds of computing. The gradients of both wrappers are
compared bit for bit; if ranks count unequally, with those of losses that are multiplied by hand.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
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


@dataclasses.dataclass(frozen=True)
class Trial:
    """One row, as a rank measures it."""

    variants: list[dict[str, Any]]
    """The wrapper's arguments without and with the option."""
    samples: tuple[int, int] | None = None
    """With it, each rank says that it has so many: those of even and of odd numbers."""
    late_s: float = 0.0
    """Rank 1's loader is late by it."""


def compare(
    table: str, about: str, option: str, rows: Rows, trial: Callable[[argparse.Namespace], Trial]
) -> int:
    """Prints the table, as the program that is started; 1 if gradients differ."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, nargs="+", default=[512])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--transport", default="")
    parser.add_argument(rows.flag, type=rows.kind, default=rows.values[0])
    add_rank_options(parser)
    options = parser.parse_args()
    if ran_as_rank(options, lambda: measure(options, trial(options))):
        return 0
    for key, value in header(table, sys.argv[1:]).items():
        print(f"{key}: {value}")
    print(
        f"{'width':>6}{'transport':>10}{rows.heading:>9}{'None ms':>10}{option + ' ms':>12}", end=""
    )
    print(f"  {option} / None [95 %]  wrong")
    wrong = 0
    for width, transport, value in itertools.product(options.width, ("auto", "tcp"), rows.values):
        chosen = ["--transport", transport, "--width", str(width), rows.flag, str(value)]
        for name in ("ranks", "pairs"):
            chosen += [f"--{name}", str(getattr(options, name))]
        lines: list[bytes] = []
        run_ranks(options.ranks, chosen, 300, lines.append)
        found = json.loads(lines[0])
        wrong += found["wrong"]
        ratio = paired_ratio(option, *found["times"])
        medians = [sorted(each)[len(each) // 2] for each in found["times"]]
        print(
            f"{width:6}{transport:>10}{value!s:>9}{medians[0]:10.3f}{medians[1]:12.3f}"
            f"  {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]  {found['wrong']:10}",
            flush=True,
        )
    return 1 if wrong else 0


def measure(options: argparse.Namespace, trial: Trial) -> dict[str, object]:
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
    late_s = trial.late_s if rank == 1 else 0.0
    torch.manual_seed(0)
    (width,) = options.width
    layers = [(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
    net = nn.Sequential(*(layer for pair in layers for layer in pair))
    models = [pycomm.DistributedDataParallel(copy.deepcopy(net), **each) for each in trial.variants]
    batch = torch.randn(32, width, generator=torch.Generator().manual_seed(rank))
    said: list[int | None] = [None, None if trial.samples is None else trial.samples[rank % 2]]

    def block(which: int) -> float:
        model, samples = models[which], said[which]
        took = []
        for _ in range(STEPS):
            dist.barrier()
            if late_s:
                time.sleep(late_s)
            began = time.perf_counter()
            model.zero_grad()
            if samples is not None:
                model.samples = samples
            model(batch).square().mean().backward()
            took.append(time.perf_counter() - began)
        return sorted(took)[STEPS // 2] * 1e3

    for which in (0, 1):
        block(which)
    tolerance = 0.0
    if trial.samples is not None:
        share = trial.samples[rank % 2] / sum(
            trial.samples[each % 2] for each in range(options.ranks)
        )
        models[0].zero_grad()
        (options.ranks * share * models[0](batch).square().mean()).backward()
        tolerance = 1e-5
    wrong = sum(
        not bool((one.grad - other.grad).abs().max() <= tolerance * other.grad.abs().max())  # type: ignore[operator, union-attr]
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True)
    )
    times: list[list[float]] = [[], []]
    for pair in range(options.pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            times[which].append(block(which))
    dist.destroy_process_group()
    return {"times": times, "wrong": wrong}
