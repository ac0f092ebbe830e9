"""What the integration tests train, and what one process makes of it: the oracle of the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

WIDTH = 24
BATCH = 8


def make_model(seed: int = 0) -> nn.Sequential:
    """The same parameters wherever it is called; 37 rows cannot be cut evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, 37), nn.ReLU(), nn.Linear(37, WIDTH)
    )


def batch_of(step: int, rank: int = 0, world_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the step's batch; with one rank, all of it."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    targets = torch.randn(BATCH, WIDTH, generator=generator)
    part = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    return inputs[part], targets[part]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def train_alone(steps: int, lr: float = 0.05) -> tuple[list[float], nn.Module]:
    """SGD on the whole batches, in one process. Returns the losses and the trained model."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of the tensors' bytes."""
    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def assert_close(
    got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float
) -> None:
    """All tensors are there, and no element is further off than `tolerance`."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].shape == tensor.shape, name
        difference = float((got[name] - tensor).abs().max())
        assert difference <= tolerance, f"{name}: {difference}"
