"""Learning curves of methods that communicate differently, for time_to_loss.py.

    nice -n 10 python benchmarks/time_to_loss_curves.py FOLDER --limit 280  # again until "done"

A curve is over steps, not seconds, so other work on the machine does not matter. Each run is a file
in FOLDER, and a call does the missing ones until --limit seconds are over. A seed decides the model
and the order of the data; methods differ in nothing else. The ranks share this machine. Each loss
is that of the mean of the workers' parameters on held-out text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from launching import LOOPBACK, RankFailedError, add_rank_options, ran_as_rank, run_ranks
from outer_quality import nesterov
from quality import Text
from time_to_loss_product import DELAY, EVERY, FRAGMENTS, STEPS, Run, next_run
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn import functional

RANKS, BATCH, CONTEXT, HELD_OUT = 4, 4, 32, 128


class CharacterModel(nn.Module):
    """The next character from the 32 before it; four blocks, 0.4 million parameters."""

    def __init__(self, width: int = 88, blocks: int = FRAGMENTS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 128)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embedding(text) + self.position, mask=self.mask)
        found: torch.Tensor = self.head(self.norm(hidden))
        return found


def loss_of(model: nn.Module, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    windows = torch.stack([text[at : at + CONTEXT + 1] for at in starts])
    found = model(windows[:, :-1])
    return functional.cross_entropy(found.flatten(0, 1), windows[:, 1:].flatten())


def held_out(task: Text, model: nn.Module, own: nn.Module) -> float:
    """Of the mean of the workers' parameters, which ``own`` takes. Each rank reads a part."""
    pairs = zip(own.parameters(), model.parameters(), strict=True)
    with torch.no_grad():
        for mean, mine in pairs:
            mean.copy_(mine)
            dist.all_reduce(mean, dist.ReduceOp.AVG)
        starts = torch.arange(task.cut, len(task.text) - 100, 331)[:HELD_OUT]
        loss = loss_of(own, task.text, starts[dist.get_rank() :: dist.get_world_size()])
        dist.all_reduce(loss, dist.ReduceOp.AVG)
    return float(loss)


def wrap(run: Run, model: nn.Module, bucket_cap_mb: float | None) -> tuple[nn.Module, Any]:
    """What trains, and what syncs it if the wrapper does not."""
    import pycomm

    if run.method in ("fp32", "fp16", "int8"):
        cap = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
        wire = None if run.method == "fp32" else run.method
        return pycomm.DistributedDataParallel(model, wire_dtype=wire, **cap), None
    if run.method == "local_sgd":
        return model, pycomm.LocalSGD(model, sync_every=EVERY)
    if run.method == "sparse":
        return model, pycomm.SparseLoCo(model, sync_every=EVERY, outer_lr=run.outer)
    outer = nesterov(run.outer)
    if run.method == "diloco":
        return model, pycomm.DiLoCo(model, sync_every=EVERY, outer_optimizer=outer)
    assert run.method == "streaming", run.method
    return model, pycomm.StreamingDiLoCo(
        model,
        sync_every=EVERY,
        fragments=FRAGMENTS,
        fragment_sync_delay=DELAY,
        wire_dtype="int8",
        outer_optimizer=outer,
    )


def train(
    task: Text,
    run: Run,
    begin_step: Callable[[nn.Module], None] = lambda model: None,
    bucket_cap_mb: float | None = None,
) -> dict[str, Any]:
    """One curve, and the seconds at each of its points, evaluations left out.

    Args:
        begin_step: Called before each step.
    """
    torch.manual_seed(run.seed)
    model = CharacterModel()
    own = CharacterModel()
    trained, local = wrap(run, model, bucket_cap_mb)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.inner, fused=True)
    generator = torch.Generator().manual_seed(1000 * run.seed + dist.get_rank())
    losses: list[float] = []
    seconds: list[float] = []
    elapsed, begin = 0.0, time.perf_counter()
    for step in range(1, run.steps + 1):
        starts = torch.randint(task.cut - 100, (BATCH,), generator=generator)
        begin_step(model)
        optimizer.zero_grad()
        loss_of(trained, task.text, starts).backward()
        optimizer.step()
        if local is not None:
            local.step()
        if step == run.steps or (step % EVERY == 0 and run.steps == STEPS):
            elapsed += time.perf_counter() - begin
            losses.append(held_out(task, model, own))
            seconds.append(elapsed)
            dist.barrier()
            begin = time.perf_counter()
    if local is not None:
        local.sync()  # no fragment stays in flight
    found = {
        "losses": losses,
        "seconds": seconds,
        "numel": sum(p.numel() for p in own.parameters()),
    }
    return {**dataclasses.asdict(run), **found}


def load(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*-steps*.json"))]


def save(folder: Path, name: str, found: Any) -> None:
    """Whole or not at all."""
    part = folder / f"{name}.part"
    part.write_text(json.dumps(found))
    part.rename(folder / name)


def join_group() -> None:
    port, size = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(LOOPBACK, port, size, False)
    rank = int(os.environ["RANK"])
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=size)


def train_what_is_missing(options: argparse.Namespace) -> None:
    begin = time.monotonic()
    join_group()
    task = Text()
    per_step = 0.0
    while True:
        run = next_run(load(options.folder)) if dist.get_rank() == 0 else None
        left = options.limit - (time.monotonic() - begin)
        if run is not None and run.steps * per_step * 1.2 > left:
            run = None
        chosen = [run]
        dist.broadcast_object_list(chosen, 0)
        run = chosen[0]
        if run is None:
            break
        began = time.monotonic()
        found = train(task, run)
        per_step = (time.monotonic() - began) / run.steps
        if dist.get_rank() == 0:
            save(options.folder, run.file(), found)
            print(f"# {run.file()} {found['losses'][-1]:.4f} {per_step:.4f}", flush=True)
    dist.destroy_process_group()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path)
    add("--limit", type=float, default=280.0, help="begin nothing that would end later than this")
    add_rank_options(parser)
    options = parser.parse_args(argv)
    if ran_as_rank(options, lambda: train_what_is_missing(options)):
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        run_ranks(RANKS, argv, 3 * options.limit + 60, lambda line: None)
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1
    left = next_run(load(options.folder))
    print("done" if left is None else f"next: {left.file()}")
    return 0


if __name__ == "__main__":
    np.seterr(all="raise")
    sys.exit(main(sys.argv[1:]))
