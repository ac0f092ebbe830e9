"""The loss of methods that sync seldom, beside gradients in every step.

    python benchmarks/outer_quality.py                 # every method, three seeds
    python benchmarks/outer_quality.py --methods diloco,streaming:alpha=0,streaming:alpha=0.5

The task is the byte model of quality.py. A method is NAME or NAME:OPTION=VALUE:...; names are sync,
diloco, streaming and sparse. Options of streaming: alpha, tau, parts, wire, lr (of the outer
optimizer); of sparse: k, decay, lr; of all: inner, adam or muon, and rate, its learning rate. Muon
takes the matrices of the layers, Adam the rest, as in MuLoCo (arXiv 2505.23725). A seed decides the
model, the order of the data and the held-out part; methods differ in nothing else. All ranks run on
this machine; bytes are counted as for a ring, before that last sync(), and not measured.

The last step is just after an outer step for one method, and has a fragment in flight for another.
So each loss is taken twice: of the mean of the workers' parameters after the last step, and of the
parameters after sync(), which are what a user evaluates.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from launching import LOOPBACK, add_rank_options, ran_as_rank, run_ranks
from quality import Text
from report import header
from torch.distributed import TCPStore  # type: ignore[attr-defined]

METHODS = [
    "sync",
    "diloco",
    "streaming:alpha=0",
    "streaming:alpha=0.5",
    "streaming:wire=int8",
    "sparse",
]


def nesterov(lr: float) -> Callable[[list[torch.Tensor]], torch.optim.Optimizer]:
    return lambda tensors: torch.optim.SGD(tensors, lr=lr, momentum=0.9, nesterov=True)


def make(method: str, model: torch.nn.Module, every: int) -> Any:
    import pycomm

    name, *rest = method.split(":")
    given = dict(each.split("=", 1) for each in rest)
    if name == "diloco":
        outer = nesterov(float(given.pop("lr", 0.7)))
        local: Any = pycomm.DiLoCo(model, sync_every=every, outer_optimizer=outer)
    elif name == "streaming":
        alpha = given.pop("alpha", None)  # None: the default
        local = pycomm.StreamingDiLoCo(
            model,
            sync_every=every,
            fragments=int(given.pop("parts", 2)),
            fragment_sync_delay=int(given.pop("tau", 5)),
            fragment_update_alpha=None if alpha is None else float(alpha),
            wire_dtype=given.pop("wire", None),
            outer_optimizer=nesterov(float(given.pop("lr", 0.7))),
        )
    elif name == "sparse":
        local = pycomm.SparseLoCo(
            model,
            sync_every=every,
            top_k=int(given.pop("k", 64)),
            error_decay=float(given.pop("decay", 0.95)),
            outer_lr=float(given.pop("lr", 1.0)),
        )
    else:
        raise SystemExit(f"{method!r}: there is no method {name!r}")
    if given:
        raise SystemExit(f"{method!r}: {name} has no option {sorted(given)[0]!r}")
    return local


def without(method: str, option: str, default: str) -> tuple[str, str]:
    """The method without one of its options, and the option's value."""
    parts = method.split(":")
    values = [part.partition("=")[2] for part in parts if part.startswith(f"{option}=")]
    kept = ":".join(part for part in parts if not part.startswith(f"{option}="))
    return kept, values[-1] if values else default


def inner_optimizers(model: Any, inner: str, rate: float) -> list[Any]:
    if inner == "adam":
        return [torch.optim.Adam(model.parameters(), lr=rate)]
    if inner != "muon":
        raise SystemExit(f"there is no inner optimizer {inner!r}: adam, muon")
    matrices = [each for each in model.layers.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if all(each is not one for one in matrices)]
    # Scaled so that an update is as large as Adam's: both get the same rate.
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.Adam(others, lr=rate)]


def train(task: Text, method: str, seed: int, every: int) -> dict[str, Any]:
    import pycomm

    torch.manual_seed(seed)
    model = task.model()
    rest, inner = without(method, "inner", "adam")
    rest, rate = without(rest, "rate", str(task.rate))
    optimizers = inner_optimizers(model, inner, float(rate))
    local = None
    if rest == "sync":
        model = pycomm.DistributedDataParallel(model)
    else:
        local = make(rest, model, every)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(task.steps):
        model.zero_grad()
        task.train_loss(model, generator).backward()
        for optimizer in optimizers:
            optimizer.step()
        if local is not None:
            local.step()
    stats = model.stats() if local is None else local.stats()
    mean = copy.deepcopy(model.module if local is None else model)
    with torch.no_grad():
        for parameter in mean.parameters():
            dist.all_reduce(parameter, dist.ReduceOp.AVG)
    before = held_out(task, mean)
    if local is not None:
        local.sync()
    after = held_out(task, model.module if local is None else model)
    sent = stats.sent_nbytes / task.steps / 1e3
    return {"method": method, "seed": seed, "before": before, "after": after, "sent_kb": sent}


def held_out(task: Text, model: torch.nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        loss = task.held_out_loss(model).reshape(1)
    found = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(found, loss)
    assert all(each == found[0] for each in found), "ranks hold different models"
    return float(loss)


def summary(runs: Sequence[dict[str, Any]]) -> list[str]:
    methods = list(dict.fromkeys(run["method"] for run in runs))
    width = max(map(len, methods)) + 2
    columns = f"{'KB/step':>9}{'last step':>11}{'sync()':>9}"
    lines = [f"{'method':<{width}}{columns}   each seed, after sync()"]
    for method in methods:
        mine = [run for run in runs if run["method"] == method]
        before, after = ([run[when] for run in mine] for when in ("before", "after"))
        lines.append(
            f"{method:<{width}}{mine[0]['sent_kb']:9.2f}{np.mean(before):11.4f}"
            f"{np.mean(after):9.4f}   " + " ".join(f"{each:.4f}" for each in after)
        )
    return lines


def train_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    port, size = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(LOOPBACK, port, size, False)
    rank = int(os.environ["RANK"])
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=size)
    task = Text()
    task.steps = options.steps
    runs = []
    for seed in options.seeds:
        for method in options.methods:
            runs.append(train(task, method, seed, options.every))
            if rank == 0:
                print(f"# {json.dumps(runs[-1])}", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    return runs


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--methods", type=lambda text: text.split(","), default=METHODS)
    add("--ranks", type=int, default=4)
    add("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[0, 1, 2])
    add("--every", type=int, default=24, help="sync_every; default: %(default)s")
    add("--steps", type=int, default=480)
    add("--limit", type=float, default=3000.0, help="end after so many seconds")
    add("--json", type=Path)
    add_rank_options(parser)
    options = parser.parse_args(argv)
    if ran_as_rank(options, lambda: train_all(options)):
        return 0
    runs: list[dict[str, Any]] = []
    run_ranks(options.ranks, argv, options.limit, lambda line: runs.extend(json.loads(line)))
    lines = [f"# {key}: {value}" for key, value in header("outer_quality", argv).items()]
    print("\n".join([*lines, *summary(runs)]))
    if options.json is not None:
        options.json.write_text(json.dumps(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
