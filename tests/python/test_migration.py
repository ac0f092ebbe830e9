"""docs/migration.md: every "after" runs on two ranks, in the order in which it stands there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import ranks
from documents import read

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(300)]


def after_blocks() -> list[str]:
    return re.findall(r"^```python after\n(.*?)^```$", read("docs/migration.md"), re.M | re.S)


def run_blocks(rank: int, world_size: int) -> list[float]:
    import torch
    import torch.distributed as dist
    from torch import nn

    import pycomm

    def build_model() -> nn.Module:
        torch.manual_seed(rank)  # rank 0's is what all get
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]).float() - batch[1]).square().mean()

    sums = []
    for number, block in enumerate(after_blocks()):
        torch.manual_seed(10 * number + rank)
        batches = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(4)]
        # The group is there already: one rendezvous serves all blocks.
        assert 'dist.init_process_group("pycomm")\n' in block
        block = block.replace('dist.init_process_group("pycomm")\n', "")
        names: dict[str, Any] = {
            "build_model": build_model,
            "loss_of": loss_of,
            "batches": batches,
            "torch": torch,
            "dist": dist,
            "pycomm": pycomm,
            "print": lambda *_: None,
        }
        exec(compile(block, f"docs/migration.md, after {number + 1}", "exec"), names)
        sums.append(sum(float(p.detach().sum()) for p in names["model"].parameters()))
    return sums


def test_every_after_runs_and_leaves_the_ranks_equal() -> None:
    assert len(after_blocks()) == 7
    first, second = ranks.run_ranks(2, run_blocks, timeout_s=200, preload=ranks.TORCH_DDP).values()
    assert first == second and len(first) == 7
