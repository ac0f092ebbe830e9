"""What the tests of the DDP wrapper share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def wrap(module: nn.Module, **options: Any) -> Any:
    """A module in pycomm's wrapper; only here, so that a rank decides when pycomm comes in."""
    import pycomm

    return pycomm.DistributedDataParallel(module, **options)


def all_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """This tensor as every rank has it."""
    tensor = tensor.contiguous()  # empty_like keeps strides
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return gathered


class Layers(nn.Module):
    """The gradient of every element of both parameters is the batch's value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.zeros(2000)) for _ in range(2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return ((self.first + self.last) * batch).sum()


def step(model: Any, value: float) -> list[float]:
    """A pass of ``Layers``; the first gradient of each parameter."""
    model.zero_grad()
    model(torch.full((1,), value)).backward()
    return [float(each.grad[0]) for each in model.parameters() if each.grad is not None]
