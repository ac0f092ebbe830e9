"""The DDP wrapper on CUDA parameters, with a device that is host memory and torch's CPU kernels.

The device's copies are late and nothing but events orders its streams; the bucket kernels are the
CUDA library's own, run when their stream comes to them. Comm hooks and
torch's own wrapper need a torch with CUDA.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda_device import Device, preloading
from ranks import run_ranks
from torch import nn

import pycomm

# The first test compiles the library: some ten seconds, minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)

STEPS = 3
RANKS = 2
SAMPLES = 8  # a rank and step


def _run(target: Callable[..., Any], library: Path, *args: Any) -> list[Any]:
    # Eight trainings, every operator through the fake: 75 s where others use the cores, too.
    given = (str(library), *args)
    environment = preloading(library)
    ranks = run_ranks(RANKS, target, args=given, env=environment, fresh=True, timeout_s=300)
    return ranks.values()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 5)
    )


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 + step)
    samples = torch.randn(RANKS * SAMPLES, 20, generator=made)
    return samples, torch.randn(RANKS * SAMPLES, 5, generator=made)


def _loss(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (got - wanted).square().mean()


def _weights(model: nn.Module) -> list[Any]:
    return [parameter.detach().cpu().numpy() for parameter in model.parameters()]


def _alone() -> list[Any]:
    """One process on the CPU with all samples."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(STEPS):
        samples, wanted = _batch(step)
        _loss(model(samples), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _weights(model)


def _train(rank: int, ddp: nn.Module) -> list[Any]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, foreach=False)
    for step in range(STEPS):
        samples, wanted = (
            each[rank * SAMPLES : (rank + 1) * SAMPLES].to("cuda:0") for each in _batch(step)
        )
        _loss(ddp(samples), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _weights(ddp)


# What a wire of each kind may be off by after the steps; gradients are below 1.
WRAPPED: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 1e-5),
    "several buckets": ({"bucket_cap_mb": 0.001}, 1e-5),
    "no views": ({"gradient_as_bucket_view": False}, 1e-5),
    "bf16": ({"wire_dtype": "bf16"}, 1e-2),
    "fp16": ({"wire_dtype": "fp16"}, 1e-3),
    "fp16, no views": ({"wire_dtype": "fp16", "gradient_as_bucket_view": False}, 1e-3),
    "int8": ({"wire_dtype": "int8"}, 1e-2),
    "find_unused_parameters": ({"find_unused_parameters": True}, 1e-5),
}


def _wrappers(rank: int, size: int, library: str, nccl: bool, names: list[str]) -> dict[str, Any]:
    device = Device(Path(library), nccl=nccl)
    group = dist.new_group(
        list(range(size)),
        pg_options=pycomm.Options(cuda_mode="nccl" if nccl else "tcp"),  # type: ignore[arg-type]
    )
    results: dict[str, Any] = {}
    for name in names:
        model = _model().to("cuda:0")
        options, _ = WRAPPED[name]
        before = device.library.fake_launches()
        ddp = pycomm.DistributedDataParallel(model, process_group=group, **options)
        results[name] = _train(rank, ddp)
        results[f"launches of {name}"] = device.library.fake_launches() - before
    return results


@pytest.mark.parametrize("nccl", [False, True], ids=["host", "nccl"])
def test_training_gives_what_one_process_gives(fake_cuda: Path, nccl: bool) -> None:
    alone = _alone()
    names = [name for name in WRAPPED if not nccl or name in ("plain", "fp16", "no views")]
    ranks = _run(_wrappers, fake_cuda, nccl, names)
    for got in ranks:
        for name, bound in [(n, WRAPPED[n][1]) for n in names]:
            for mine, other, expected in zip(got[name], ranks[0][name], alone, strict=True):
                assert (mine == other).all(), f"{name}: ranks differ"
                assert abs(mine - expected).max() < bound, name
        # All buckets' gradients in one launch each, a step: views need no second one.
        assert got["launches of plain"] == STEPS
        assert got["launches of no views"] == 2 * STEPS
        assert got["launches of fp16"] >= 2 * STEPS, "and one more where the scale was wrong"


def _amp(rank: int, size: int, library: str) -> tuple[list[Any], list[float]]:
    Device(Path(library), nccl=True)
    group = dist.new_group(
        list(range(size)),
        pg_options=pycomm.Options(cuda_mode="tcp"),  # type: ignore[arg-type]
    )
    ddp = pycomm.DistributedDataParallel(_model().to("cuda:0"), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, foreach=False)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    scales = []
    before = copy.deepcopy(_weights(ddp))
    for step in range(STEPS + 1):
        samples, wanted = (
            each[rank * SAMPLES : (rank + 1) * SAMPLES].to("cuda:0")
            for each in _batch(max(step - 1, 0))
        )
        with torch.autocast("cuda", dtype=torch.float16):
            loss = _loss(ddp(samples).float(), wanted)
        if step == 0 and rank == 1:
            loss = loss * float("inf")  # on one rank: every rank must skip this step
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(float(scaler.get_scale()))
        if step == 0:
            assert all((a == b).all() for a, b in zip(before, _weights(ddp), strict=True))
    return _weights(ddp), scales


def test_grad_scaler_and_autocast(fake_cuda: Path) -> None:
    alone = _alone()
    ranks = _run(_amp, fake_cuda)
    for weights, scales in ranks:
        assert scales == [512.0] * (STEPS + 1), "the first step was skipped, and no other"
        for mine, other, expected in zip(weights, ranks[0][0], alone, strict=True):
            assert (mine == other).all()
            assert abs(mine - expected).max() < 1e-2
