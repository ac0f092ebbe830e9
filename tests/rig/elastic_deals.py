"""What a rank of the tests of balanced trainings with deaths does: it trains, and notes what on."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import torch
from rank_child import describe_exception, mark
from signals import CaughtSignal
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pycomm

PREFETCH = 2
HELD_AT = 20
"""The step before which ranks wait that are to be killed."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How ranks train."""

    folder: str
    workers: tuple[int, ...]
    """Of each rank's loader."""
    epochs: int = 14
    length: int = 200
    global_batch: int = 24
    accumulate: int = 1
    held: tuple[int, ...] = ()
    """Ranks that the test kills: with ``HELD_AT`` no death comes too late, however late it is."""

    @property
    def lookahead(self) -> int:
        return max(self.workers) * PREFETCH + 2 * self.accumulate


class Samples(Dataset[tuple[int, torch.Tensor]]):
    """Pairs of an index and inputs."""

    def __init__(self, length: int) -> None:
        self._inputs = torch.randn(length, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self._inputs[index]


def dealt(folder: str, rank: int) -> list[list[int]]:
    """What this rank has gone through backward with, or was about to; also if it was killed."""
    lines = (Path(folder) / f"{rank}").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def trains(rank: int, world_size: int, plan: Plan) -> dict[str, Any]:
    """The members of each pass, the passes of each epoch, and all mean losses."""
    torch.manual_seed(3)
    data = Samples(plan.length)
    model = pycomm.DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)),
        weight="samples",
        accumulate=plan.accumulate,
        elastic=pycomm.Elastic(),
    )
    sampler = pycomm.BalancedSampler(
        data, global_batch=plan.global_batch, model=model, lookahead=plan.lookahead
    )
    workers = plan.workers[rank]
    # Fork: an interpreter per worker would take as long as all the rest.
    more: dict[str, Any] = {"prefetch_factor": PREFETCH, "multiprocessing_context": "fork"}
    loader = DataLoader(
        data,
        batch_sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        **(more if workers else {}),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    members: list[tuple[int, ...]] = []
    epochs: list[int] = []
    means: list[float] = []
    error: Any = None
    continued = CaughtSignal(signal.SIGCONT)  # which nobody sends
    try:
        with (Path(plan.folder) / f"{rank}").open("w") as file:
            for epoch in range(plan.epochs):
                sampler.set_epoch(epoch)
                epochs.append(0)
                for indices, inputs in loader:
                    if rank in plan.held and len(means) == HELD_AT:
                        continued.wait()
                    file.write(json.dumps(indices.tolist()) + "\n")
                    file.flush()
                    loss = model(inputs).square().mean()
                    loss.backward()
                    epochs[-1] += 1
                    members += [()]
                    if sum(epochs) % plan.accumulate == 0:
                        members[-plan.accumulate :] = [model.elastic.members] * plan.accumulate
                        means.append(model.elastic.mean(loss.detach()).item())
                        optimizer.step()
                        optimizer.zero_grad()
                        mark(f"step {len(means)}")
    except Exception as caught:
        error = describe_exception(caught)
    late = ""
    try:
        pycomm.BalancedSampler(data, global_batch=plan.global_batch, model=model)
    except pycomm.errors.UnsupportedError as refused:
        late = str(refused)
    return {
        "members": members,
        "late": late,
        "epochs": epochs,
        "means": means,
        "error": error,
        "weights": [each.tolist() for each in model.module.parameters()],
        "stats": dataclasses.asdict(sampler.stats()),
    }
