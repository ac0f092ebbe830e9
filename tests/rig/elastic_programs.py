"""Random elastic trainings: what a loop does between and in its steps, and who dies when.

All ranks run the same program. After each step a rank compares its averages with those that float64
has over the members that the step was committed with; every rank computes them from its own
parameters, which are all ranks'. Means are compared in the same way: their values say who counted.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import random
import signal
import threading
import time
from typing import Any

import torch
from elastic_rig import Net, batch_of
from elastic_training import TOLERANCES, hash_of
from rank_child import describe_exception, mark

import pycomm

BETWEEN = (
    "mean",
    "weighted mean",
    "confirm",
    "evaluate",
    "forward in eval",
    "unused forward",
    "no optimizer step",
    "zeros in place of none",
    "save and load",
    "freeze",
    "raises and tries again",
    "says its samples",
    "clips",
)
"""What a step may have beside it."""
WHERE = ("before", "forward", "backward", "after", "timer")


@dataclasses.dataclass(frozen=True)
class Death:
    rank: int
    step: int
    number: int
    """Of the step's passes."""
    where: str
    after_s: float
    """Of "timer": a thread kills the rank so long after the pass has begun."""


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    ranks: int
    transport: str
    wire: str | None
    weight: bool
    accumulate: int
    unused: str
    """"", "find_unused_parameters", "static_graph"."""
    steps: tuple[tuple[str, ...], ...]
    """Of each step, what it has beside it."""
    local: tuple[int, ...]
    """Of each step, how many passes in no_sync() come first."""
    without: tuple[int, ...]
    """Of each step, the rank that has no batch in its last pass; -1: none."""
    infinite: tuple[int, ...]
    """Of each step, the rank whose gradients are Inf; -1: none. All skip the optimizer's step."""
    deaths: tuple[Death, ...]
    leaves: tuple[int, int]
    """A rank, and the step in whose backward pass it asks to leave; (-1, -1): none."""


def random_program(seed: int) -> Program:
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 3, 4])
    weight = draw.random() < 0.6
    steps = draw.randint(7, 12)
    accumulate = draw.choice([1, 1, 2, 3])
    local = tuple(draw.choice([0, 0, 0, 1, 2]) for _ in range(steps))
    dead = draw.sample(range(ranks), draw.choice([1, 1, min(2, ranks - 1)]))
    deaths = []
    for rank in dead:
        step = draw.randrange(1, steps)
        number = draw.randrange(local[step] + accumulate)
        deaths.append(Death(rank, step, number, draw.choice(WHERE), draw.random() * 0.03))
    leaves = (-1, -1)
    living = [rank for rank in range(ranks) if rank not in dead]
    if len(living) > 1 and draw.random() < 0.3:
        leaves = (draw.choice(living), draw.randrange(1, steps))
    return Program(
        seed=seed,
        ranks=ranks,
        transport=draw.choice(["shm", "tcp"]),
        wire=draw.choice([None, "bf16", "fp16", "int8"]),
        weight=weight,
        accumulate=accumulate,
        unused=draw.choice(["", "", "find_unused_parameters", "static_graph"]),
        steps=tuple(
            tuple(draw.sample(BETWEEN, draw.choice([0, 1, 1, 2, 3]))) for _ in range(steps)
        ),
        local=local,
        without=tuple(
            draw.randrange(ranks) if weight and draw.random() < 0.3 else -1 for _ in range(steps)
        ),
        infinite=tuple(draw.randrange(ranks) if draw.random() < 0.1 else -1 for _ in range(steps)),
        deaths=tuple(deaths),
        leaves=leaves,
    )


class Expected(Exception):
    """Raised by the loop, between forward and backward."""


class Training:
    """What one rank does, and what is wrong with it."""

    def __init__(self, rank: int, program: Program) -> None:
        self.rank, self.program = rank, program
        options: dict[str, Any] = {program.unused: True} if program.unused else {}
        self.model = pycomm.DistributedDataParallel(
            Net(unused=bool(program.unused)),
            wire_dtype=program.wire,
            bucket_cap_mb=0.02,
            accumulate=program.accumulate,
            weight="samples" if program.weight else None,
            elastic=pycomm.Elastic(),
            **options,
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.members: list[tuple[int, ...]] = []
        self.means: list[str] = []
        self.bits: list[str] = []
        self.wrong = ""
        self._at = (-1, -1)
        net = self.model.module
        net.first.register_forward_hook(lambda *_: self._die("forward"))
        net.wide.weight.register_hook(lambda _: self._in_backward())

    def _die(self, where: str) -> None:
        for death in self.program.deaths:
            if (death.rank, (death.step, death.number), death.where) == (
                self.rank,
                self._at,
                where,
            ):
                if where == "timer":
                    timer = threading.Timer(death.after_s, os.kill, (os.getpid(), signal.SIGKILL))
                    timer.daemon = True
                    timer.start()
                else:
                    os.kill(os.getpid(), signal.SIGKILL)

    def _in_backward(self) -> None:
        self._die("backward")
        if self.program.leaves == (self.rank, self._at[0]):
            self.model.elastic.leave()

    # --- what a pass is, on any rank ---

    def _passes(self, step: int) -> int:
        return self.program.local[step] + self.program.accumulate

    def _has_batch(self, rank: int, step: int, number: int) -> bool:
        return number < self._passes(step) - 1 or self.program.without[step] != rank

    def _samples(self, rank: int, step: int, number: int) -> int:
        return 3 + (rank + step + number) % 4 if self.program.weight else 6

    def _weight(self, rank: int, step: int, number: int) -> float:
        if not self._has_batch(rank, step, number):
            return 0.0
        if not self.program.weight:
            return 1.0
        if "says its samples" in self.program.steps[step]:
            return 1.5 + rank
        return float(self._samples(rank, step, number))

    def _loss(self, model: Any, rank: int, step: int, number: int) -> torch.Tensor:
        takes = "left"
        if self.program.unused == "find_unused_parameters" and (rank + step) % 3 == 0:
            takes = "right"
        batch = batch_of(rank, 10 * step + number, self._samples(rank, step, number))
        loss: torch.Tensor = model(batch, takes).square().mean()
        return loss * math.inf if self.program.infinite[step] == rank else loss

    def _expected(self, module: Net, members: tuple[int, ...], step: int) -> dict[str, Any] | None:
        """The averages, or None if no member had any samples."""
        count = self._passes(step)
        total = sum(self._weight(m, step, n) for m in members for n in range(count))
        if total == 0:
            return None
        found: dict[str, Any] = {}
        for member in members:
            for number in range(count):
                weight = self._weight(member, step, number)
                if weight == 0:
                    continue
                alone = copy.deepcopy(module).double()
                alone.zero_grad()
                doubled = _Doubled(alone)
                self._loss(doubled, member, step, number).backward()
                for name, each in alone.named_parameters():
                    if each.grad is not None:
                        part = each.grad * (weight * count / total)
                        found[name] = found.get(name, 0) + part
        return found

    # --- the loop ---

    def run(self) -> None:
        for step in range(len(self.program.steps)):
            self._step(step)
            if self.model.elastic.left:
                return

    def _step(self, step: int) -> None:
        model, beside = self.model, self.program.steps[step]
        if "freeze" in beside and self.program.unused != "static_graph":
            weight = model.module.first.weight
            weight.requires_grad_(not weight.requires_grad)
        if "evaluate" in beside:
            with torch.no_grad():
                model(batch_of(self.rank, step))
        if "forward in eval" in beside:
            model.eval()
            model(batch_of(self.rank, step))
            model.train()
        if "unused forward" in beside:
            model(batch_of(self.rank, step))
        if "save and load" in beside:
            model.load_communication_state_dict(copy.deepcopy(model.communication_state_dict()))
        self.optimizer.zero_grad(set_to_none="zeros in place of none" not in beside)
        before = copy.deepcopy(model.module)
        raised = ""
        for number in range(self._passes(step)):
            self._at = (step, number)
            self._die("before")
            self._die("timer")
            try:
                self._pass(step, number)
            except ValueError as error:
                raised = str(error)
            self._die("after")
        averaged = self._look(before, step, raised)
        for what in beside:
            self._report(what, step)
        if self.program.infinite[step] < 0 and "no optimizer step" not in beside and not raised:
            if "clips" in beside:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
        # Buffers of a step without samples are each rank's own.
        self.bits.append(hash_of([*model.parameters(), *(model.buffers() if averaged else ())]))
        mark(f"step {step}")

    def _pass(self, step: int, number: int) -> None:
        model = self.model
        local = number < self.program.local[step]
        with model.no_sync() if local else contextlib.nullcontext():
            if not self._has_batch(self.rank, step, number):
                model.no_batch()
                return
            if self.program.weight and "says its samples" in self.program.steps[step]:
                model.samples = self._weight(self.rank, step, number)
            if "raises and tries again" in self.program.steps[step] and (self.rank + step) % 2:
                with contextlib.suppress(Expected):
                    self._loss(model, self.rank, step, number)
                    raise Expected
            self._loss(model, self.rank, step, number).backward()

    def _look(self, before: Net, step: int, raised: str) -> bool:
        """Compares the averages; whether there are any."""
        members = self.model.elastic.members
        self.members.append(members)
        expected = self._expected(before, members, step)
        if raised and (expected is not None or "no rank has any samples" not in raised):
            self._complain(step, raised)
        if expected is None or raised:
            return False
        if self.program.infinite[step] in members:
            return True
        largest = max(float(each.abs().max()) for each in expected.values())
        tolerance = 4e-6 + TOLERANCES[self.program.wire] * self._passes(step)
        for name, each in self.model.module.named_parameters():
            if name not in expected or not each.requires_grad:
                continue
            if each.grad is None:
                self._complain(step, f"{name} has no gradient")
                continue
            off = float((each.grad.double() - expected[name]).abs().max()) / largest
            if not off <= tolerance:
                self._complain(step, f"{name}: {off} of the largest gradient, members {members}")
        return True

    def _report(self, what: str, step: int) -> None:
        elastic = self.model.elastic
        if elastic.left:
            return
        if what == "confirm":
            leads = elastic.confirm()
            if leads != elastic.leader:
                self._complain(step, f"confirm() is {leads}")
        if what not in ("mean", "weighted mean"):
            return
        value = torch.zeros(self.program.ranks, dtype=torch.float64)
        value[self.rank] = 1.0
        weights = [1.0 + rank for rank in range(self.program.ranks)]
        mean = elastic.mean(value, weight=weights[self.rank] if "weighted" in what else None)
        self.means.append(str(mean.tolist()))
        if "weighted" not in what and self.program.weight:
            count = self._passes(step)
            weights = [
                sum(self._weight(rank, step, number) for number in range(count))
                for rank in range(self.program.ranks)
            ]
        elif "weighted" not in what:
            weights = [1.0] * self.program.ranks
        counted = {rank for rank in range(self.program.ranks) if mean[rank] > 0}
        if not counted <= set(elastic.members) or (self.rank not in counted and weights[self.rank]):
            self._complain(step, f"{what} of {counted}, and the members are {elastic.members}")
        total = sum(weights[rank] for rank in counted)
        for rank in counted:
            if not math.isclose(float(mean[rank]), weights[rank] / total, rel_tol=1e-12):
                self._complain(step, f"{what} is {mean.tolist()}, with weights {weights}")

    def _complain(self, step: int, what: str) -> None:
        self.wrong = self.wrong or f"step {step}: {what}"


class _Doubled:
    """A model in float64, called as the program calls its wrapper."""

    def __init__(self, module: Net) -> None:
        self._module = module

    def __call__(self, batch: torch.Tensor, takes: str = "left") -> torch.Tensor:
        out: torch.Tensor = self._module(batch.double(), takes)
        return out


def trains(rank: int, world_size: int, program: Program) -> dict[str, Any]:
    training = Training(rank, program)
    error: Any = None
    try:
        training.run()
    except Exception as caught:
        error = describe_exception(caught)
    model = training.model
    return {
        "rank": rank,
        "members": training.members,
        "means": training.means,
        "bits": training.bits,
        "wrong": training.wrong,
        "error": error,
        "left": model.elastic.left,
        "step": model.elastic.step,
        "ended_s": time.monotonic(),
    }
