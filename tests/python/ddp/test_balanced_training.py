"""``BalancedSampler`` with the wrapper: real steps of ranks of which one is slowed."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import ranks
import torch
from ddp_rig import wrap
from torch import nn
from torch.utils.data import DataLoader, Dataset

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(300)]

NUMEL = 4000
GLOBAL_BATCH = 48
SECONDS_PER_SAMPLE = (1e-3, 4e-3)


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return NUMEL

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(6, generator=generator, dtype=torch.float64)
        return inputs, inputs[:2] * 3 + index % 5


class Slowed(nn.Module):
    """Takes a given time for each sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 2, dtype=torch.float64)
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(inputs))  # 2 ranks on 2 cores, and whatever else runs there
        return self.layer(inputs)


def trained(rank: int, world_size: int, workers: int) -> dict[str, Any]:
    import pycomm

    net = Slowed(SECONDS_PER_SAMPLE[rank])
    model = wrap(copy.deepcopy(net), weight="samples")
    sampler = pycomm.BalancedSampler(Numbers(), global_batch=GLOBAL_BATCH, model=model, lookahead=6)
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sizes = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        sizes.append(len(inputs))
        if len(sizes) == 40:
            break
    stats = sampler.stats()
    return {
        "sizes": sizes,
        "shares": stats.shares,
        "weight": model.module.layer.weight.detach(),
        "steps": model.step_log.steps,
    }


def alone() -> torch.Tensor:
    """One process with the whole batches, in the sampler's order of indices."""
    from pycomm._deal import epoch_order

    net, data = Slowed(0), Numbers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    order = epoch_order(NUMEL, seed=0, epoch=0, shuffle=True).tolist()
    for step in range(40):
        batch = order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        inputs = torch.stack([data[i][0] for i in batch])
        targets = torch.stack([data[i][1] for i in batch])
        optimizer.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        optimizer.step()
    return net.layer.weight.detach()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_rank_gets_fewer_samples_and_weights_are_those_of_one_process(workers: int) -> None:
    found = ranks.run_ranks(2, trained, args=(workers,), timeout_s=120, preload=ranks.TORCH_DDP)
    fast, slow = found.values()
    assert all(a + b == GLOBAL_BATCH for a, b in zip(fast["sizes"], slow["sizes"], strict=True))
    assert fast["sizes"][0] == slow["sizes"][0] == GLOBAL_BATCH // 2
    assert fast["shares"] == slow["shares"]
    # 38.4 and 9.6 samples would take equally long, but for what a step costs besides.
    assert 34 <= fast["sizes"][-1] <= 42, (fast["sizes"], slow["sizes"])
    assert fast["steps"] == slow["steps"] == 40
    assert torch.equal(fast["weight"], slow["weight"])
    assert torch.allclose(fast["weight"], alone(), rtol=0, atol=1e-12)
