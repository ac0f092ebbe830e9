"""A rank of the long trainings in which ranks die and join: it trains, and notes each step.

A step shows which samples it has: the parameter ``tally`` has an element per sample of the data,
and the loss is their cross entropy plus the mean of these elements. So the averaged gradient of
``tally`` is 1 / samples for each sample that the average holds, and 0 for all others.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import signal
import struct
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from joined_deals import Deal
from torch import nn

import pycomm

_GATE = struct.Struct("qq")
_LOOK_EVERY_S = 1.0
_POLL_S = 0.005
ENDLESS = 1 << 60


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a rank trains."""

    folder: str
    """Of the training: the data, the gate, the file of peers and each rank's notes."""
    name: str
    """Of the processes that are started together. Rank 0 of "founder" writes founder-0.notes."""
    join: bool = False
    global_batch: int = 256
    pause_s: float = 0.02
    """What a share of an equal part of the batch takes; a larger one takes longer in proportion."""
    equal_parts: int = 8
    hidden: int = 64
    seed: int = 0
    quorum_wait_s: float = 10.0
    join_pause_s: float = 10.0

    @property
    def peers(self) -> str:
        return f"{self.folder}/peers"


class Gate:
    """Whether a training goes on, and the step before which it ends: in memory of all its ranks."""

    def __init__(self, folder: str | Path, *, make: bool = False) -> None:
        path = Path(folder) / "gate"
        if make:
            path.write_bytes(_GATE.pack(0, ENDLESS))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _GATE.size)

    def set(self, *, goes: bool, end: int = ENDLESS) -> None:
        self._memory[:] = _GATE.pack(int(goes), end)

    def wait(self) -> int:
        """Waits until the training goes on. The controller's end ends this process, too."""
        while True:
            goes, end = _GATE.unpack(self._memory[:])
            if goes:
                return int(end)
            time.sleep(_POLL_S)


def notes_of(folder: str | Path, name: str, rank: int) -> Path:
    return Path(folder) / f"{name}-{rank}.notes"


class Notes:
    """A line of JSON per event, each by one system call: a killed process leaves none half."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **line: Any) -> None:
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def look(self) -> None:
        """Descriptors, threads and memory of this process."""
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE // 1024
        kept = [len(os.listdir("/proc/self/fd")) - 1, thread_count(), resident]
        self.write(kind="look", at=time.monotonic(), kept=kept)


def thread_count() -> int:
    """Native threads, too."""
    return len(os.listdir("/proc/self/task"))


class Net(nn.Module):
    """A perceptron, and the tally of samples."""

    def __init__(self, hidden: int, samples: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 10),
        )  # fmt: skip
        self.tally = nn.Parameter(torch.zeros(samples))

    def forward(self, inputs: torch.Tensor, indices: torch.Tensor) -> tuple[Any, Any]:
        return self.layers(inputs), self.tally[indices].mean()


def mask_of(indices: Any) -> int:
    """Bit k is set if k is among them."""
    mask = 0
    for each in indices:
        mask |= 1 << each
    return mask


def trains(rank: int, world_size: int, plan: Plan) -> None:
    """Until the gate says so, it has left in order, or an error ends it: the last note says."""
    notes = Notes(notes_of(plan.folder, plan.name, rank))
    try:
        how, text = _train(plan, notes), ""
    except Exception as error:
        how, text = type(error).__name__, str(error)
    notes.write(kind="end", at=time.monotonic(), how=how, text=text)


def _train(plan: Plan, notes: Notes) -> str:
    data = torch.load(f"{plan.folder}/data.pt")
    inputs, labels, noise = data["inputs"], data["labels"], data["noise"]
    gate = Gate(plan.folder)
    net = Net(plan.hidden, len(inputs))
    optimizer = torch.optim.Adam(net.layers.parameters(), lr=3e-4)
    deal = Deal(len(inputs), plan.global_batch, plan.seed)
    notes.write(kind="asks", at=time.monotonic())
    model = pycomm.DistributedDataParallel(
        net,
        weight="samples",
        elastic=pycomm.Elastic(
            peers=plan.peers,
            state=[optimizer, deal],
            join=plan.join,
            quorum_wait=plan.quorum_wait_s,
            join_pause=plan.join_pause_s,
        ),
    )
    signal.signal(signal.SIGTERM, lambda *_: model.elastic.leave())
    mine = model.elastic.members[model.elastic.rank]
    notes.write(kind="begin", at=time.monotonic(), member=mine, step=model.elastic.step)
    looked_s = 0.0
    while not model.elastic.left:
        if time.monotonic() - looked_s > _LOOK_EVERY_S:
            looked_s = time.monotonic()
            notes.look()
        step = model.elastic.step
        if step >= gate.wait():
            break
        model.zero_grad()
        dealt = deal.deal(step, model.elastic.members)
        share = dealt.share_of(mine)
        loss = torch.zeros(())
        if share:
            chosen = torch.tensor(share)
            # Of a sample in an epoch it is the same on all ranks.
            seen = inputs[chosen] + noise[(chosen * 7919 + deal.epoch * 104729) % len(noise)]
            outputs, tally = model(seen, chosen)
            loss = nn.functional.cross_entropy(outputs, labels[chosen])
            time.sleep(plan.pause_s * plan.equal_parts * len(share) / plan.global_batch)
            (loss + tally).backward()
        else:
            model.no_batch()
        ended_s = time.monotonic()
        assert net.tally.grad is not None
        counted = net.tally.grad.nonzero().flatten().tolist()
        once = net.tally.grad[counted] * len(counted)
        optimizer.step()
        notes.write(
            kind="step",
            step=step,
            at=ended_s,
            members=model.elastic.members,
            bits=digest((*net.parameters(), *_moments(optimizer))),
            epoch=deal.epoch,
            counted=f"{mask_of(counted):x}",
            share=f"{mask_of(share):x}",
            off=float((once - 1).abs().max()) if counted else 0.0,
            loss=float(loss.detach()),
        )
        deal.settle(set(counted))
    notes.look()
    with torch.no_grad():
        found = net.layers(data["held_inputs"]).argmax(1)
    accuracy = float((found == data["held_labels"]).float().mean())
    notes.write(kind="accuracy", value=accuracy, step=model.elastic.step)
    return "left" if model.elastic.left else "end"


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Fast: it is taken in each step, of three times the model."""
    value = 0
    for each in tensors:
        value = zlib.crc32(each.detach().flatten().view(torch.uint8).numpy(), value)
    return f"{value:08x}"


def _moments(optimizer: torch.optim.Adam) -> list[torch.Tensor]:
    return [
        state[name]
        for state in optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq", "step")
    ]
