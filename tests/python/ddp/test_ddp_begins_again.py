"""A wrapper that begins again reduces its first pass, or says that it cannot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_rig import wrap
from torch import nn

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(300)]


class Layers(nn.Module):
    """The gradient of every element of both parameters is the batch's value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.zeros(2000)) for _ in range(2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return ((self.first + self.last) * batch).sum()


def step(model: Any, value: float) -> list[float]:
    model.zero_grad()
    model(torch.full((1,), value)).backward()
    return [float(each.grad[0]) for each in model.parameters() if each.grad is not None]


def copied(rank: int, world_size: int) -> list[list[float]]:
    model = wrap(Layers(), static_graph=True)
    step(model, float(rank))
    again = copy.deepcopy(model)
    return [step(again, float(rank)) for _ in range(2)]


def test_a_copy_reduces_its_first_pass() -> None:
    found = ranks.run_ranks(2, copied, timeout_s=100, preload=ranks.TORCH_DDP)
    assert list(found.values()) == [[[0.5, 0.5]] * 2] * 2


def other_group(rank: int, world_size: int) -> str:
    model = wrap(Layers(), sync_every=2)
    group = dist.new_group([0, 1])
    with pytest.raises(Exception, match="sync_every") as caught:
        model._update_process_group(group)
    return type(caught.value).__name__


def test_a_wrapper_that_syncs_between_hosts_keeps_its_group() -> None:
    found = ranks.run_ranks(2, other_group, timeout_s=100, preload=ranks.TORCH_DDP)
    assert set(found.values()) == {"UnsupportedError"}
