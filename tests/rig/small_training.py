"""A small network, its data and its training: for tests of lossy codecs and hooks."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.Linear(200, 8))


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 64, generator=generator)
    return inputs, torch.tanh(inputs[:, :8] * 2 + inputs[:, 8:16])


def train(model: nn.Module, rank: int, steps: int, scale: float = 1.0) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / scale, momentum=0.9)
    losses = []
    for step in range(steps):
        inputs, targets = batch_of(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets) * scale
        loss.backward()
        optimizer.step()
        losses.append(float(loss) / scale)
    return losses


def digest(*tensors: torch.Tensor) -> str:
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().contiguous().numpy().tobytes())
    return state.hexdigest()
