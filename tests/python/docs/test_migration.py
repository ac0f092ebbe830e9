"""docs/from-*.md: every "after" runs on two ranks, in the order of the pages."""

from __future__ import annotations

import re
from typing import Any

import pytest
import ranks
from documents import read

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(300)]

PAGES = ["docs/from-torch.md", "docs/from-horovod.md", "docs/from-diloco.md"]


def after_blocks() -> list[str]:
    text = "".join(map(read, PAGES))
    return re.findall(r"^```python after\n(.*?)^```$", text, re.M | re.S)


PLAIN_LOOP = """\
for batch in batches:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
"""


def batches_of(block: int, rank: int) -> list[Any]:
    import torch

    torch.manual_seed(10 * block + rank)
    return [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(4)]


def run_blocks(rank: int, world_size: int) -> list[tuple[list[float], list[float]]]:
    """Each block's parameters at the end; and, of those with the plain loop, what one process has
    that averages the loss over the batches of all ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import pycomm

    def build_model() -> nn.Module:
        torch.manual_seed(rank)  # rank 0's is what all get
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]).float() - batch[1]).square().mean()

    def flat(model: nn.Module) -> list[float]:
        return [float(each) for p in model.parameters() for each in p.detach().flatten()]

    def alone(number: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parts in zip(*(batches_of(number, each) for each in range(world_size)), strict=True):
            optimizer.zero_grad()
            torch.stack([loss_of(model, part) for part in parts]).mean().backward()
            optimizer.step()
        return flat(model)

    trained = []
    for number, block in enumerate(after_blocks()):
        batches = batches_of(number, rank)
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
        exec(compile(block, f"migration, after {number + 1}", "exec"), names)
        trained.append((flat(names["model"]), alone(number) if PLAIN_LOOP in block else []))
    return trained


def test_every_after_trains_all_ranks_as_one_process_would() -> None:
    assert len(after_blocks()) == 9
    first, second = ranks.run_ranks(2, run_blocks, timeout_s=200, preload=ranks.TORCH_DDP).values()
    assert first == second and len(first) == 9
    compared = [(mine, alone) for mine, alone in first if alone]
    assert len(compared) == 3
    for mine, alone in compared:
        assert mine == pytest.approx(alone, rel=1e-2, abs=1e-3)  # one of them sends fp16
