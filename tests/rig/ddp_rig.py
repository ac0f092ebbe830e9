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
