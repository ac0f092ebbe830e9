"""Pipeline parallel, and pipeline with tensor parallel over a 2-D mesh, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import case
from test_sharding import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from training import WIDTH, assert_close, batch_of, parameters_of

pytestmark = [pytest.mark.needs_native, pytest.mark.nightly]

STEPS = 4
LR = 0.05
STAGES = 4
MICROBATCHES = 4
EXACT = 4e-6


def make_stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH)) for _ in range(STAGES)
    ]


def loss_function(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process, all stages; micro-batches are of one size, so their mean is the batch's."""
    model = nn.Sequential(*make_stages())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch_of(step)
        loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, parameters_of(model)


def run_pipeline(rank: int, world_size: int, how: str) -> Any:
    """Returns the losses (on the last stage) and this rank's stages' parameters, by their place."""
    tensor_parallel = 2 if how == "with tensor parallel" else 1
    mesh = init_device_mesh(
        "cpu", (world_size // tensor_parallel, tensor_parallel), mesh_dim_names=("pp", "tp")
    )
    depth, place = mesh["pp"].size(), mesh.get_local_rank("pp")
    layers = make_stages()
    if how == "interleaved 1F1B":
        mine = {number: layers[number] for number in range(STAGES) if number % depth == place}
    else:
        each = STAGES // depth
        mine = {place: nn.Sequential(*layers[place * each : (place + 1) * each])}
    if tensor_parallel > 1:
        for stage in mine.values():
            plan = {
                f"{n}.{part}": kind
                for n in range(len(list(stage.children())))
                for part, kind in (("0", ColwiseParallel()), ("2", RowwiseParallel()))
            }
            parallelize_module(stage, mesh["tp"], plan)
    total = STAGES if how == "interleaved 1F1B" else depth
    stages = [
        PipelineStage(stage, number, total, torch.device("cpu"), group=mesh["pp"].get_group())
        for number, stage in mine.items()
    ]
    schedule: Any
    if how == "interleaved 1F1B":
        schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_function)
    else:
        kind = ScheduleGPipe if how == "GPipe" else Schedule1F1B
        schedule = kind(stages[0], MICROBATCHES, loss_fn=loss_function)
    optimizer = torch.optim.SGD([p for s in mine.values() for p in s.parameters()], lr=LR)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch_of(step)
        parts: list[torch.Tensor] = []
        arguments = (inputs,) if place == 0 else ()
        if place == depth - 1:
            schedule.step(*arguments, target=targets, losses=parts)
            losses.append(float(torch.stack(parts).mean()))
        else:
            schedule.step(*arguments)
        optimizer.step()
    return losses, {number: full(stage) for number, stage in mine.items()}


PIPELINES = [
    ("GPipe", 2),
    ("1F1B", 2),
    ("interleaved 1F1B", 2),
    ("with tensor parallel", 4),
]


@pytest.mark.parametrize(
    ("how", "world_size"),
    [
        pytest.param(how, size, marks=case(run_pipeline, how, world_size=size), id=how)
        for how, size in PIPELINES
    ],
)
@pytest.mark.integration("torch", "pipeline parallel, losses and parameters as one process")
def test_pipeline(how: str, world_size: int, values: list[Any]) -> None:
    losses, parameters = alone()
    seen = [got for got, _ in values if got]
    assert seen
    for got in seen:
        assert got == pytest.approx(losses, abs=1e-5)
    found: dict[str, torch.Tensor] = {}
    for _, stages in values:
        for number, stage in stages.items():
            for name, tensor in stage.items():
                # A stage is one of the layers, or several of them in a row.
                if how == "interleaved 1F1B":
                    found[f"{number}.{name}"] = tensor
                else:
                    layer, _, rest = name.partition(".")
                    found[f"{number * 2 + int(layer)}.{rest}"] = tensor
    assert_close(found, parameters, EXACT)
