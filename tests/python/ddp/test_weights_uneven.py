"""Ranks with different numbers of batches, and a batch that one rank cannot count: the page's own
programs."""

from __future__ import annotations

import copy
from typing import Any

import documents
import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_rig import all_ranks, wrap
from torch import nn

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(200)]

LENGTHS = (4, 1, 3)  # batches of each rank


def program(mark: str) -> str:
    """The one on the page that has these words."""
    (found,) = [
        each
        for each in documents.blocks(documents.read("docs/unequal-machines.md"), "python")
        if mark in each
    ]
    return found


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(5, 2, dtype=torch.float64)


def batches_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(2 + rank + step, 5, generator=generator, dtype=torch.float64)
        for step in range(LENGTHS[rank])
    ]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch) - batch[:, :2]).square().mean()
    return loss


def uneven(rank: int, world_size: int) -> tuple[float, bool]:
    net = make_net()
    model = wrap(copy.deepcopy(net), weight="samples")
    names: dict[str, Any] = {
        "torch": torch,
        "dist": dist,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": batches_of(rank),
        "loss_of": loss_of,
    }
    exec(program("op=dist.ReduceOp.MAX"), names)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(max(LENGTHS)):
        parts = [batches_of(r)[step] for r in range(world_size) if step < LENGTHS[r]]
        optimizer.zero_grad()
        loss_of(net, torch.cat(parts)).backward()
        optimizer.step()
    mine, right = (
        torch.cat([each.detach().flatten() for each in one.parameters()]) for one in (model, net)
    )
    same = all(torch.equal(mine, each) for each in all_ranks(mine))
    return float((mine - right).abs().max()), same


def test_an_epoch_of_other_lengths_is_that_of_one_process() -> None:
    found = ranks.run_ranks(3, uneven, timeout_s=60, preload=ranks.TORCH_DDP)
    for off, same in found.values():
        assert off < 1e-14
        assert same


class Odd(nn.Module):
    """Takes batches of which the wrapper cannot tell how many samples they have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, batch: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return self.net(batch) + more.sum()


def odd(rank: int, world_size: int) -> float:
    net = Odd()
    model = wrap(copy.deepcopy(net), weight="samples")
    batch = batches_of(rank)[0]
    more = torch.zeros(len(batch) + (rank == 1), dtype=torch.float64)
    names: dict[str, Any] = {"model": model, "batch": (batch, more)}
    exec(program("for each in batch}) == 1"), names)
    parts = [batches_of(r)[0] for r in range(world_size) if r != 1]
    net(torch.cat(parts), torch.zeros(1)).square().mean().backward()
    pairs = zip(model.parameters(), net.parameters(), strict=True)
    return max(float((one.grad - other.grad).abs().max()) for one, other in pairs)  # type: ignore[operator]


def test_a_batch_that_one_rank_cannot_count_is_left_out_there() -> None:
    found = ranks.run_ranks(3, odd, timeout_s=60, preload=ranks.TORCH_DDP)
    assert max(found.values()) < 1e-14
