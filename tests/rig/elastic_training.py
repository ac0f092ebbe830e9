"""What a rank of the tests of killed trainings does: it trains, and notes what each step was."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fault_ranks
import torch
import torch.distributed as dist
from elastic_rig import Net, batch_of
from rank_child import describe_exception, mark
from ranks import TORCH_DDP, start_ranks

import pycomm
from pycomm._native import loader

SHARED: dict[str, Any] = {"transport": "shm"}
TCP: dict[str, Any] = {"transport": "tcp"}

TOLERANCES: dict[str | None, float] = {
    None: 2e-6,
    "fp32": 2e-6,
    "bf16": 2.0**-7,
    "fp16": 2.0**-9,
    "int8": 0.05,
}
"""With how much an average of this wire dtype may be wrong, of the largest gradient."""

MOST_STEPS = 5000
STEPS_AFTER = 15


def start_training(
    target: Callable[..., Any], world_size: int, plan: Any, options: dict[str, Any], **env: str
) -> Any:
    """Ranks that each call ``target(rank, world_size, plan)``, over a group with these options."""
    return start_ranks(
        world_size,
        target,
        args=(plan,),
        pg_options=options,
        preload=TORCH_DDP,
        env={"OMP_NUM_THREADS": "1", **env},
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a rank trains."""

    wire: str | None = None
    left: int = 1
    """It ends when so few members have made some steps: how fast it is does not matter."""
    steps: int = MOST_STEPS
    """Or after so many."""
    passes: int = 1
    """``accumulate``."""
    samples: bool = False
    """Batches of other sizes on each rank, which count by them."""
    evaluates: tuple[int, int, float] = (-1, -1, 0.0)
    """A rank, the step before which it evaluates, and for how many seconds."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Of ``pycomm.Elastic``."""
    dies: tuple[tuple[int, int, str], ...] = ()
    """Ranks that kill themselves: which, in which step, and where: "loader", "forward", "backward",
    "step" (behind the two)."""
    terms: tuple[tuple[int, int, str], ...] = ()
    """Ranks that get a SIGTERM, likewise."""
    struck: tuple[int, int, str] = (-1, -1, "")
    """A rank, the step before which it arms fault points, and these: of the build that has them."""


def samples_of(plan: Plan, member: int, step: int, number: int) -> int:
    return 3 + (member + step + number) % 4 if plan.samples else 6


def loss_of(model: Any, plan: Plan, member: int, step: int, number: int) -> torch.Tensor:
    samples = samples_of(plan, member, step, number)
    loss: torch.Tensor = model(batch_of(member, 10 * step + number, samples)).square().mean()
    return loss


def exact(module: Net, plan: Plan, members: tuple[int, ...], step: int) -> dict[str, torch.Tensor]:
    """The averages over these members at the module's present parameters, added in float64."""
    sums: dict[str, Any] = {}
    passes = [(member, number) for member in members for number in range(plan.passes)]
    total = sum(samples_of(plan, member, step, number) for member, number in passes)
    for member, number in passes:
        alone = copy.deepcopy(module)
        alone.zero_grad()
        loss_of(alone, plan, member, step, number).backward()
        part = samples_of(plan, member, step, number) * plan.passes / total
        for name, each in alone.named_parameters():
            sums[name] = sums.get(name, 0) + each.grad.double() * part
    return sums


class FedBack(NamedTuple):
    """Of one parameter after a step: what this rank keeps, and what arrived above the mean."""

    kept: list[float]
    more: list[float]
    largest: float
    """Gradient of the step."""


def check_feedback(values: Sequence[dict[str, Any]]) -> None:
    """What arrived since the last change of members, and what they have kept, is what they gave."""
    members = values[0]["members"]
    for step in range(max(1, members.index(members[-1])), len(members)):
        before, after = (
            torch.tensor([value["fed_back"][each].kept for value in values]).double().sum(0)
            for each in (step - 1, step)
        )
        fed_back = values[0]["fed_back"][step]
        off = (before - after - torch.tensor(fed_back.more).double()).abs().max()
        assert float(off) <= 1e-5 * fed_back.largest, (step, float(off), fed_back.largest)


def hash_of(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def trains(rank: int, world_size: int, plan: Plan) -> dict[str, Any]:
    """Its members and bits after each step, checked against float64; and how it ended."""
    options: dict[str, Any] = {"weight": "samples"} if plan.samples else {}
    model = pycomm.DistributedDataParallel(
        Net(),
        wire_dtype=plan.wire,
        bucket_cap_mb=0.02,
        accumulate=plan.passes,
        elastic=pycomm.Elastic(**dict(plan.settings)),
        **options,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    at = [-1]

    def reach(where: str) -> None:
        if (rank, at[0], where) in plan.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if (rank, at[0], where) in plan.terms:
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: model.elastic.leave())
    model.module.first.register_forward_hook(lambda *_: reach("forward"))
    model.module.wide.weight.register_hook(lambda _: reach("backward"))
    members: list[tuple[int, ...]] = []
    bits: list[str] = []
    ended_s: list[float] = []
    wrong = ""
    error: Any = None
    raised_s = 0.0
    fed_back: list[FedBack] = []
    mark("trains")
    try:
        for step in range(plan.steps):
            if step >= STEPS_AFTER and len(members[-STEPS_AFTER]) <= plan.left:
                break
            at[0] = step
            reach("loader")
            if plan.struck[:2] == (rank, step):
                loader.load().arm_fault_points(plan.struck[2])
            if plan.evaluates[:2] == (rank, step):
                mark("evaluates")
                until = time.monotonic() + plan.evaluates[2]
                while time.monotonic() < until:
                    with torch.no_grad():
                        model(batch_of(rank, step))
            optimizer.zero_grad()
            before = copy.deepcopy(model.module)
            for number in range(plan.passes):
                loss_of(model, plan, rank, step, number).backward()
            members.append(model.elastic.members)
            ended_s.append(time.monotonic())
            expected = exact(before, plan, members[-1], step)
            largest = max(float(each.abs().max()) for each in expected.values())
            for name, each in model.module.named_parameters():
                off = float((each.grad - expected[name]).abs().max()) / largest
                if off > TOLERANCES[plan.wire] * plan.passes:
                    wrong = wrong or f"step {step}, {name}: {off} of the largest gradient"
            if plan.wire == "int8" and not plan.samples:
                kept = model.communication_state_dict()["residuals"]
                (kept_here,) = [each for name, each in kept.items() if name.endswith("wide.bias")]
                more = model.module.wide.bias.grad - expected["wide.bias"]
                fed_back.append(FedBack(kept_here.tolist(), more.tolist(), largest))
            bits.append(hash_of((*model.parameters(), *model.buffers())))
            mark(f"step {step}")
            reach("step")
            optimizer.step()
            if model.elastic.left:
                break
    except Exception as caught:
        raised_s = time.monotonic()
        error = describe_exception(caught)
    return {
        "members": members,
        "bits": bits,
        "ended_s": ended_s,
        "wrong": wrong,
        "error": error,
        "raised_s": raised_s,
        "fed_back": fed_back,
        "left": model.elastic.left,
        "strikes": [each[2] for each in loader.load().fault_points()] if plan.struck[2] else [],
        "stats": dataclasses.asdict(model.stats()),
    }


start = functools.partial(start_training, trains)


def trains_with_faults(rank: int, world_size: int, store: str, plan: Plan) -> dict[str, Any]:
    """The same with the build that has fault points."""
    fault_ranks.use_fault_build()
    dist.init_process_group(
        "pycomm",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        pg_options=pycomm.Options(**SHARED),
    )
    return trains(rank, world_size, plan)


def start_with_faults(world_size: int, folder: Path, plan: Plan) -> Any:
    args = (str(folder / "store"), plan)
    env = {"OMP_NUM_THREADS": "1"}
    return start_ranks(
        world_size, trains_with_faults, args=args, init="none", only_pycomm=True, env=env
    )
