"""A rank dies in a backward pass through two wrappers, each with members and steps of its own."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import ranks
import rings
import torch
from ddp_rig import wrap
from elastic_rig import Net, batch_of

pytestmark = [
    pytest.mark.ci,
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.timeout(200),
]


def trains_two(rank: int, world_size: int, doomed: int) -> list[Any]:
    """The graph's order is another one on each rank, and so is that of the last gradients."""
    import pycomm

    models = [wrap(Net(), elastic=pycomm.Elastic()) for _ in range(2)]

    def die(grad: torch.Tensor) -> None:
        if rank == doomed and models[0].elastic.step == 4:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

    models[1].module.wide.weight.register_hook(die)
    seen = []
    for step in range(8):
        for model in models:
            model.zero_grad()
        order = models if (rank + step) % 2 else models[::-1]
        losses = [model(batch_of(rank, step)).square().mean() for model in order]
        (losses[0] + losses[1]).backward()
        grads = [model.module.wide.weight.grad.clone() for model in models]
        assert torch.equal(*grads)
        seen.append((models[0].elastic.members, models[1].elastic.members, float(grads[0].sum())))
    return seen


@pytest.mark.parametrize("doomed", rings.first_of([0, 2]))
def test_both_go_on_without_it(doomed: int) -> None:
    results = ranks.run_ranks(
        3, trains_two, args=(doomed,), timeout_s=60, check=False, preload=ranks.TORCH_DDP
    )
    alive = [result for result in results if result.rank != doomed]
    assert all(result.ok for result in alive), results.describe()
    left = tuple(result.rank for result in alive)
    for result in alive:
        assert result.value == alive[0].value
        assert result.value[-1][:2] == (left, left)
