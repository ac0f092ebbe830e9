"""A rank of the tests of joining: it founds a training, or joins one, and notes each step."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import elastic_training
import fault_ranks
import torch
import torch.distributed as dist
from elastic_rig import Net
from log_lines import LogLines
from rank_child import describe_exception, mark
from torch.utils._pytree import tree_leaves

import pycomm
from pycomm._native import loader

MOST_STEPS = 40_000
STEPS_AFTER = 15
USED = 5
MOMENTUM = {"lr": 0.02, "momentum": 0.9}
SETTINGS = {"Adam": {"lr": 0.003}, "NAdam": {"lr": 0.003}, "SGD": MOMENTUM}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a rank trains."""

    peers: str
    """The file of handles, or an address; "": PYCOMM_PEERS."""
    last: int
    """It ends some steps after a member of this number, or a later one, has come."""
    join: bool = False
    wire: str | None = None
    optimizer: str = "Adam"
    """A class of torch.optim, or of this module."""
    dtype: torch.dtype | None = None
    """Of the parameters."""
    gone: str = ""
    """After ``USED`` steps no rank uses or trains some parameters any more. Their gradients stay:
    "zeros", or "values"."""
    passes: int = 1
    """``accumulate``."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Of ``pycomm.Elastic``."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of the wrapper."""
    payload: int = 0
    """Elements of a tensor that is part of the state."""
    dies: tuple[int, str] = (-1, "")
    """A member's number (for a process that joins, any number below 0), and where it kills itself:
    "gives" or "loads"."""
    struck: tuple[int, str] = (-1, "")
    """A rank of the founders, or any if it joins, and the fault points that it arms, of the build
    that has them."""
    wide: bool = False
    """Another model."""
    asks: bool = False
    """It asks for means and a confirmation after each step."""
    asks_between: bool = False
    """It asks for a mean between the passes of a step."""
    check: bool = True
    reads_for: float = 0.0
    """Seconds that it takes to read a part of the state."""
    waits_for: str = ""
    """A file: a founder makes no further step from its tenth one on before it is there."""
    points: int = 0
    """``join_pause=None``: it calls ``join_point()`` behind every so many steps."""
    point_times: tuple[int, int] = (-1, 1)
    """A rank that calls it so often there; -1: all do."""
    late: int = -1
    """A founder that learns from the next members only that the step before the first
    ``join_point()`` counts: rank 0 calls that when it knows of the death that makes them. Of the
    build with fault points."""
    struck_in_stop: tuple[int, str] = (-1, "")
    """A rank of the founders, and the fault points that it arms for as long as it is where members
    stop before a forward pass."""
    ends: str = ""
    """A file with the step before which all end, once it is there."""
    fails: bool = False
    """A process that joins raises when it is a member, and keeps the exception for a minute."""


class Fp32Momentum(torch.optim.Optimizer):
    """Its state is float32 whatever the parameters are, also after torch has cast it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, dict(MOMENTUM))

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self._move(each, group["lr"], group["momentum"])

    @torch.no_grad()
    def _move(self, parameter: torch.Tensor, rate: float, momentum: float) -> None:
        state = self.state[parameter]
        if not state:
            state["of"] = {"momentum": torch.zeros_like(parameter, dtype=torch.float32)}
        moving = state["of"]["momentum"].mul_(momentum).add_(parameter.grad)
        parameter.sub_(rate * moving)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["of"] = {key: each.float() for key, each in state["of"].items()}


class HiddenMomentum(torch.optim.SGD):
    """Its ``state_dict()`` is made from state that only its ``load_state_dict()`` reaches."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, **MOMENTUM)
        self._scale = torch.tensor(0.3)

    def state_dict(self) -> Any:
        packed = super().state_dict()
        first = {**packed["state"].get(0, {}), "scale": self._scale}
        return {**packed, "state": {**packed["state"], 0: first}}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._scale = state_dict["state"][0]["scale"].bfloat16()


class Ballast:
    """A part of the state of a size, in which a process may end."""

    def __init__(self, plan: Plan) -> None:
        self._dies = plan.dies[1]
        self.armed = plan.join
        self.values = torch.zeros(max(1, plan.payload), dtype=torch.uint8)
        self.count = 0
        self._reads_for = plan.reads_for

    def _die(self, where: str) -> None:
        mark(where)
        if self.armed and self._dies == where:
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self) -> dict[str, Any]:
        self._die("gives")
        time.sleep(self._reads_for)
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._die("loads")
        self.values = state["values"]
        self.count = state["count"]


def trains(rank: int, world_size: int, plan: Plan) -> dict[str, Any]:
    """Its members and bits after each step, and its gradients checked against float64."""
    net = Net(unused=bool(plan.gone))
    if plan.wide:
        net.left = torch.nn.Linear(200, 9)
    if plan.dtype is not None:
        net.to(plan.dtype)
        net.register_forward_pre_hook(lambda _, args: (args[0].to(plan.dtype), *args[1:]))
    if plan.join:
        with torch.no_grad():
            for each in net.parameters():
                each.fill_(7.0)  # which the members' values must replace
                each.grad = torch.full_like(each, 7.0)
    kind: Any = globals().get(plan.optimizer) or getattr(torch.optim, plan.optimizer)
    optimizer = kind(net.parameters(), **SETTINGS.get(plan.optimizer, {}))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.97)
    ballast = Ballast(plan)
    ballast.armed = plan.join or rank == plan.dies[0]
    if plan.join and plan.struck[1]:
        loader.load().arm_fault_points(plan.struck[1])
    error: Any = None
    if plan.fails:
        fail_to_follow()
    mark("asks")
    began_s = time.monotonic()
    try:
        model = pycomm.DistributedDataParallel(
            net,
            wire_dtype=plan.wire,
            bucket_cap_mb=0.02,
            accumulate=plan.passes,
            elastic=pycomm.Elastic(
                peers=plan.peers or None,
                state=[optimizer, scheduler, ballast],
                join=plan.join,
                **dict(plan.settings),
            ),
            **dict(plan.options),
        )
    except Exception as caught:
        after_s = time.monotonic() - began_s
        if plan.fails:
            mark("failed")
            time.sleep(60.0)  # with what the exception refers to
        return {"error": describe_exception(caught), "after_s": after_s}
    if not plan.join and rank == plan.struck[0]:
        loader.load().arm_fault_points(plan.struck[1])
    if not plan.join and rank == plan.struck_in_stop[0]:
        strike_in_stop(model, plan.struck_in_stop[1])
    if not plan.join and rank == plan.late:
        learn_late(model, plan.points)
    lines = LogLines() if plan.late >= 0 else None
    mark("trains")
    mine = model.elastic.members[model.elastic.rank]
    oracle = elastic_training.Plan(plan.wire, passes=plan.passes)
    steps: list[dict[str, Any]] = []
    wrong = ""
    asked_s = 0.0
    left = STEPS_AFTER
    try:
        while left > 0 and len(steps) < MOST_STEPS:
            step = model.elastic.step
            if plan.ends and os.path.exists(plan.ends) and step >= int(Path(plan.ends).read_text()):
                break
            while plan.waits_for and len(steps) >= 10 and not os.path.exists(plan.waits_for):
                time.sleep(0.02)
            checks = plan.check and (step < 20 or left < STEPS_AFTER or len(steps) < 20)
            zero_grad(net, optimizer, plan)
            if plan.gone and step == USED:
                net.wide.bias.requires_grad_(False)
            takes = functools.partial(model, takes="right") if plan.gone and step < USED else model
            before = [each.detach().clone() for each in (*net.parameters(), *net.buffers())]
            for number in range(plan.passes):
                if plan.asks_between and number > 0:
                    model.elastic.mean(float(number))
                elastic_training.loss_of(takes, oracle, mine, step, number).backward()
            members = model.elastic.members
            if checks:
                wrong = wrong or difference(net, before, oracle, members, step)
            optimizer.step()
            scheduler.step()
            ballast.count += 1
            began_s = time.monotonic()
            if plan.asks:
                found = model.elastic.mean(float(step))
                if found != step:
                    wrong = wrong or f"step {step}: the mean of it is {found}"
                model.elastic.mean(torch.tensor([float(mine)]))
                model.elastic.confirm()
            asked_s = max(asked_s, time.monotonic() - began_s)
            if plan.points and model.elastic.step % plan.points == 0:
                mark(f"point {step}")
                if mine == 0 and lines is not None and step < plan.points:
                    assert lines.that_have("without rank", within_s=60.0)
                began_s = time.monotonic()
                for _ in range(plan.point_times[1] if plan.point_times[0] in (-1, rank) else 1):
                    model.elastic.join_point()
                asked_s = max(asked_s, time.monotonic() - began_s)
            steps.append(
                {
                    "step": step,
                    "members": members,
                    "bits": digest(net, optimizer, scheduler, ballast),
                    "ended_s": time.monotonic(),
                }
            )
            if len(steps) % 10 == 1 or left < STEPS_AFTER:
                mark(f"step {step}")
            left -= 1 if max(members) >= plan.last or left < STEPS_AFTER else 0
    except Exception as caught:
        error = describe_exception(caught)
    return {
        "mine": mine,
        "steps": steps,
        "wrong": wrong,
        "error": error,
        "asked_s": asked_s,
        "stats": dataclasses.asdict(model.stats()),
    }


start = functools.partial(elastic_training.start_training, trains)


def zero_grad(net: Net, optimizer: Any, plan: Plan) -> None:
    stays = [net.wide.bias, *net.right.parameters()] if plan.gone == "values" else []
    gradients = [each.grad for each in stays]
    optimizer.zero_grad(set_to_none=plan.gone != "zeros")
    for each, gradient in zip(stays, gradients, strict=True):
        each.grad = gradient


def strike_in_stop(model: Any, spec: str) -> None:
    arm = loader.load().arm_fault_points
    model.register_forward_pre_hook(lambda *_: arm(spec), prepend=True)
    model.register_forward_pre_hook(lambda *_: arm(""))


def learn_late(model: Any, step: int) -> None:
    """The commit round of this step ends here when the next members have agreed that it counts."""
    loader.load().arm_fault_points(f"survive.committed:{step}:hold")

    def go_on() -> None:
        while model._agreement.steps() < step:
            time.sleep(0.01)
        loader.load().arm_fault_points("")

    threading.Thread(target=go_on, daemon=True).start()


def fail_to_follow() -> None:
    """From now on a process that joins raises as it makes its reducer."""
    import pycomm.ddp.joining

    def follow(*_: object) -> None:
        raise RuntimeError("no memory, say")

    pycomm.ddp.joining.follow = follow


def difference(
    net: Net, before: list[torch.Tensor], oracle: Any, members: tuple[int, ...], step: int
) -> str:
    """The first wrong average of a step, as float64 has it; "" if there is none."""
    alone = Net()
    with torch.no_grad():
        for each, value in zip((*alone.parameters(), *alone.buffers()), before, strict=True):
            each.copy_(value)
    expected = elastic_training.exact(alone, oracle, members, step)
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, each in net.named_parameters():
        assert each.grad is not None
        off = float((each.grad - expected[name]).abs().max()) / largest
        if off > elastic_training.TOLERANCES[oracle.wire] * oracle.passes:
            return f"step {step}, members {members}, {name}: {off} of the largest gradient"
    return ""


def digest(net: Net, optimizer: Any, scheduler: Any, ballast: Ballast) -> str:
    """Of all that a process trains with."""
    tensors = [*net.parameters(), *net.buffers()]
    for group in optimizer.param_groups:
        tensors.append(torch.tensor(group["lr"], dtype=torch.float64))
        for each in group["params"]:
            leaves = tree_leaves(sorted(optimizer.state.get(each, {}).items()))
            tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tensors.append(torch.tensor([scheduler.last_epoch, ballast.count]))
    return elastic_training.hash_of(tensors)


def trains_with_faults(rank: int, world_size: int, path: str, plan: Plan) -> dict[str, Any]:
    """The same with the build that has fault points."""
    fault_ranks.use_fault_build()
    dist.init_process_group(
        "pycomm", init_method=f"file://{path}", rank=rank, world_size=world_size
    )
    return trains(rank, world_size, plan)
