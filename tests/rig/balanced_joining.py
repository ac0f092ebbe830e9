"""A rank of the tests of balanced trainings that processes join: it notes which samples count.

The averaged gradient of ``tally`` shows them: see death_training.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from elastic_deals import PREFETCH, Samples
from rank_child import describe_exception, mark
from torch import nn
from torch.utils.data import DataLoader

import pycomm


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a rank trains."""

    folder: str
    """Of the training: a file "end" there ends it, with the epoch."""
    workers: tuple[int, ...] = (0, 2)
    """Of each rank's loader."""
    join: bool = False
    length: int = 192
    global_batch: int = 24
    accumulate: int = 1
    samples: str = "with"
    """"out": it has no ``BalancedSampler``."""
    then: str = ""
    """What it does once it has made its sampler: "loads", "makes another", "begins anew"."""
    says: bool = False
    """It sets ``model.samples`` itself."""
    most: int | None = None
    """"max_batch" of a process that joins."""
    pause_s: float = 0.003

    @property
    def lookahead(self) -> int:
        return 2 * PREFETCH + 2 * self.accumulate


class Net(nn.Module):
    """A perceptron, and the tally of samples."""

    def __init__(self, length: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.tally = nn.Parameter(torch.zeros(length))

    def forward(self, inputs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(inputs).square().mean() + self.tally[indices].mean()
        return loss


def noted(folder: str) -> list[dict[str, Any]]:
    """The passes and steps of each process that has trained, also if it was killed."""
    found = []
    for path in sorted(Path(folder).glob("*.notes")):
        lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        passes = [line for line in lines if isinstance(line, list)]
        found.append({"passes": passes, "steps": [x for x in lines if isinstance(x, dict)]})
    return found


def trains(rank: int, world_size: int, plan: Plan) -> dict[str, Any]:
    """The error that has ended it, or its sampler's state at the end of the training."""
    found: dict[str, Any] = {"error": None}
    try:
        _train(rank, plan, found)
    except Exception as caught:
        found["error"] = describe_exception(caught)
    return found


def _train(rank: int, plan: Plan, found: dict[str, Any]) -> None:
    net = Net(plan.length)
    optimizer = torch.optim.SGD(net.layers.parameters(), lr=0.05, momentum=0.9)
    model = pycomm.DistributedDataParallel(
        net,
        weight="samples",
        accumulate=plan.accumulate,
        elastic=pycomm.Elastic(peers=f"{plan.folder}/peers", state=[optimizer], join=plan.join),
    )
    signal.signal(signal.SIGTERM, lambda *_: model.elastic.leave())
    mark("trains")
    mine = model.elastic.members[model.elastic.rank]
    data = Samples(plan.length)
    if plan.samples == "out":
        while not Path(plan.folder, "end").exists():
            plain_step(model, optimizer, data)
        return
    sampler = pycomm.BalancedSampler(
        data,
        global_batch=plan.global_batch,
        model=model,
        lookahead=plan.lookahead,
        max_batch=plan.most if plan.join else None,
    )
    if plan.then == "loads":
        sampler.load_state_dict(sampler.state_dict())
    elif plan.then == "makes another":
        pycomm.BalancedSampler(data, global_batch=plan.global_batch, model=model)
    workers = plan.workers[rank]
    # Fork: an interpreter per worker would take as long as all the rest.
    more: dict[str, Any] = {
        "prefetch_factor": PREFETCH,
        "multiprocessing_context": "fork",
        "persistent_workers": True,
        "worker_init_fn": forget_signals,
    }
    loader = DataLoader(
        data, batch_sampler=sampler, num_workers=workers, **(more if workers else {})
    )
    passes = 0
    notes = os.open(f"{plan.folder}/{mine}.notes", os.O_WRONLY | os.O_CREAT, 0o600)
    epoch = 0 if plan.then == "begins anew" else sampler.stats().epoch
    while True:
        sampler.set_epoch(epoch)
        for indices, inputs in loader:
            if plan.says:
                model.samples = len(inputs)
            loss = model(inputs, indices)
            if plan.says:
                model.samples = len(inputs)
            counts = model.samples != 0
            loss.backward()
            time.sleep(plan.pause_s)
            passes += 1
            if counts:
                mark("counts")
            reduces = passes % plan.accumulate == 0
            step = [json.dumps(step_of(model, net, epoch, plan))] if reduces else []
            own = json.dumps(indices.tolist() if counts else [])
            os.write(notes, "\n".join([own, *step, ""]).encode())
            if reduces:
                mark(f"step {passes // plan.accumulate}")
                optimizer.step()
                net.zero_grad()
            if model.elastic.left:
                return
        mark(f"epoch {epoch}")
        if model.elastic.mean(float(Path(plan.folder, "end").exists())) > 0:
            break
        epoch += 1
    found["state"] = sampler.state_dict()
    found["most"] = sampler._plan.limits.most


def forget_signals(worker: int) -> None:
    """A worker is none of the members."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def plain_step(model: Any, optimizer: Any, data: Samples) -> None:
    """Of two samples."""
    indices = torch.tensor([0, 1])
    model(torch.stack([data[0][1], data[1][1]]), indices).backward()
    optimizer.step()
    model.zero_grad()
    time.sleep(0.003)


def step_of(model: Any, net: Net, epoch: int, plan: Plan) -> dict[str, Any]:
    """Which samples the averages hold, and how far they are from counting all alike.

    One that comes back in the next epoch may meet itself there, in one batch.
    """
    assert net.tally.grad is not None
    held = net.tally.grad.nonzero().flatten()
    grad = net.tally.grad[held]
    times = (grad / grad.min()).round().long() if len(held) > 0 else held
    counted = held.repeat_interleave(times).tolist()
    once = grad / times * len(counted) / plan.accumulate
    return {
        "step": model.elastic.step,
        "members": list(model.elastic.members),
        "epoch": epoch,
        "counted": counted,
        "off": float((once - 1).abs().max()) if counted else 0.0,
        "bits": float(sum(each.detach().double().sum() for each in net.layers.parameters())),
    }
